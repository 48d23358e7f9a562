"""Block I/O of a sandbox: the weights and limits of its containers, on the cgroups of its VMM and virtiofsd.

containerd and CRI-O write them into a container's spec, from the class that the annotation
`blockio.resources.beta.kubernetes.io/pod` names. All of a VM's I/O is that of its VMM and virtiofsd, so a limit is the
sum of the containers' and a weight the largest. Sources: OCI runtime-spec, config-linux.md "Block IO"; the kernel's
admin-guide/cgroup-v1/blkio-controller.rst, admin-guide/cgroup-v2.rst "IO".
"""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from pyshim.model.confinement import CgroupPlan, GroupSetting, Role
from pyshim.model.decoding import damaged, decoded, described
from pyshim.model.host_facts import CgroupMode

_SOURCE = "sum of the containers' linux.resources.blockIO"
_LARGEST = "largest weight of the containers' linux.resources.blockIO"
Device = tuple[int, int]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Weight = Annotated[int, msgspec.Meta(ge=0, le=1000)]


class _Rate(msgspec.Struct, frozen=True):
    major: _Number
    minor: _Number
    rate: _Number


class _DeviceWeight(msgspec.Struct, frozen=True):
    major: _Number
    minor: _Number
    weight: _Weight | None = None


@described
class BlockIo(msgspec.Struct, frozen=True, rename="camel"):
    """`linux.resources.blockIO`; the weights are those of v1, 10 to 1000."""

    weight: _Weight | None = None
    weight_device: tuple[_DeviceWeight, ...] = ()
    throttle_read_bps_device: tuple[_Rate, ...] = ()
    throttle_write_bps_device: tuple[_Rate, ...] = ()
    throttle_read_iops_device: tuple[_Rate, ...] = msgspec.field(default=(), name="throttleReadIOPSDevice")
    throttle_write_iops_device: tuple[_Rate, ...] = msgspec.field(default=(), name="throttleWriteIOPSDevice")

    @property
    def rates(self) -> tuple[Mapping[Device, int], ...]:
        """Bytes read, bytes written, reads and writes a second, by device."""
        lists = (
            self.throttle_read_bps_device,
            self.throttle_write_bps_device,
            self.throttle_read_iops_device,
            self.throttle_write_iops_device,
        )
        return tuple({(each.major, each.minor): each.rate for each in rates if each.rate} for rates in lists)


_V1_FILES = tuple(f"blkio.throttle.{kind}_device" for kind in ("read_bps", "write_bps", "read_iops", "write_iops"))
_V2_KEYS = ("rbps", "wbps", "riops", "wiops")


def block_io(resources: Mapping[str, object]) -> BlockIo:
    """The block I/O of a container's `linux.resources`. Raises InvalidArgument naming the member that is wrong."""
    return decoded(resources.get("blockIO") or {}, BlockIo, damaged("linux.resources.blockIO"))


def block_io_settings(
    plan: CgroupPlan, containers: Iterable[Mapping[str, object]], limited: Iterable[Device]
) -> tuple[GroupSetting, ...]:
    """The settings. Limits of the devices `limited` that the containers no longer have are removed.

    If one container has no limit for a device, the sandbox has none.
    """
    requested = tuple(block_io(resources) for resources in containers)
    limits = tuple(_sums(rates) for rates in zip(*(each.rates for each in requested), strict=True))
    devices = sorted({*limited, *(device for kind in limits for device in kind)})
    rates = {device: [kind.get(device, 0) for kind in limits] or [0] * len(_V2_KEYS) for device in devices}
    found = []
    for role in plan.of_the_vm:
        found += [each for device, numbers in rates.items() for each in _limits(plan.mode, role, device, numbers)]
        found += _weights(plan.mode, role, requested)
    return tuple(found)


def limited_devices(containers: Iterable[Mapping[str, object]]) -> frozenset[Device]:
    """The devices that any of the containers has a limit for."""
    return frozenset(device for each in containers for kind in block_io(each).rates for device in kind)


def _sums(rates: Iterable[Mapping[Device, int]]) -> Mapping[Device, int]:
    rates = tuple(rates)
    return {device: sum(each[device] for each in rates) for device in rates[0] if all(device in each for each in rates)}


def _limits(mode: CgroupMode, role: Role, device: Device, rates: Iterable[int]) -> Iterable[GroupSetting]:
    """In v1, 0 means no limit. A limit that cannot be set fails the container, whose class demands it."""
    name = f"{device[0]}:{device[1]}"
    if mode is CgroupMode.V2:
        words = " ".join(f"{key}={rate or 'max'}" for key, rate in zip(_V2_KEYS, rates, strict=True))
        lines, controller = [("io.max", f"{name} {words}")], "io"
    else:
        lines = [(file, f"{name} {rate}") for file, rate in zip(_V1_FILES, rates, strict=True)]
        controller = "blkio"
    for file, value in lines:
        yield GroupSetting(role=role, controller=controller, file=file, value=value, source=_SOURCE, required=True)


def _weights(mode: CgroupMode, role: Role, requested: Iterable[BlockIo]) -> Iterable[GroupSetting]:
    """Not required: only some I/O schedulers have weights."""
    requested = tuple(requested)
    weights = {"default": max((each.weight or 0 for each in requested), default=0)}
    for row in (row for each in requested for row in each.weight_device):
        name = f"{row.major}:{row.minor}"
        weights[name] = max(row.weight or 0, weights.get(name, 0))
    for name, weight in weights.items():
        if weight and mode is CgroupMode.V2:
            yield _weight(role, "io", "io.bfq.weight", f"{name} {weight}")
        elif weight and name == "default":
            yield _weight(role, "blkio", "blkio.bfq.weight", str(weight))
        elif weight:
            yield _weight(role, "blkio", "blkio.bfq.weight_device", f"{name} {weight}")


def _weight(role: Role, controller: str, file: str, value: str) -> GroupSetting:
    return GroupSetting(role=role, controller=controller, file=file, value=value, source=_LARGEST)
