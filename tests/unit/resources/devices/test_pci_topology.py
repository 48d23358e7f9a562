"""The places of PCI devices: ports, guest paths, refusals, and the drawing."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, ShimError
from pyshim.model.vm import PciDevice, PciLayout, PortKind, VfioDevice
from pyshim.resources.devices.plan.pci_topology import pci_layout, port_kind
from tests.fakes.inputs import config


def request(
    cold: PortKind | None = None,
    hot: PortKind | None = None,
    roots: int = 0,
    switches: int = 0,
    bridges: int = 1,
    firmware: bool = False,
) -> Config:
    return config(
        cold_plug_vfio=cold or "no-port",
        hot_plug_vfio=hot or "no-port",
        pcie_root_port=roots,
        pcie_switch_port=switches,
        default_bridges=bridges,
        firmware="/firmware" if firmware else "",
    )


def devices(count: int) -> list[PciDevice]:
    return [VfioDevice(id=f"gpu{n}", host_address=f"0000:{n:02x}:00.0", iommufd=False) for n in range(count)]


def layout(asked: Config, found: Sequence[PciDevice] = ()) -> PciLayout:
    return pci_layout(asked, found)


@pytest.mark.parametrize(
    ("asked", "count", "paths"),
    [
        (request(PortKind.ROOT), 1, ["1e/00"]),
        (request(PortKind.ROOT), 3, ["1c/00", "1d/00", "1e/00"]),
        (request(PortKind.ROOT, roots=8), 2, ["17/00", "18/00"]),
        (request(PortKind.SWITCH), 3, ["1e/00/00/00", "1e/00/01/00", "1e/00/02/00"]),
        (request(PortKind.SWITCH, roots=2, switches=4), 1, ["1e/00/00/00"]),
        (request(PortKind.ROOT, roots=2, switches=4), 2, ["1c/00", "1d/00"]),
        (request(PortKind.BRIDGE), 2, ["02/01", "02/02"]),
        (request(PortKind.BRIDGE, bridges=2), 31, [*(f"02/{slot:02x}" for slot in range(1, 31)), "03/01"]),
        (
            request(PortKind.BRIDGE, bridges=2, firmware=True),
            31,
            [*(f"02/00/{slot:02x}" for slot in range(1, 31)), "03/00/01"],
        ),
        (request(), 0, []),
    ],
)
def test_devices_have_known_guest_paths(asked: Config, count: int, paths: list[str]) -> None:
    assert [placed.pci_path for placed in layout(asked, devices(count)).placed] == paths


@pytest.mark.parametrize(
    ("asked", "count", "ports"),
    [
        (request(), 0, []),
        (request(PortKind.ROOT), 0, []),
        (request(PortKind.ROOT), 2, ["rp0", "rp1"]),
        (request(PortKind.SWITCH), 2, ["swdp0", "swdp1"]),
        (request(PortKind.ROOT), 16, [f"rp{number}" for number in range(16)]),
        (request(None, PortKind.ROOT), 0, ["rp0"]),
        (request(None, PortKind.SWITCH), 0, ["swdp0"]),
        (request(None, PortKind.BRIDGE), 0, []),
        (request(None, PortKind.ROOT, roots=3), 0, ["rp0", "rp1", "rp2"]),
        (request(PortKind.BRIDGE, roots=1), 2, ["rp0"]),
    ],
)
def test_ports_are_as_many_as_asked_for_or_needed(asked: Config, count: int, ports: list[str]) -> None:
    assert [port.id for port in layout(asked, devices(count)).ports] == ports


@pytest.mark.parametrize(
    ("asked", "count", "kind", "text"),
    [
        (
            request(PortKind.ROOT, roots=1),
            2,
            ResourceExhausted,
            "place 2 devices: pcie_root_port = 1 in '/etc/test.toml'",
        ),
        (request(PortKind.SWITCH, switches=3), 4, ResourceExhausted, "place 4 devices: pcie_switch_port = 3"),
        (request(PortKind.ROOT), 17, ResourceExhausted, "place 17 devices: at most 16 ports"),
        (request(PortKind.BRIDGE), 31, ResourceExhausted, "default_bridges = 1 in '/etc/test.toml' gives 30 slots"),
        (request(), 1, FailedPrecondition, "plug 'gpu0': cold_plug_vfio in '/etc/test.toml' is \"no-port\""),
    ],
)
def test_what_does_not_fit_is_refused_by_name(asked: Config, count: int, kind: type[ShimError], text: str) -> None:
    with pytest.raises(kind) as refused:
        layout(asked, devices(count))
    assert text in str(refused.value)


def test_a_device_comes_once() -> None:
    with pytest.raises(InvalidArgument, match="plug 'gpu0': asked for twice"):
        layout(request(PortKind.ROOT), [*devices(1), *devices(1)])


@settings(deadline=None)
@given(st.sampled_from(PortKind), st.integers(0, 16), st.integers(0, 16), st.integers(0, 5), st.integers(0, 20))
def test_no_two_devices_share_a_place_and_paths_keep_their_order(
    cold: PortKind, roots: int, switches: int, bridges: int, count: int
) -> None:
    try:
        found = layout(request(cold, None, roots, switches, bridges), devices(count))
    except ResourceExhausted:
        return
    paths = [placed.pci_path for placed in found.placed]
    root_slots = [port.slot for port in found.ports if port.kind is PortKind.ROOT]

    assert len(paths) == count
    assert len(set(paths)) == len(paths)
    assert paths == sorted(paths)
    assert all(2 + bridges <= slot <= 0x1E for slot in root_slots)
    # What the machine places by itself: console, image, entropy, agent, share, NICs.
    has_switch = any(port.kind is PortKind.SWITCH for port in found.ports)
    assert 0x1E - bridges - len(root_slots) - has_switch >= 8


def test_the_values_of_the_configuration() -> None:
    assert [port_kind(text) for text in ("no-port", "root-port", "switch-port", "bridge-port")] == [
        None,
        PortKind.ROOT,
        PortKind.SWITCH,
        PortKind.BRIDGE,
    ]
