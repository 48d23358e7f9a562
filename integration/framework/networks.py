"""A named network namespace with one end of a veth pair in it, as a CNI plugin leaves it; the other end stays with
the test.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class PodNetwork:
    namespace: Path
    interface: str
    mac: str
    address: str
    prefix: int
    peer_interface: str
    peer_address: str
    mtu: int


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def pod_network(name: str, *, subnet: int = 1, mtu: int = 1400) -> Iterator[PodNetwork]:
    """10.231.<subnet>.0/24: the pod is .2 on `eth0` with a default route, the test is .1. Nothing of it exists
    afterwards.
    """
    network = PodNetwork(
        namespace=Path("/run/netns", name),
        interface="eth0",
        mac=f"02:00:5e:00:{subnet:02x}:02",
        address=f"10.231.{subnet}.2",
        prefix=24,
        peer_interface=f"peer{subnet}",
        peer_address=f"10.231.{subnet}.1",
        mtu=mtu,
    )
    inside = ("-n", name)
    _ip("netns", "add", name)
    try:
        _ip(
            "link",
            "add",
            network.peer_interface,
            "mtu",
            str(mtu),
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            name,
        )
        _ip(*inside, "link", "set", "eth0", "address", network.mac, "mtu", str(mtu))
        _ip(*inside, "address", "add", f"{network.address}/{network.prefix}", "dev", "eth0")
        _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "link", "set", "eth0", "up")
        _ip(*inside, "route", "add", "default", "via", network.peer_address)
        _ip("address", "add", f"{network.peer_address}/{network.prefix}", "dev", network.peer_interface)
        _ip("link", "set", network.peer_interface, "up")
        yield network
    finally:
        subprocess.run(["ip", "link", "delete", network.peer_interface], capture_output=True, check=False)
        _ip("netns", "delete", name)


@contextlib.contextmanager
def added_link(network: PodNetwork, name: str, *, subnet: int) -> Iterator[str]:
    """`name` is added to the pod as one more veth, 10.231.<subnet>.2, as a plugin does to a pod that runs already; a
    route to 10.<subnet>.0.0/16 leads through it. The test's end is 10.231.<subnet>.1, which is returned.
    """
    namespace, peer = network.namespace.name, f"peer{subnet}"
    address = f"10.231.{subnet}.1"
    _ip("link", "add", peer, "type", "veth", "peer", "name", name, "netns", namespace)
    try:
        _ip("address", "add", f"{address}/24", "dev", peer)
        _ip("link", "set", peer, "up")
        _ip("-n", namespace, "address", "add", f"10.231.{subnet}.2/24", "dev", name)
        _ip("-n", namespace, "link", "set", name, "up")
        _ip("-n", namespace, "route", "add", f"10.{subnet}.0.0/16", "via", address)
        yield address
    finally:
        _ip("link", "delete", peer)
