"""`pyshim nri run` beside a real containerd: registration, VMs with CPUs of their own, and the containers beside them.

The pods of the first part have a stand-in for the VM: what is tested is what containerd does with the plugin's answers.
The last test has a VM, whose threads are looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.cri import v1_pb2 as pb

from .framework import crio, processes, releases, shim_config
from .framework.cgroups import SandboxCgroups
from .framework.cri import Container, Cri, Pod, pod_config
from .framework.cri_session import NRI_SOCKET, RUNC_HANDLER, STAND_IN_CONFIG, STAND_IN_HANDLER
from .framework.ctr import Ctr
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = pytest.mark.vm
_PYSHIM = Path(__file__).resolve().parents[1] / "bin" / "pyshim"
_ONLINE = frozenset(os.sched_getaffinity(0))
_RESERVED = min(_ONLINE)
_no_nri = f"containerd {releases.chosen().generation} has no NRI (CONTAINERD=2.3)"
_needs_nri = pytest.mark.skipif(not releases.chosen().has_nri or crio.is_chosen(), reason=_no_nri)
"""Of containerd, beside whose VMs are pods of runc."""
_needs_any_nri = pytest.mark.skipif(not (releases.chosen().has_nri or crio.is_chosen()), reason=_no_nri)
_needs_two_cpus = pytest.mark.skipif(len(_ONLINE) < 2, reason="one CPU: none can be had alone")


class PluginProcess:
    """`pyshim nri run`, with its log."""

    def __init__(self, scratch: Path, words: tuple[str, ...] = (str(_PYSHIM),), *more: str) -> None:
        """`words` begin the command, `more` end it."""
        self.socket = scratch / "placement.sock"
        self._begin, self._end = words, more or ("--reserved", str(_RESERVED))
        self._log = scratch / "plugin.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, runtime: Path, **environment: str) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._words, "--socket", str(runtime)], stdout=log, stderr=log, env={**os.environ, **environment}
            )

    @property
    def script(self) -> str:
        """The program that a runtime executes which starts the plugin itself."""
        return f"#!/bin/sh\nexec {shlex.join(self._words)} >>{self._log} 2>&1\n"

    @property
    def _words(self) -> list[str]:
        words = [*self._begin, "nri", "run", "--placement-socket", str(self.socket)]
        return [*words, "--handler", STAND_IN_HANDLER, *self._end]

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(60)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def has_said(self, text: str, times: int = 1) -> None:
        eventually(lambda: self.log().count(text) >= times, what=lambda: f"{text!r} {times} times: {self.log()}")


@pytest.fixture
def plugin(cri: Cri, scratch: Path) -> Iterator[PluginProcess]:
    """It is synchronized."""
    made = PluginProcess(scratch)
    made.start(NRI_SOCKET)
    try:
        made.has_said("synchronized")
        yield made
    finally:
        assert made.end() == 0, made.log()


@contextlib.contextmanager
def _guaranteed(cri: Cri, cpus: int) -> Iterator[Pod]:
    """A pod of a VM with so many CPUs, all its own."""
    config = pod_config(f"vm{cpus}", cri.logs)
    config.linux.resources.CopyFrom(_limits(cpus))
    pod = Pod.run(cri, config, STAND_IN_HANDLER)
    try:
        yield pod
    finally:
        pod.remove()


def _limits(cpus: int) -> pb.LinuxContainerResources:
    return pb.LinuxContainerResources(
        cpu_quota=cpus * 100_000, cpu_period=100_000, cpu_shares=cpus * 1024, memory_limit_in_bytes=64 << 20
    )


def _pid(container: Container) -> int:
    info = container.cri.call("ContainerStatus", container_id=container.id, verbose=True).info["info"]
    return int(json.loads(info)["pid"])


def _allowed(pid: int) -> frozenset[int]:
    return frozenset(os.sched_getaffinity(pid))


@_needs_nri
@_needs_two_cpus
def test_containers_beside_a_vm_leave_its_cpu_while_it_runs(cri: Cri, plugin: PluginProcess) -> None:
    with cri.pod(handler=RUNC_HANDLER) as beside:
        before = _pid(beside.start())
        assert _allowed(before) == _ONLINE

        with _guaranteed(cri, 1) as vm:
            eventually(lambda: len(_ONLINE - _allowed(before)) == 1, what=lambda: f"it leaves a CPU: {plugin.log()}")
            (taken,) = _ONLINE - _allowed(before)
            assert taken != _RESERVED
            assert _allowed(_pid(beside.start())) == _ONLINE - {taken}
            own = vm.start()
            spec = cri.call("ContainerStatus", container_id=own.id, verbose=True).info["info"]
            cpu = json.loads(spec)["runtimeSpec"]["linux"]["resources"]["cpu"]
            assert cpu["cpus"] == str(taken)

        eventually(lambda: _allowed(before) == _ONLINE, what=lambda: f"it has all again: {plugin.log()}")


@contextlib.contextmanager
def _asking(plugin: PluginProcess) -> Iterator[None]:
    """Shims of the stand-in ask the plugin, for as many vCPUs as their pod has CPUs."""
    shim_config.add_keys(STAND_IN_CONFIG.parent, **_keys(plugin))
    try:
        yield
    finally:
        shutil.rmtree(STAND_IN_CONFIG.parent / "config.d")


def _keys(plugin: PluginProcess) -> dict[str, shim_config.Keys]:
    return {
        "hypervisor": {"overhead_vcpus": 0},  # as many vCPUs as the container has CPUs
        "runtime": {"placement_socket": plugin.socket, "static_sandbox_resource_mgmt": True},
    }


@pytest.fixture
def asking(cri: Cri, plugin: PluginProcess) -> Iterator[None]:
    with _asking(plugin):
        yield


@_needs_nri
@_needs_two_cpus
def test_a_shim_that_asked_is_on_the_shared_cpus_before_and_after_its_container_is_told(
    cri: Cri, plugin: PluginProcess, asking: None, runtime: Runtime
) -> None:
    with cri.pod(handler=RUNC_HANDLER) as beside:
        other = _pid(beside.start())
        with _guaranteed(cri, 1) as vm:
            (shim,) = runtime.shims(vm.id)
            (taken,) = _ONLINE - _allowed(shim.pid)
            assert SandboxCgroups(vm.id).record["Placed"]["placement"]["vcpu_cpus"] == [taken]
            eventually(lambda: _allowed(other) == _ONLINE - {taken}, what=lambda: f"it leaves the CPU: {plugin.log()}")

            vm.start()

            settings = SandboxCgroups(vm.id).record["Settings"]
            (cpus,) = (each for each in settings if each["File"] == "cpuset.cpus")
            assert cpus["Source"] == "union of the containers' cpus"
            assert _allowed(shim.pid) == _ONLINE - {taken}
            assert plugin.log().count('msg="placed"') == 1, plugin.log()
        eventually(lambda: _allowed(other) == _ONLINE, what=lambda: f"it has all again: {plugin.log()}")


@_needs_any_nri
@_needs_two_cpus
def test_a_guaranteed_pod_keeps_its_own_cpu_over_the_plugins_restart(
    cri: Cri, plugin: PluginProcess, asking: None
) -> None:
    with _guaranteed(cri, 1) as vm:
        (taken,) = SandboxCgroups(vm.id).record["Placed"]["placement"]["vcpu_cpus"]
        assert taken != _RESERVED
        plugin.has_said("pod=default/vm1")

        plugin.end(signal.SIGKILL)
        plugin.start(NRI_SOCKET)
        plugin.has_said("synchronized", times=2)

        plugin.has_said("placement restored")
        vm.start()
        assert SandboxCgroups(vm.id).record["Placed"]["placement"]["vcpu_cpus"] == [taken]


_PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "opposite"
version = "1"

[project.entry-points."pyshim.nri.policies"]
opposite = "opposite:Opposite"

[tool.setuptools]
py-modules = ["opposite"]
"""
_MODULE = """
import os

from msgspec.structs import replace
from pyshim.node.nri.assignments import free_cpus, place, shared_cpus
from pyshim.node.nri.policy import Decision


class Opposite:
    def place(self, assignments, need):
        if os.path.exists({broken!r}):
            raise ValueError("broken on request")
        usual = place(assignments, need).placements[need.sandbox_id]
        (cpu,) = [each for each in free_cpus(assignments) if each not in usual.vcpu_cpus][:1]
        services = tuple(each for each in shared_cpus(assignments) if each != cpu)
        return Decision(placement=replace(usual, vcpu_cpus=(cpu,), service_cpus=services, why="the opposite"))
"""


