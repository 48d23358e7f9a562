"""UpdateSandbox: the limits of a pod as a whole, beside those of its containers; on fakes."""

from collections.abc import Mapping
from typing import Any

import pytest

from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError
from tests.unit.pod.conftest import Stack
from tests.unit.pod.test_served_sandbox import IN_POD, POD, request

from .resizable_pod import document, granted, resources, settled, sizing


async def run_pod(stack: Stack, asked: Mapping[str, Any], **keys: Any) -> None:
    """A pod by the Sandbox API with one container, `app`."""
    stack.document = document(**keys)
    await stack.served.create(request())
    await stack.served.start(POD)
    await stack.run("app", ["sleep"], annotations=IN_POD, linux={"resources": asked})


async def test_the_vm_follows_the_pods_limits(stack: Stack) -> None:
    await run_pod(stack, resources(cpus=1, mib=128), enable_virtio_mem=True)
    assert granted(stack) == (2, 640)

    await stack.served.update(POD, resources(cpus=2.5, mib=512))
    assert granted(stack) == (4, 1024)
    assert stack.agent.onlined[-1] == (4, False)
    assert sizing(stack)["vcpus"]["requested_source"] == "the pod's CPU limit"

    await stack.served.update(POD, resources(cpus=1, mib=256))
    await settled(stack, 2, 768)


async def test_containers_that_ask_for_more_than_their_pod_have_it(stack: Stack) -> None:
    await run_pod(stack, resources(cpus=2, mib=256), enable_virtio_mem=True)

    await stack.served.update(POD, resources(cpus=1, mib=512))

    assert granted(stack) == (3, 1024)


async def test_the_limits_of_a_pod_count_for_the_containers_that_come(stack: Stack) -> None:
    stack.document = document(enable_virtio_mem=True)
    await stack.served.create(request())
    await stack.served.start(POD)

    await stack.served.update(POD, resources(mib=512))
    assert granted(stack) == (1, 512), "no container needs it yet"
    await stack.run("app", ["sleep"], annotations=IN_POD)

    assert granted(stack) == (1, 1024)


async def test_a_vm_of_static_size_takes_updates_up_to_its_size(stack: Stack) -> None:
    await run_pod(stack, {}, static=True)  # 1.5 CPUs and 512 MiB for the pod, by its configuration
    had = granted(stack)

    await stack.served.update(POD, resources(cpus=had[0], mib=had[1]))
    with pytest.raises(FailedPrecondition, match=r"^update sandbox 'p1': 9 CPUs for all containers are more than"):
        await stack.served.update(POD, resources(cpus=9))

    assert granted(stack) == had
    assert stack.hypervisors[0].resizes == []


async def test_a_refused_update_changes_nothing(stack: Stack) -> None:
    await run_pod(stack, resources(cpus=1), enable_virtio_mem=True)
    had, resizes = granted(stack), list(stack.hypervisors[0].resizes)

    with pytest.raises(InvalidArgument, match=r"linux\.resources\.cpu\.period is negative"):
        await stack.served.update(POD, {"cpu": {"period": -1}})

    assert (granted(stack), stack.hypervisors[0].resizes) == (had, resizes)


async def test_an_update_that_fails_is_forgotten(stack: Stack) -> None:
    await run_pod(stack, resources(cpus=1), enable_virtio_mem=True)
    stack.agent.failures["OnlineCPUMem"] = (13, "no")

    with pytest.raises(ShimError, match="no"):
        await stack.served.update(POD, resources(cpus=3))
    del stack.agent.failures["OnlineCPUMem"]

    await settled(stack, 2, 512)
