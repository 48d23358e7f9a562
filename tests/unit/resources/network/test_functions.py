"""Network cards of the host handed to a VM: intent before the change, the driver back after, on a made-up sysfs."""

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest

from pyshim.host.processes.children import Children
from pyshim.model.errors import FailedPrecondition, NotFound, Unavailable
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.network import DirectNetwork
from pyshim.resources.devices.host import vfio
from pyshim.resources.network.host import functions as functions_module
from pyshim.resources.network.host.functions import NetworkFunctions
from pyshim.resources.network.host.pod_network import HostNetwork, HostNetworkConnector
from pyshim.state.records import SandboxRecords
from pyshim.state.schema import ShimRecord
from pyshim.state.store import StateStore
from tests.fakes.ledger import FakeLedger
from tests.fakes.vfio import BRIDGE, NIC, FakeSysfs

CARD, OTHER = "0000:41:08.0", "0000:41:08.1"


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path / "sys")


def ledger_on(sysfs: FakeSysfs) -> FakeLedger:
    def undo(entry: LedgerEntry) -> None:
        assert entry.kind is ResourceKind.VFIO
        was = str(entry.detail["driver"]), str(entry.detail.get("override", ""))
        vfio.rebind(entry.key, *was, sys=str(sysfs.root), write=sysfs.write)

    return FakeLedger(undo)


def functions_of(sysfs: FakeSysfs, ledger: FakeLedger, *, iommufd: bool = False) -> NetworkFunctions:
    def write(path: str, text: str) -> None:
        assert ledger.held, "sysfs is written without an intent"
        sysfs.write(path, text)

    return NetworkFunctions(ledger, iommufd=iommufd, sys=str(sysfs.root), write=write)


@pytest.mark.parametrize("former", ["mlx5_core", ""])
async def test_a_card_is_taken_from_its_driver_and_goes_back_to_it(former: str, sysfs: FakeSysfs) -> None:
    sysfs.function(CARD, NIC, vendor="0x15b3", device="0x101e", driver=former, group="12")
    ledger = ledger_on(sysfs)

    functions = functions_of(sysfs, ledger)
    device = await functions.bind(CARD)
    assert (device.id, device.host_address, device.iommufd) == (CARD, CARD, False)
    assert (device.vendor_id, device.device_id) == ("0x15b3", "0x101e")
    assert sysfs.state(CARD) == ("vfio-pci", "vfio-pci")
    assert list(ledger.held.values()) == [LedgerEntry(kind=ResourceKind.VFIO, key=CARD, detail={"driver": former})]
    await functions.unbind()
    await functions.unbind()

    assert sysfs.state(CARD) == (former, "")
    assert ledger.held == {}


@pytest.mark.parametrize("driver", ["vfio-pci", "mlx5_vfio_pci"])
async def test_a_card_that_was_bound_before_stays_bound(driver: str, sysfs: FakeSysfs) -> None:
    sysfs.function(CARD, NIC, driver=driver, group="12")
    ledger = ledger_on(sysfs)

    functions = functions_of(sysfs, ledger)
    await functions.bind(CARD)
    assert list(ledger.held) == [(ResourceKind.VFIO, CARD)], "another sandbox is to know"
    await functions.unbind()

    assert ledger.held == {}
    assert sysfs.state(CARD) == (driver, "")


async def test_a_card_whose_group_others_use_stays_where_it_is(sysfs: FakeSysfs) -> None:
    sysfs.function(CARD, NIC, driver="mlx5_core", group="12")
    sysfs.function(OTHER, NIC, driver="mlx5_core", group="12")
    sysfs.function("0000:40:00.0", BRIDGE, driver="pcieport", group="12")
    ledger = ledger_on(sysfs)

    with pytest.raises(FailedPrecondition, match=rf"not all of it is held by vfio-pci: {OTHER} by mlx5_core"):
        await functions_of(sysfs, ledger).bind(CARD)

    assert ledger.history == []
    assert sysfs.state(CARD) == ("mlx5_core", "")


