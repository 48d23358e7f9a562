"""The pod's network: none, and one that a CNI plugin (here: the test) prepared in a namespace of the host."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.namespaces import EchoHost
from tests.fakes.vhost_user import VhostUserBackend

from .conftest import RunTask, own_name
from .framework import shim_config
from .framework.ctr import Ctr, Result
from .framework.networks import PodNetwork, added_link, pod_network
from .framework.waiting import eventually


def test_container_without_a_network_has_only_loopback(run: RunTask) -> None:
    result = run(
        "sh", "-c", "ls /sys/class/net; cat /proc/net/route | wc -l; ping -c 1 -W 1 127.0.0.1 > /dev/null; echo $?"
    )

    assert result.lines == ["lo", "1", "0"]


@pytest.fixture(scope="module")
def network(module_leaves_nothing: None) -> Iterator[PodNetwork]:
    with pod_network("it-pod", subnet=7, mtu=1380) as made:
        yield made


@pytest.fixture(scope="module")
def connected(ctr: Ctr, network: PodNetwork) -> Iterator[str]:
    """A container in the prepared namespace, shared by this file's tests."""
    with own_name(ctr) as name:
        ctr.start(name, "--with-ns", f"network:{network.namespace}")
        yield name


def _inside(ctr: Ctr, container: str, script: str) -> Result:
    return ctr.inside(container, "sh", "-c", script, check=False)


def test_one_mebibyte_over_tcp_arrives_whole(ctr: Ctr, network: PodNetwork, connected: str, scratch: Path) -> None:
    """Large segments use the offloads that small pings do not."""
    serve = "head -c 1048576 /dev/zero | nc -l -p 7777"
    with ctr.background(scratch, "task", "exec", "--exec-id", "serve", connected, "sh", "-c", serve):
        listening = "until netstat -ltn | grep -q :7777; do sleep 0.1; done"
        assert _inside(ctr, connected, listening).code == 0
        with socket.create_connection((network.address, 7777), timeout=60) as connection:
            received = sum(iter(lambda: len(connection.recv(65536)), 0))

    assert received == 1048576


def test_an_interface_that_comes_later_reaches_the_guest_and_leaves_it_with_its_link(
    ctr: Ctr, network: PodNetwork, connected: str
) -> None:
    before = _links_in(network)
    with added_link(network, "näch-1", subnet=9) as gateway:
        _eventually_inside(ctr, connected, "ip route | grep 10.9.0.0/16")
        shown = _inside(ctr, connected, "ip addr show dev näch-1").out
        assert "10.231.9.2/24" in shown
        assert "UP" in shown
        assert " 0% packet loss" in _inside(ctr, connected, f"ping -c 3 -W 5 {gateway}").out
        assert _links_in(network) - before == {"näch-1", "veth1_kata"}
    _eventually_inside(ctr, connected, "! ip link show dev näch-1 2> /dev/null")
    eventually(lambda: _links_in(network) == before, what=lambda: f"the tap is gone: {_links_in(network)}")

    assert " 0% packet loss" in _inside(ctr, connected, f"ping -c 3 -W 5 {network.peer_address}").out


@pytest.mark.skipif(not shim_config.OVMF.exists(), reason=f"needs {shim_config.OVMF} (hint: apt install ovmf)")
def test_an_interface_that_comes_later_reaches_a_guest_booted_by_firmware(ctr: Ctr, name: str, scratch: Path) -> None:
    with pod_network("it-firmware", subnet=11) as network:
        ctr.start(name, "--with-ns", f"network:{network.namespace}", config=shim_config.with_firmware(scratch))
        with added_link(network, "eth1", subnet=12) as gateway:
            _eventually_inside(ctr, name, "ip route | grep 10.12.0.0/16")
            reached = _inside(ctr, name, f"ping -c 3 -W 5 {gateway}").out
        _eventually_inside(ctr, name, "! ip link show dev eth1 2> /dev/null")
        ctr.remove([name])

    assert " 0% packet loss" in reached


