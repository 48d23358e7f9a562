"""What tests of a pod's real network share: two namespaces with links between them, and a connector that wires one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pyshim.cleanup.undo import undo_entry
from pyshim.model.ledger import LedgerEntry
from pyshim.model.network import NetworkModel, Wiring
from pyshim.resources.network.host.pod_network import HostNetwork, HostNetworkConnector
from tests.fakes.ledger import FakeLedger
from tests.fakes.namespaces import Namespace

T = TypeVar("T")
Hook = Callable[[LedgerEntry], None]


class HookedLedger(FakeLedger):
    """Calls `hook` with each intent once it is written: the moment before the resource is made."""

    def __init__(self, hook: Hook = lambda _entry: None, *, full_after: int | None = None) -> None:
        super().__init__(undo_entry, full_after=full_after)
        self._hook = hook

    def acquire(self, *entries: LedgerEntry) -> None:
        super().acquire(*entries)
        for entry in entries:
            self._hook(entry)


def at(key: str, act: Callable[[], None]) -> Hook:
    """Acts before the resource `key` is made; not again when its entry is completed."""
    acted: list[LedgerEntry] = []

    def hook(entry: LedgerEntry) -> None:
        if entry.key == key and not acted:
            acted.append(entry)
            act()

    return hook


@dataclass
class Wire:
    """Two namespaces of the test's own, and links between them."""

    pod: Namespace
    outside: Namespace

    def veth(self, name: str, subnet: int, *, mtu: int = 1500) -> None:
        """`name` is 10.<subnet>.0.2/24 in the pod; its other end `<name>-out` is 10.<subnet>.0.1/24 outside.

        The ends have different numbers: with equal ones, as the first of two new namespaces would have, Linux takes
        neither for one end of a pair and tells of their carrier up to a second later (net/core/link_watch.c).
        """
        peer = f"{name}-out"
        self.outside.run(
            *("ip", "link", "add", peer, "index", str(1000 + subnet), "mtu", str(mtu), "type", "veth"),
            *("peer", "name", name, "netns", str(self.pod.pid)),
        )
        self.pod.run("ip", "link", "set", name, "address", mac(subnet), "mtu", str(mtu))
        self.address(self.outside, peer, f"10.{subnet}.0.1/24")
        self.address(self.pod, name, f"10.{subnet}.0.2/24")

    @staticmethod
    def address(namespace: Namespace, link: str, address: str) -> None:
        namespace.run("ip", "address", "add", address, "dev", link)
        namespace.run("ip", "link", "set", link, "up")

    def ping(self, address: str, *, payload_bytes: int = 56) -> None:
        self.outside.run("busybox", "ping", "-c", "3", "-i", "0.1", "-W", "5", "-s", str(payload_bytes), address)


def mac(subnet: int) -> str:
    return f"02:00:00:00:{subnet:02x}:02"


async def connect(
    connector: HostNetworkConnector,
    path: str,
    ledger: FakeLedger,
    *,
    model: str = "tcfilter",
    queues: int = 1,
    received: int = 0,
    sent: int = 0,
) -> HostNetwork:
    wiring = Wiring(
        model=NetworkModel(model), queues=queues, vhost_net=True, received_bits_s=received, sent_bits_s=sent
    )
    return await connector.connect(path, wiring, ledger)