async def test_through_nodes_of_their_own_cards_of_one_group_are_apart(sysfs: FakeSysfs) -> None:
    sysfs.function(CARD, NIC, driver="mlx5_core", group="12", vfio="vfio3")
    sysfs.function(OTHER, NIC, driver="mlx5_core", group="12")
    ledger = ledger_on(sysfs)

    functions = functions_of(sysfs, ledger, iommufd=True)
    assert (await functions.bind(CARD)).iommufd
    await functions.unbind()

    assert sysfs.state(CARD) == ("mlx5_core", "")


@pytest.mark.parametrize(
    ("address", "group", "kind", "text"),
    [
        ("0000:99:00.0", "12", NotFound, "use PCI function 0000:99:00.0: this host has none"),
        ("../devices", "12", NotFound, "this host has none"),
        (CARD, "", FailedPrecondition, f"use PCI function {CARD}: it is in no IOMMU group"),
    ],
)
async def test_a_card_that_cannot_be_taken_is_named(
    address: str, group: str, kind: type[Exception], text: str, sysfs: FakeSysfs
) -> None:
    sysfs.function(CARD, NIC, driver="mlx5_core", group=group)
    ledger = ledger_on(sysfs)

    with pytest.raises(kind, match=text):
        await functions_of(sysfs, ledger).bind(address)

    assert ledger.history == []


@pytest.mark.parametrize(("class_code", "driver"), [("0x010802", "nvme"), (BRIDGE, "pcieport"), ("0x030000", "")])
async def test_what_is_no_card_is_not_taken_from_its_driver(class_code: str, driver: str, sysfs: FakeSysfs) -> None:
    """A slip in a file must not cost the host its disks."""
    sysfs.function(CARD, class_code, driver=driver, group="12")
    ledger = ledger_on(sysfs)

    functions = functions_of(sysfs, ledger)
    with pytest.raises(FailedPrecondition, match=rf"take PCI function {CARD}: it is not a network card"):
        await functions.bind(CARD)
    await functions.unbind()

    assert ledger.held == {}
    assert sysfs.state(CARD) == (driver, "")


async def test_an_override_of_the_operator_is_there_again(sysfs: FakeSysfs) -> None:
    sysfs.function(CARD, NIC, driver="mlx5_core", group="12")
    sysfs.give(CARD, "igb_uio")
    ledger = ledger_on(sysfs)

    functions = functions_of(sysfs, ledger)
    await functions.bind(CARD)
    assert sysfs.state(CARD) == ("vfio-pci", "vfio-pci")
    await functions.unbind()

    assert sysfs.state(CARD) == ("igb_uio", "igb_uio")


async def given_up(sysfs: FakeSysfs, ledger: FakeLedger, may_go_on: threading.Event) -> NetworkFunctions:
    """The caller that wanted CARD has given up while it was being bound, which goes on once it `may_go_on`."""
    begun = threading.Event()

    def slow(path: str, text: str) -> None:
        begun.set()
        assert may_go_on.wait(60)
        sysfs.write(path, text)

    functions = NetworkFunctions(ledger, iommufd=False, sys=str(sysfs.root), write=slow)
    taking = asyncio.ensure_future(functions.bind(CARD))
    await asyncio.to_thread(begun.wait, 60)
    taking.cancel()
    await asyncio.wait([taking])
    return functions


async def test_a_create_given_up_while_a_card_is_bound_gives_it_back_once_it_is(sysfs: FakeSysfs) -> None:
    sysfs.function(CARD, NIC, driver="mlx5_core", group="12")
    ledger = ledger_on(sysfs)
    may_go_on = threading.Event()

    functions = await given_up(sysfs, ledger, may_go_on)
    giving = asyncio.ensure_future(functions.unbind())
    await asyncio.sleep(0.05)
    assert ledger.held
    may_go_on.set()
    await giving

    assert sysfs.state(CARD) == ("mlx5_core", "")
    assert ledger.held == {}


async def test_a_card_whose_driver_does_not_let_go_stays_in_the_ledger(
    sysfs: FakeSysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions_module, "BINDING_WAIT_S", 0.05)
    sysfs.function(CARD, NIC, driver="mlx5_core", group="12")
    ledger = ledger_on(sysfs)
    may_go_on = threading.Event()

    functions = await given_up(sysfs, ledger, may_go_on)
    with pytest.raises(FailedPrecondition, match=f"give back {CARD}: its driver has not released it yet"):
        await functions.unbind()
    assert [entry.key for entry in ledger.held.values()] == [CARD]
    may_go_on.set()
    monkeypatch.setattr(functions_module, "BINDING_WAIT_S", 60)
    await functions.unbind()

    assert sysfs.state(CARD) == ("mlx5_core", "")