def _eventually_inside(ctr: Ctr, container: str, script: str) -> None:
    """One exec that waits: each is dear under emulation."""
    waiting = f"for i in $(seq 300); do {script} && exit 0; sleep 0.2; done; ip addr; ip route; exit 1"
    result = _inside(ctr, container, waiting)
    assert result.code == 0, result.out


def _links_in(network: PodNetwork) -> set[str]:
    words = ["ip", "-n", network.namespace.name, "-json", "link"]
    return {link["ifname"] for link in json.loads(subprocess.run(words, check=True, capture_output=True).stdout)}


def test_a_second_pod_in_the_same_namespace_is_refused_and_the_first_keeps_its_network(
    ctr: Ctr, network: PodNetwork, connected: str, name: str
) -> None:
    options = ["--with-ns", f"network:{network.namespace}"]
    refused = ctr.run(name, "true", options=options, check=False)

    assert refused.code != 0
    assert f"connect link '{network.interface}'" in refused.err
    assert "another sandbox in this namespace" in refused.err
    assert " 0% packet loss" in _inside(ctr, connected, f"ping -c 3 -W 5 {network.peer_address}").out


def test_of_two_default_routes_the_guest_keeps_the_better_one_and_every_subnet_route(ctr: Ctr, name: str) -> None:
    """A namespace as CNI leaves it with two networks that overlap."""
    with pod_network("it-two", subnet=13) as network, added_link(network, "net1", subnet=14) as gateway:
        inside = ["ip", "-n", network.namespace.name]
        for words in (
            ["route", "replace", "default", "via", network.peer_address, "metric", "100"],
            ["route", "delete", "default", "metric", "0"],
            ["route", "add", "default", "via", gateway, "metric", "200"],
            ["route", "add", "10.231.13.0/24", "dev", "net1", "metric", "300"],
            ["route", "add", "10.50.0.0/16", "via", network.peer_address],
            ["route", "add", "blackhole", "10.51.0.0/16"],
        ):
            subprocess.run([*inside, *words], check=True)
        shown = ctr.run(name, "ip", "route", options=["--with-ns", f"network:{network.namespace}"]).lines

    assert [line.split(" dev ")[1].split()[0] for line in shown if line.startswith("default")] == ["eth0"]
    assert [line.split(" dev ")[1].split()[0] for line in shown if line.startswith("10.231.13.0/24")] == ["eth0"]
    assert any(line.startswith(f"10.50.0.0/16 via {network.peer_address} dev eth0") for line in shown)


def test_a_namespace_that_is_gone_is_refused_by_its_path(ctr: Ctr, name: str) -> None:
    options = ["--with-ns", "network:/run/netns/no such 'namespace'"]
    refused = ctr.run(name, "true", options=options, check=False)

    assert refused.code != 0
    assert "/run/netns/no such 'namespace'" in refused.err.replace("\\", "")


@pytest.mark.parametrize(
    ("model", "limits", "expected"),
    [
        ("tcfilter", {"rx": 80_000_000, "tx": 40_000_000}, {"veth0_kata": 10_000_000, "eth0": 5_000_000}),
        ("macvtap", {"tx": 40_000_000}, {"eth0": 5_000_000}),
    ],
    ids=["tcfilter", "macvtap"],
)
def test_prepared_namespace_is_as_it_was_after_a_pod_with_limited_rates_is_gone(
    ctr: Ctr, name: str, scratch: Path, model: str, limits: dict[str, int], expected: dict[str, int]
) -> None:
    """Links, addresses, routes and traffic rules: the namespace belongs to who made it."""
    keys = {f"{way}_rate_limiter_max_rate": rate for way, rate in limits.items()}
    config = shim_config.with_keys(scratch, {"internetworking_model": model}, hypervisor=keys)
    with pod_network("it-after", subnet=8) as made:
        before = _everything_in("it-after")
        ctr.start(name, "--with-ns", f"network:{made.namespace}", config=config)

        assert _rates_in("it-after") == expected
        assert " 0% packet loss" in _inside(ctr, name, f"ping -c 3 -W 5 {made.peer_address}").out
        ctr.remove([name])
        assert _everything_in("it-after") == before