@pytest.fixture
def opposite(scratch: Path) -> Iterator[PluginProcess]:
    """The plugin with a policy of a wheel that is installed beside pyshim; `scratch/broken` breaks it."""
    project = scratch / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(_PROJECT)
    (project / "opposite.py").write_text(_MODULE.format(broken=str(scratch / "broken")))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", scratch, project], check=True)
    (wheel,) = scratch.glob("opposite-*.whl")
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--target", scratch / "site", wheel], check=True)
    made = PluginProcess(scratch, (sys.executable, "-m", "pyshim"), "--policy", "opposite")
    made.start(NRI_SOCKET, PYTHONPATH=f"{scratch / 'site'}:{_PYSHIM.parents[1]}")
    try:
        made.has_said("synchronized")
        yield made
    finally:
        assert made.end() == 0, made.log()


def _taken(vm: Pod) -> int:
    (cpu,) = SandboxCgroups(vm.id).record["Placed"]["placement"]["vcpu_cpus"]
    return int(cpu)


@_needs_any_nri
@_needs_two_cpus
def test_the_policy_of_a_wheel_decides_over_a_restart_and_the_default_where_it_fails(
    cri: Cri, opposite: PluginProcess, scratch: Path
) -> None:
    environment = {"PYTHONPATH": f"{scratch / 'site'}:{_PYSHIM.parents[1]}"}
    with _asking(opposite):
        with _guaranteed(cri, 1) as vm:
            chosen = _taken(vm)
            opposite.has_said("the opposite")
            opposite.end(signal.SIGKILL)
            opposite.start(NRI_SOCKET, **environment)
            opposite.has_said("placement restored")
            vm.start()
            assert _taken(vm) == chosen
        with _guaranteed(cri, 1) as vm:
            assert _taken(vm) == chosen
        (scratch / "broken").touch()
        with _guaranteed(cri, 1) as vm:
            assert _taken(vm) != chosen
            opposite.has_said("broken on request")


