"""An interface that was found by its place rather than by its address, in a network namespace of the test's own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.root
ROOT = Path(__file__).parents[4]
OLD, NEW = "02:00:00:00:00:01", "02:00:00:00:00:02"
PROGRAM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from guest.agent.net import links
from protos.agent.types_pb2 import Interface, IPAddress
address = IPAddress(address="10.9.8.7", mask="24")
links.update_interface(Interface(name="eth0", hwAddr="{NEW}", mtu=1400, IPAddresses=[address]), "card")
"""


def namespace_after(*commands: str) -> dict[str, dict[str, Any]]:
    """Links by name, once the commands have been run and the interface at `card` was updated."""
    script = "; ".join(("set -e", *(f"ip link {command}" for command in commands), 'exec "$0" -c "$1"'))
    words = ["unshare", "--net", "sh", "-c", f"({script}); ip -j address", sys.executable, PROGRAM]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return {link["ifname"]: link for link in json.loads(done.stdout)}


def test_a_card_with_an_address_of_its_own_gets_the_one_it_is_to_have() -> None:
    links = namespace_after(f"add card address {OLD} type veth peer name far", "set card up")

    assert "card" not in links
    assert (links["eth0"]["address"], links["eth0"]["mtu"]) == (NEW, 1400)
    assert "UP" in links["eth0"]["flags"]
    assert [item["local"] for item in links["eth0"]["addr_info"] if item["family"] == "inet"] == ["10.9.8.7"]


def test_the_place_counts_though_another_has_address_and_name() -> None:
    """The interface of a link that is gone may still be there when the link's successor is plugged."""
    links = namespace_after(
        f"add card address {OLD} type veth peer name far", f"add eth0 address {NEW} type veth peer name far2"
    )

    assert [item["local"] for item in links["eth0"]["addr_info"] if item["family"] == "inet"] == ["10.9.8.7"]
    assert links["card"]["address"] == NEW
    assert links["card"]["addr_info"] == []