async def connected(sysfs: FakeSysfs, ledger: FakeLedger, *addresses: str) -> HostNetwork:
    cards = {f"02:00:00:00:00:{index:02x}": address for index, address in enumerate(addresses)}
    direct = DirectNetwork(vhost_user=(), functions=cards, interfaces=(), routes=(), neighbours=())
    functions = partial(NetworkFunctions, sys=str(sysfs.root), write=sysfs.write)
    connector = HostNetworkConnector(children=Children(), functions=functions)
    return await connector.connect_direct(None, direct, ledger)


async def test_the_cards_of_a_file_are_given_back_in_the_end(sysfs: FakeSysfs) -> None:
    sysfs.function(CARD, NIC, driver="mlx5_core", group="12")
    sysfs.function(OTHER, NIC, driver="vfio-pci", group="13")
    ledger = ledger_on(sysfs)

    network = await connected(sysfs, ledger, CARD, OTHER)
    assert {mac: item.host_address for mac, item in network.functions.items()} == {
        "02:00:00:00:00:00": CARD,
        "02:00:00:00:00:01": OTHER,
    }
    with pytest.raises(Unavailable):
        await network.changed()
    await network.disconnect()
    await network.disconnect()

    assert (sysfs.state(CARD), sysfs.state(OTHER)) == (("mlx5_core", ""), ("vfio-pci", ""))
    assert ledger.held == {}


async def test_after_a_second_card_that_cannot_be_taken_the_first_has_its_driver(sysfs: FakeSysfs) -> None:
    sysfs.function(CARD, NIC, driver="mlx5_core", group="12")
    ledger = ledger_on(sysfs)

    with pytest.raises(NotFound, match=OTHER):
        await connected(sysfs, ledger, CARD, OTHER)

    assert sysfs.state(CARD) == ("mlx5_core", "")
    assert ledger.held == {}


class Shim:
    """A sandbox with its own records, as one process has them, and the cards it takes."""

    def __init__(self, sysfs: FakeSysfs, root: Path, name: str) -> None:
        async def release(entry: LedgerEntry) -> None:
            was = str(entry.detail["driver"]), str(entry.detail.get("override", ""))
            vfio.rebind(entry.key, *was, sys=str(sysfs.root), write=sysfs.write)

        shim = ShimRecord(pid=1, start_ticks=1, socket="", namespace="k8s.io")
        store = StateStore(root=str(root / "sbs"))
        self.records = SandboxRecords(store=store, sandbox_id=SandboxId(name), shim=shim, undo=release)
        self.functions = NetworkFunctions(self.records.ledger, iommufd=False, sys=str(sysfs.root), write=sysfs.write)


@pytest.mark.parametrize("driver", ["mlx5_core", "vfio-pci"])
async def test_of_two_sandboxes_that_want_a_card_at_the_same_instant_one_gets_it_and_keeps_it(
    driver: str, sysfs: FakeSysfs, tmp_path: Path
) -> None:
    """The other's undo must not take it out of the first one's VM."""
    sysfs.function(CARD, NIC, driver=driver, group="12")
    (tmp_path / "sbs").mkdir()
    shims = [Shim(sysfs, tmp_path, name) for name in ("one", "two")]

    results = await asyncio.gather(*(shim.functions.bind(CARD) for shim in shims), return_exceptions=True)
    (error,) = (each for each in results if isinstance(each, BaseException))
    loser = results.index(error)
    winner = 1 - loser
    assert isinstance(error, FailedPrecondition)
    assert str(error).startswith(f"take vfio '{CARD}': sandbox '{('one', 'two')[winner]}' has it")
    await shims[loser].functions.unbind()
    assert sysfs.state(CARD)[0] == "vfio-pci", "it was not taken out of the winner's vm"
    assert shims[loser].records.entries() == ()
    await shims[winner].functions.unbind()
    assert sysfs.state(CARD) == (driver, "")
    await shims[loser].functions.bind(CARD)
    await shims[loser].functions.unbind()

    assert sysfs.state(CARD) == (driver, "")