@_needs_nri
@_needs_two_cpus
def test_a_plugin_that_was_killed_and_a_containerd_that_was_find_each_other_again(
    cri: Cri, plugin: PluginProcess
) -> None:
    with cri.pod(handler=RUNC_HANDLER) as beside, _guaranteed(cri, 1) as vm:
        container = _pid(beside.start())
        eventually(lambda: len(_allowed(container)) == len(_ONLINE) - 1, what="it leaves a CPU")
        vm.start()
        left = _allowed(container)

        plugin.end(signal.SIGKILL)
        late = _pid(beside.start())
        plugin.start(NRI_SOCKET)
        plugin.has_said("synchronized", times=2)
        eventually(lambda: _allowed(late) == left, what=lambda: f"the later one leaves it, too: {plugin.log()}")
        assert _allowed(container) == left

        cri.daemon.restart(signal.SIGKILL)
        cri.connect()
        plugin.has_said("synchronized", times=3)
        assert _allowed(_pid(beside.start())) == left
        beside.remove_containers()


@pytest.fixture
def started_by_containerd(cri: Cri, scratch: Path) -> Iterator[PluginProcess]:
    """The plugin is in the directory of plugins, and containerd has started it."""
    made = PluginProcess(scratch)
    directory = NRI_SOCKET.parent / "plugins"
    is_new = not directory.exists()
    directory.mkdir(exist_ok=True)
    program = directory / "42-placer"
    program.write_text(made.script)
    program.chmod(0o755)
    try:
        cri.daemon.restart()
        cri.connect()
        made.has_said("synchronized")
        yield made
    finally:
        program.unlink()
        if is_new:
            directory.rmdir()
        cri.daemon.restart()
        cri.connect()
        eventually(lambda: not _plugins_of(made), what=lambda: f"the plugin ends with containerd: {made.log()}")


