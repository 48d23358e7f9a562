"""Block I/O of a sandbox: the containers' limits and weights on the cgroups of VMM and virtiofsd; no real time."""

import re
from typing import Any

import pytest

from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.host_facts import CgroupMode

from .cgroups_rig import Rig

V1, V2 = CgroupMode.V1, CgroupMode.V2


def rate(number: int, minor: int = 0) -> dict[str, int]:
    return {"major": 8, "minor": minor, "rate": number}


def limits(**block_io: Any) -> dict[str, Any]:
    return {"blockIO": block_io}


async def started(mode: CgroupMode, **runtime: Any) -> Rig:
    rig = Rig(mode, **runtime)
    await rig.start()
    return rig


async def test_a_limit_is_the_sum_of_the_containers() -> None:
    rig = await started(V1, sandbox_cgroup_only=True)

    await rig.fit(
        limits(throttleReadBpsDevice=[rate(100), rate(7, minor=16)], throttleWriteIOPSDevice=[rate(3)]),
        limits(throttleReadBpsDevice=[rate(20)], throttleWriteIOPSDevice=[rate(4)]),
    )

    assert rig.written("blkio.throttle.read_bps_device") == ["8:0 120"]
    assert rig.written("blkio.throttle.write_iops_device") == ["8:0 7"]
    assert rig.written("blkio.throttle.write_bps_device") == ["8:0 0"]


async def test_a_limit_goes_with_its_container_or_when_one_without_comes() -> None:
    rig = await started(V2, sandbox_cgroup_only=True)
    limited = limits(throttleReadBpsDevice=[rate(100)], throttleReadIOPSDevice=[rate(5, minor=16)])

    await rig.fit(limited)
    await rig.fit(limited, {"cpu": {"shares": 2}})
    await rig.fit()
    await rig.fit()

    assert rig.written("io.max") == [
        *("8:0 rbps=100 wbps=max riops=max wiops=max", "8:16 rbps=max wbps=max riops=5 wiops=max"),
        *("8:0 rbps=max wbps=max riops=max wiops=max", "8:16 rbps=max wbps=max riops=max wiops=max") * 2,
    ]


@pytest.mark.parametrize(
    ("mode", "written"),
    [
        (V1, {"blkio.bfq.weight": ["300"], "blkio.bfq.weight_device": ["8:0 500"]}),
        (V2, {"io.bfq.weight": ["default 300", "8:0 500"]}),
    ],
)
async def test_a_weight_is_the_largest_of_the_containers(mode: CgroupMode, written: dict[str, list[str]]) -> None:
    rig = await started(mode, sandbox_cgroup_only=True)

    await rig.fit(
        limits(weight=100, weightDevice=[{"major": 8, "minor": 0, "weight": 500}]),
        limits(weight=300, weightDevice=[{"major": 8, "minor": 0, "weight": 400}, {"major": 8, "minor": 1}]),
        {"blockIO": None},
    )

    assert {file: rig.written(file) for file in written} == written


async def test_vmm_and_virtiofsd_are_limited_where_each_of_them_is() -> None:
    rig = await started(V2, sandbox_cgroup_only=False)

    await rig.fit(limits(throttleReadBpsDevice=[rate(100)]))

    assert {path for path, file, _ in rig.host.settings if file == "io.max"} == {"/pod1/c1", "/kata_overhead/s1"}


async def test_each_device_has_its_limit_in_the_state() -> None:
    rig = await started(V1, sandbox_cgroup_only=True)

    await rig.fit(limits(throttleReadBpsDevice=[rate(100), rate(7, minor=16)]))

    settings: Any = rig.cgroups.saved()["Settings"]
    values = [each["Value"] for each in settings if each["File"] == "blkio.throttle.read_bps_device"]
    assert values == ["8:0 100", "8:16 7"]


async def test_a_limit_on_a_device_that_is_gone_fails_the_container_and_a_weight_does_not() -> None:
    rig = await started(V1, sandbox_cgroup_only=True)
    rig.host.refused = dict.fromkeys(("blkio.bfq.weight", "blkio.throttle.read_bps_device"), "ENODEV (no such device)")

    await rig.fit(limits(weight=100))
    with pytest.raises(FailedPrecondition, match=r"read_bps_device .* to .8:0 100.: ENODEV"):
        await rig.fit(limits(throttleReadBpsDevice=[rate(100)]))


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"blockIO": []}, ""),
        ({"blockIO": 7}, "linux.resources.blockIO"),
        (limits(weight=1001), "$.weight"),
        (limits(weight="100"), "$.weight"),
        (limits(throttleReadBpsDevice=[rate(-1)]), "$.throttleReadBpsDevice[0].rate"),
        (limits(throttleReadBpsDevice=[rate(1 << 70)]), "$.throttleReadBpsDevice[0].rate"),
        (limits(throttleWriteIOPSDevice=[{"major": 8}]), "$.throttleWriteIOPSDevice[0]"),
        (limits(throttleReadIOPSDevice={"major": 8}), "$.throttleReadIOPSDevice"),
        ({"cpu": {"realtimeRuntime": 1000, "realtimePeriod": 1_000_000}}, "realtimeRuntime: a VM's vCPUs"),
    ],
)
async def test_what_makes_no_sense_or_cannot_be_is_refused_by_name(resources: dict[str, Any], said: str) -> None:
    rig = await started(V1)
    if not said:
        await rig.fit(resources)
        return
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        await rig.fit(resources)
