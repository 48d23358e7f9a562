"""A Create that fails: the error names step and reason, and nothing is left."""

import asyncio

import pytest

from pyshim.model.cgroups import HostOom
from pyshim.model.errors import FailedPrecondition, Unavailable
from tests.fakes.host import Faults
from tests.unit.pod.conftest import PIPES, Stack, until


@pytest.mark.parametrize("step", ["create_vm", "start_vm"])
async def test_a_vmm_that_the_oom_killer_takes_as_it_starts_is_named_so(step: str) -> None:
    """As where a RuntimeClass has no overhead: the pod's cgroup has no room for a VM."""

    stack = Stack(Faults({step: 1}))
    stack.host.cgroup_tree.killed = HostOom(limited_by="/pod1", limit_bytes=64 << 20)
    spec = {"linux": {"cgroupsPath": "/pod1/c1"}}
    try:
        with pytest.raises(FailedPrecondition, match=f"OOM killer ended the VMM, as cgroup '/pod1' .*{step}"):
            await stack.create("c1", ["sleep"], PIPES, **spec)
        assert stack.left() == {}
    finally:
        await stack.close()


@pytest.mark.parametrize("method", ["Check", "CreateSandbox", "CreateContainer"])
async def test_a_vm_that_dies_during_create_gives_its_reason(method: str, stack: Stack) -> None:
    stack.agent.hung.add(method)
    creating = asyncio.ensure_future(stack.create("c1", ["sleep"], PIPES))
    await until(lambda: method in stack.agent.calls)

    stack.hypervisors[0].die("guest panicked: no root")
    if method == "CreateContainer":  # the connection goes with the VM
        stack.clients[0].close()

    with pytest.raises(Unavailable, match="guest panicked: no root"):
        await creating
    assert stack.left() == {}
