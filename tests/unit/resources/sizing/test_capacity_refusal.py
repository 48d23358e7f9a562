"""A sandbox that does not fit is refused before anything is made; one that overcommits says so, once."""

import logging

import pytest
from msgspec.structs import replace

from pyshim.model.capacity import CgroupLimits
from pyshim.model.errors import FailedPrecondition
from tests.unit.pod.conftest import MEMBER, Stack


async def test_a_vm_that_does_not_fit_is_never_made(stack: Stack) -> None:
    stack.capacity = replace(stack.capacity, available_mib=100)

    with pytest.raises(FailedPrecondition, match=r"2048 MiB of RAM.*do not fit on this host: less than 128 MiB"):
        await stack.create("c1", ["sleep"])

    assert stack.hypervisors == []
    assert stack.records == []


async def test_a_vm_larger_than_its_cgroup_boots_with_one_warning(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    limits = CgroupLimits(memory_bytes=1 << 30, memory_path="/kubepods/pod1", cpu_quota=None, cpu_path="")
    stack.capacity = replace(stack.capacity, cgroup=limits)

    with caplog.at_level(logging.WARNING, "pyshim.pod"):
        await stack.run("c1", ["sleep"])
        await stack.run("c2", ["sleep"], annotations=MEMBER)

    (warning,) = [record for record in caplog.records if record.msg == "capacity"]
    assert "cgroup '/kubepods/pod1' allows" in warning.__dict__["problem"]