def _rates_in(namespace: str) -> dict[str, int]:
    """Bytes a second that each limited interface may send."""
    shown = subprocess.run(["tc", "-n", namespace, "-json", "qdisc", "show"], check=True, capture_output=True).stdout
    return {item["dev"]: item["options"]["rate"] for item in json.loads(shown) if item["kind"] == "tbf"}


def test_a_directly_attached_network_is_the_guests_and_the_namespace_is_left_alone(
    ctr: Ctr, name: str, scratch: Path
) -> None:
    """Behind a vhost-user socket, a host that answers pings; in the namespace, an interface to be left alone."""
    config = shim_config.with_keys(scratch, runtime={"dan_conf": scratch})
    end = Path(f"/run/{name}.sock")
    described = {
        "name": "direct0",
        "guest_mac": "02:00:5e:00:00:07",
        "device": {"type": "vhost-user", "path": str(end), "queue_size": 1024},
        "network_info": {
            "interface": {"ip_addresses": ["10.231.31.2/24"], "mtu": 1390},
            "routes": [{"gateway": "10.231.31.1"}],
            "neighbors": [{"ip_address": "10.231.31.9", "hardware_addr": "02:00:5e:00:00:09"}],
        },
    }
    (scratch / f"{name}.json").write_text(json.dumps({"netns": "/run/netns/it-direct", "devices": [described]}))
    gateway = EchoHost("02:00:5e:00:00:01", "10.231.31.1")
    with pod_network("it-direct", subnet=30) as unused, VhostUserBackend(end, gateway):
        before = _everything_in("it-direct")
        ctr.start(name, "--with-ns", f"network:{unused.namespace}", config=config)

        assert " 0% packet loss" in _inside(ctr, name, "ping -c 3 -W 10 -s 1300 10.231.31.1").out
        shown = _inside(ctr, name, "ip addr; ip route; ip neigh").out
        assert "mtu 1390" in shown
        assert "10.231.31.2/24" in shown
        assert "default via 10.231.31.1 dev direct0" in shown
        assert "10.231.31.9 dev direct0 lladdr 02:00:5e:00:00:09" in shown
        assert unused.address not in shown
        assert _everything_in("it-direct") == before
        ctr.remove([name])
    assert gateway.echoes >= 3
    assert gateway.largest_bytes >= 1300


_LINK_LOCAL = "fe80:"


def _everything_in(namespace: str) -> list[object]:
    """Links with addresses, routes, and queueing disciplines; without what changes by itself: lifetimes, and the
    link-local address that the kernel makes some time after a link is up.
    """

    def show(*words: str) -> list[dict[str, Any]]:
        shown = subprocess.run(["ip", "-n", namespace, "-json", *words], check=True, capture_output=True).stdout
        decoded: list[dict[str, Any]] = json.loads(shown or b"[]")
        return decoded

    links = []
    for link in show("address"):
        addresses = sorted(
            (entry["local"], entry["prefixlen"])
            for entry in link["addr_info"]
            if not entry["local"].startswith(_LINK_LOCAL)
        )
        is_up = "UP" in link["flags"]
        links.append((link["ifname"], link["address"], link["mtu"], is_up, link.get("master"), *addresses))
    routes = [(route["dst"], route["dev"], route.get("gateway")) for route in (*show("route"), *show("-6", "route"))]
    routes = [route for route in routes if not route[0].startswith(_LINK_LOCAL)]
    rules = subprocess.run(["tc", "-n", namespace, "qdisc", "show"], check=True, capture_output=True, text=True).stdout
    return [sorted(links), sorted(routes, key=str), sorted(rules.splitlines())]
