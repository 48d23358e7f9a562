"""Pods by containerd's Sandbox API, without a pause container: containerd's side, with a stand-in for the VM.

SANDBOXER=shim runs the other files on such pods (docs/HACKING.md). That nothing is left is looked at after each test
(`leaves_nothing`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from protos.containerd import sandbox_pb2
from protos.cri import v1_pb2 as pb
from pyshim.model.units import MIB
from pyshim.task.sandbox_service import SANDBOX_SERVICE
from pyshim.ttrpc import RemoteError

from .framework import processes, releases, shim_config
from .framework.cri import Cri, Pod, pod_config, refusal
from .framework.cri_session import SANDBOX_API_HANDLER, SANDBOX_API_VM_CONFIG, SANDBOX_API_VM_HANDLER
from .framework.direct import ask_shim, linux_resources
from .framework.runtime import Runtime
from .framework.waiting import eventually
from .test_cleanup import pyshim

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(releases.chosen().numbers < (2, 3), reason="needs CONTAINERD=2.3 for the Sandbox API"),
]


@pytest.fixture
def pod(cri: Cri) -> Iterator[Pod]:
    with cri.pod(handler=SANDBOX_API_HANDLER, hostname="served") as pod:
        yield pod


def _is_over(pod: Pod) -> bool:
    try:
        return not pod.is_ready
    except grpc.RpcError:  # until containerd has seen that the shim is gone
        return False


def _vmms() -> list[processes.Process]:
    return processes.find("qemu-system-stub")


def test_a_pod_has_no_pause_container(cri: Cri, runtime: Runtime, pod: Pod) -> None:
    containers = [pod.start() for _ in range(2)]

    assert pod.is_ready
    assert len(runtime.shims(pod.id)) == 1
    tasks = cri.daemon.ctr("-n", "k8s.io", "task", "ls", "-q").lines
    assert sorted(tasks) == sorted(container.id for container in containers)
    containers[0].stop(0)
    containers[0].remove()
    pod.containers.remove(containers[0])
    assert containers[1].is_running
    assert pod.is_ready


def test_a_verbose_status_has_the_sizing_and_the_vmm(cri: Cri, pod: Pod) -> None:
    info = cri.call("PodSandboxStatus", pod_sandbox_id=pod.id, verbose=True).info

    vm = json.loads(info["vm"])
    assert vm["vmmPid"] in {vmm.pid for vmm in _vmms()}
    assert json.loads(info["sizing"])["vcpus"]["granted"] == vm["vcpus"]
    namespaces = json.loads(info["info"])["runtimeSpec"]["linux"]["namespaces"]
    assert [each["path"] for each in namespaces if each["type"] == "network"] == [str(pod.namespace)]


@pytest.fixture
def vm_handler() -> Iterator[str]:
    """A handler whose pods have a real VM, which follows its containers."""
    size = {"default_vcpus": 1, "default_memory": 256}
    directory = SANDBOX_API_VM_CONFIG.parent
    guest = shim_config.guest_that_takes_vcpus()
    shim_config.with_keys(directory, guest, hypervisor=size, runtime={"static_sandbox_resource_mgmt": False})
    yield SANDBOX_API_VM_HANDLER
    shutil.rmtree(directory)


def test_the_vm_follows_an_update_of_the_sandbox(cri: Cri, vm_handler: str) -> None:
    """containerd does not send it yet."""
    with cri.pod(handler=vm_handler) as pod:
        container = pod.start()
        _update(cri, pod, {"cpu": {"quota": 100_000, "period": 100_000}, "memory": {"limit": 256 * MIB}})

        info = cri.call("PodSandboxStatus", pod_sandbox_id=pod.id, verbose=True).info
        vm = json.loads(info["vm"])
        assert (vm["vcpus"], vm["memoryMiB"], vm["origin"]) == (2, 512, "booted")
        eventually(lambda: container.sh("nproc") == "2\n", what="the guest uses the second CPU")
        with pytest.raises(RemoteError, match=r"cpu\.period is negative"):
            _update(cri, pod, {"cpu": {"period": -1}})


def test_the_end_of_the_file_server_is_the_pods_end(cri: Cri, runtime: Runtime, vm_handler: str) -> None:
    with cri.pod(handler=vm_handler) as pod:
        container = pod.start()
        for process in runtime.virtiofsds(pod.id):
            with contextlib.suppress(ProcessLookupError):  # the end of one may have been the end of the other
                os.kill(process.pid, signal.SIGKILL)

        eventually(lambda: _is_over(pod), what="the pod is not ready")
        assert container.exit_code() == 255
        assert not runtime.vmms(pod.id)


def _update(cri: Cri, pod: Pod, resources: Mapping[str, object]) -> None:
    """UpdateSandbox, to the shim itself. Raises RemoteError."""
    request = sandbox_pb2.UpdateSandboxRequest(sandbox_id=pod.id, resources=linux_resources(resources))
    bundle = cri.daemon.directories.state / "io.containerd.sandbox.controller.v1.shim" / "k8s.io" / pod.id
    ask_shim(json.loads((bundle / "bootstrap.json").read_text())["address"], SANDBOX_SERVICE, "UpdateSandbox", request)


@pytest.mark.parametrize("part", ["shim", "vmm"])
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "away"])
def test_the_end_of_a_part_is_the_pods_end_and_nothing_is_left(
    cri: Cri, runtime: Runtime, part: str, watched: bool
) -> None:
    with cri.pod(handler=SANDBOX_API_HANDLER) as pod:
        container = pod.start()
        (victim,) = runtime.shims(pod.id) if part == "shim" else _vmms()
        if not watched:
            cri.daemon.stop(signal.SIGKILL)

        os.kill(victim.pid, signal.SIGKILL)
        if not watched:
            cri.daemon.start()
            cri.connect()

        eventually(lambda: _is_over(pod), what="the pod is not ready")
        eventually(lambda: container.status.state == pb.CONTAINER_EXITED, what="the container has ended")


def test_what_a_shim_left_that_died_while_containerd_was_away_is_cleaned(cri: Cri, runtime: Runtime) -> None:
    with cri.pod(handler=SANDBOX_API_HANDLER) as pod:
        pod.start()
        (shim,) = runtime.shims(pod.id)
        cri.daemon.stop(signal.SIGKILL)
        os.kill(shim.pid, signal.SIGKILL)
        eventually(lambda: not runtime.shims(pod.id), what="the shim is dead")

        done = pyshim("cleanup", "--all")

        assert (done.returncode, done.stderr) == (0, "")
        assert "  undone: directory /run/vc/vm/" in done.stdout
        assert not _vmms()
        assert not runtime.persisted(pod.id).parent.exists()
        cri.daemon.start()
        cri.connect()
        eventually(lambda: _is_over(pod), what="the pod is not ready")


@dataclass(frozen=True)
class _Moment:
    """containerd is killed as soon as `has_come`, during `call` of a pod that `is_made` before it."""

    has_come: Callable[[], object]
    call: Callable[[Cri, Pod], object]
    is_made: bool = True


def _shims() -> list[processes.Process]:
    found = processes.find("containerd-shim-pykata-v2", "-id")
    return [process for process in found if process.command[-1] not in ("start", "delete")]


def _remove(cri: Cri, pod: Pod) -> None:
    pod.stop()
    cri.call("RemovePodSandbox", pod_sandbox_id=pod.id)


_MOMENTS = {
    "create": _Moment(_shims, lambda cri, pod: Pod.run(cri, pod.config, SANDBOX_API_HANDLER), is_made=False),
    "start": _Moment(_vmms, lambda cri, pod: Pod.run(cri, pod.config, SANDBOX_API_HANDLER), is_made=False),
    "container": _Moment(lambda: True, lambda cri, pod: pod.start()),
    "stop": _Moment(lambda: not _vmms(), lambda cri, pod: pod.stop()),
    "shutdown": _Moment(lambda: not _shims(), _remove),
}


@pytest.mark.parametrize("name", _MOMENTS)
def test_a_containerd_killed_in_the_middle_of_a_call_leaves_nothing(cri: Cri, name: str) -> None:
    moment = _MOMENTS[name]
    pod = Pod(cri=cri, config=pod_config("halved", cri.logs), id="")
    if moment.is_made:
        pod = Pod.run(cri, pod.config, SANDBOX_API_HANDLER)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(moment.call, cri, pod)
        eventually(moment.has_come, what=f"the moment of {name}", every_s=0.001)
        cri.daemon.restart(signal.SIGKILL)
        cri.connect()
        with contextlib.suppress(grpc.RpcError):
            call.result()

    for known in cri.sandboxes():
        Pod(cri=cri, config=pod.config, id=known).remove()


def test_a_pod_that_is_refused_leaves_nothing(cri: Cri) -> None:
    wrong = {"io.katacontainers.config.hypervisor.default_vcpus": "many"}

    assert "default_vcpus" in refusal(lambda: cri.run_pod("wrong", handler=SANDBOX_API_HANDLER, annotations=wrong))
    assert "hostNetwork is true" in refusal(
        lambda: cri.run_pod("onhost", handler=SANDBOX_API_HANDLER, host_network=True)
    )


def test_ctr_makes_lists_and_removes_a_sandbox(cri: Cri, runtime: Runtime, scratch: Path) -> None:
    spec = scratch / "sandbox.json"
    spec.write_text(json.dumps({"process": {"args": ["pause"], "cwd": "/"}, "root": {"path": "rootfs"}}))
    ctr = cri.daemon.ctr

    made = ctr("-n", "k8s.io", "sandboxes", "run", "--runtime", runtime.name, str(spec), "by-ctr")

    assert made.out.strip() == "by-ctr"
    assert "by-ctr" in ctr("-n", "k8s.io", "sandboxes", "list").out
    assert len(runtime.vmms("by-ctr")) == 1
    ctr("-n", "k8s.io", "sandboxes", "rm", "--force", "by-ctr")