def _plugins_of(plugin: PluginProcess) -> list[int]:
    return [each.pid for each in processes.find("nri", "run", str(plugin.socket))]


@_needs_nri
@_needs_two_cpus
def test_a_plugin_that_containerd_starts_ends_with_it_and_is_started_with_the_next(
    cri: Cri, started_by_containerd: PluginProcess
) -> None:
    plugin = started_by_containerd
    (first,) = _plugins_of(plugin)
    with cri.pod(handler=RUNC_HANDLER) as beside:
        container = _pid(beside.start())
        with _guaranteed(cri, 1) as vm:
            # Before a container is created: see "What goes wrong" in docs/NRI.md.
            plugin.has_said("containers updated")
            left = _allowed(container)
            assert len(_ONLINE - left) == 1
            vm.start()

            cri.daemon.restart(signal.SIGKILL)
            cri.connect()
            plugin.has_said("synchronized", times=2)
            eventually(lambda: len(_plugins_of(plugin)) == 1, what=lambda: f"the first has ended: {plugin.log()}")
            assert _plugins_of(plugin) != [first]
            assert _allowed(_pid(beside.start())) == left
        beside.remove_containers()


@_needs_nri
def test_a_runtime_that_refuses_the_plugin_is_quoted_and_a_wrong_name_is_not_even_asked_for(scratch: Path) -> None:
    done = subprocess.run(
        [_PYSHIM, "nri", "run", "--socket", NRI_SOCKET, "--placement-socket", "", "--index", "7"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "pyshim: index plugin '7': not two digits\n")


@_needs_two_cpus
def test_the_threads_of_a_vm_are_where_the_plugin_placed_them_before_it_booted(
    ctr: Ctr, name: str, scratch: Path
) -> None:
    """Through the shim's own question: no NRI is needed."""
    plugin = PluginProcess(scratch)
    config = shim_config.with_keys(scratch, **_keys(plugin))
    plugin.start(scratch / "no-runtime.sock")
    try:
        eventually(plugin.socket.exists, what=lambda: f"the plugin answers: {plugin.log()}")
        limits = ("--cpu-quota", "100000", "--cpu-period", "100000", "--cpu-shares", "1024")
        ctr.start(name, *limits, config=config)
        sandbox = SandboxCgroups(name)
        (thread,) = sandbox.vcpu_threads

        (own,) = _allowed(thread)
        assert own != _RESERVED
        others = {int(tid) for tid in os.listdir(f"/proc/{sandbox.vmm}/task")} - {thread}
        for tid in (*others, sandbox.shim, *(each.pid for each in processes.find("virtiofsd", name))):
            assert _allowed(tid) == _ONLINE - {own}, tid
        assert sandbox.record["Pinned"] == {"0": own}

        plugin.end(signal.SIGKILL)
        plugin.start(scratch / "no-runtime.sock")
        plugin.has_said("placement restored", times=1)
        ctr("task", "delete", "--force", name)
        plugin.has_said("released", times=1)
    finally:
        plugin.end()
