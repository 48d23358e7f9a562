"""The places of a sandbox's processes and threads in the host's cgroups, read back from the kernel.

The tests of places are cgroup v1's; test_cgroups_v2.py has those of version 2.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.model.units import MIB

from .framework import cgroups, processes, shim_config
from .framework.cgroups import SandboxCgroups, hierarchy, members, pod_cgroup, thread_ids
from .framework.ctr import Ctr
from .framework.direct import update_task
from .framework.loop_devices import loop_device
from .framework.processes import Process
from .framework.waiting import eventually

pytestmark = pytest.mark.vm
v1_only = pytest.mark.skipif(cgroups.is_v2(), reason="needs cgroup v1; test_cgroups_v2.py has version 2")
_PYSHIM = Path(__file__).resolve().parents[1] / "bin" / "pyshim"
_TMPFS = ("--mount", "type=tmpfs,src=tmpfs,dst=/fill,options=size=400m")
_FIO = Path("/usr/bin/fio")
_CODE = tuple(path for path in ("/usr", "/lib", "/lib64") if Path(path).is_dir())
_ALL = ("cpu", "cpuacct", "cpuset", "memory", "blkio", "pids", "freezer")


def _run(ctr: Ctr, name: str, config: Path, *options: str) -> SandboxCgroups:
    ctr.start(name, *options, config=config)
    return SandboxCgroups(name)


def _other_threads(sandbox: SandboxCgroups) -> set[int]:
    return {int(tid) for tid in os.listdir(f"/proc/{sandbox.vmm}/task")} - sandbox.vcpu_threads


@v1_only
def test_with_an_overhead_cgroup_only_vcpu_threads_are_in_the_pods_before_and_after_hotplug(
    ctr: Ctr, name: str, scratch: Path
) -> None:
    size = {"default_vcpus": 0.5, "default_memory": 256, "default_maxmemory": 1280}
    keys = {"static_sandbox_resource_mgmt": False, "sandbox_cgroup_only": False}
    config = shim_config.with_keys(scratch, shim_config.guest_that_takes_vcpus(), hypervisor=size, runtime=keys)

    sandbox = _run(ctr, name, config)

    assert sandbox.path("sandbox") == f"/default/{name}"
    assert sandbox.path("overhead") == f"/kata_overhead/{name}"
    state = sandbox.state
    assert (state["SandboxCgroupPath"], state["OverheadCgroupPath"]) == (f"/default/{name}", f"/kata_overhead/{name}")
    for controller in _ALL:
        inside = members(sandbox.directory("overhead", controller))
        assert {sandbox.shim, sandbox.virtiofsd, sandbox.vmm} <= inside, controller
    assert len(sandbox.vcpu_threads) == 1
    _assert_vcpus_apart(sandbox)

    update_task(name, cpu={"quota": 150_000, "period": 100_000})

    assert len(sandbox.vcpu_threads) == 2
    _assert_vcpus_apart(sandbox)
    _assert_shown(name, sandbox)


def _assert_shown(name: str, sandbox: SandboxCgroups) -> None:
    shown = subprocess.run(
        [str(_PYSHIM), "status", "--cgroups", name], capture_output=True, check=True, timeout=30
    ).stdout.decode()
    assert f"sandbox   /default/{name}" in shown
    assert all(f"{tid} vCPU {number}" in shown for number, tid in enumerate(sandbox.record["VcpuThreads"]))
    assert f"process   {sandbox.shim} shim" in shown
    assert "outside   shim, virtiofsd, vmm" in shown
    strict = sandbox.directory("devices", "devices")
    assert {sandbox.vmm, sandbox.virtiofsd} <= members(strict)
    assert sandbox.shim not in members(strict)
    rules = (strict / "devices.list").read_text().splitlines()
    assert "c 1:3 rwm" in rules
    assert "a *:* rwm" not in rules


def _assert_vcpus_apart(sandbox: SandboxCgroups) -> None:
    for controller in ("cpu", "cpuacct", "cpuset"):
        assert thread_ids(sandbox.directory("sandbox", controller)) == sandbox.vcpu_threads, controller
        overhead = thread_ids(sandbox.directory("overhead", controller))
        assert _other_threads(sandbox) <= overhead, controller
        assert not overhead & sandbox.vcpu_threads, controller


@v1_only
def test_with_sandbox_cgroup_only_all_is_in_the_pods_cgroup_and_within_limits_of_its_own(
    ctr: Ctr, name: str, scratch: Path
) -> None:
    """One VM: the place of each process, the files written, the CPU limit, and the report of a host OOM."""
    keys = {"sandbox_cgroup_only": True, "sandbox_cgroup_limits": True}
    config = shim_config.with_keys(scratch, hypervisor={"default_memory": 512}, runtime=keys)
    with pod_cgroup(f"pod-{name}") as parent, removed(ctr, name):
        sandbox = _run(ctr, name, config, "--cgroup", f"{parent}/{name}", *_TMPFS)

        assert sandbox.path("sandbox") == f"{parent}/{name}"
        twin = ctr.run(f"{name}-twin", "true", options=["--cgroup", f"{parent}/{name}"], config=config, check=False)
        assert f"make cgroup '{parent}/{name}': process" in twin.err
        assert not list(hierarchy("memory").glob(f"kata_overhead/{name}"))
        for controller in _ALL:
            inside = members(sandbox.directory("sandbox", controller))
            assert {sandbox.shim, sandbox.virtiofsd, sandbox.vmm} <= inside, controller
        cpu, memory = sandbox.directory("sandbox", "cpu"), sandbox.directory("sandbox", "memory")
        # 1 vCPU and 1 CPU for the VMM; 512 MiB of RAM and twice 206 MiB for the host side.
        assert (cpu / "cpu.cfs_quota_us").read_text().strip() == "200000"
        assert (memory / "memory.limit_in_bytes").read_text().strip() == str((512 + 2 * 206) * MIB)
        used = int((memory / "memory.usage_in_bytes").read_text())
        assert used > 100 * MIB
        _assert_held_to_quota(ctr, name, cpu)

        (memory / "memory.limit_in_bytes").write_text(str(used + 100 * MIB))
        ctr.inside(name, "dd", "if=/dev/zero", "of=/fill/it", "bs=1M", check=False)
        ctr.wait_for_state(name, "STOPPED")
        why = f"the host's OOM killer ended the VMM, as cgroup '{parent}/{name}' met its memory limit"
        eventually(lambda: why in sandbox.state["Pyshim"]["Snapshot"]["Failure"], what="the state says why")


def _assert_held_to_quota(ctr: Ctr, name: str, cpu: Path) -> None:
    """With half a CPU allowed, a guest that spins gets no more than that, and the kernel says that it was held."""
    (cpu / "cpu.cfs_quota_us").write_text("20000")
    before = _throttled(cpu)
    ctr.inside(name, "sh", "-c", "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done")
    eventually(lambda: _throttled(cpu) > before, what="the vCPUs are throttled")
    (cpu / "cpu.cfs_quota_us").write_text("200000")


@contextlib.contextmanager
def removed(ctr: Ctr, name: str) -> Iterator[None]:
    """The container is gone at the end of the block, before the pod's cgroup goes."""
    try:
        yield
    finally:
        ctr.remove([name, f"{name}-twin"])


def _throttled(cpu: Path) -> int:
    lines = dict(line.split() for line in (cpu / "cpu.stat").read_text().splitlines())
    return int(lines["nr_throttled"])


def _rate(ctr: Ctr, name: str, device: str) -> float:
    """Bytes a second that fio reads from the device in the guest."""
    argv = [str(_FIO), "--name=read", f"--filename={device}", "--rw=read", "--bs=64k", "--direct=1", "--thread"]
    argv += ["--ioengine=psync", "--time_based", "--runtime=4", "--output-format=json", "--disk_util=0"]
    report = ctr.inside(name, *argv).out
    (job,) = json.loads(report[report.index("{") :])["jobs"]
    assert job["error"] == 0
    return float(job["read"]["bw_bytes"])


@pytest.mark.skipif(not _FIO.exists(), reason="needs fio")
@pytest.mark.skipif(not cgroups.has("blkio") and not cgroups.has("io"), reason="needs a controller of block devices")
def test_a_block_io_limit_holds_while_it_is_set(ctr: Ctr, name: str, scratch: Path) -> None:
    """A quarter of what fio reads without the limit, in the same VM; its disk is a loop device."""
    data = scratch / "data"
    with data.open("wb") as file:
        file.truncate(256 * MIB)
    cache = {"block_device_cache_set": True, "block_device_cache_direct": True}
    config = shim_config.with_keys(scratch, hypervisor=cache)
    code = [word for path in _CODE for word in ("--mount", f"type=bind,src={path},dst={path},options=rbind:ro")]
    with loop_device(data) as device, removed(ctr, name):
        _run(ctr, name, config, "--device", device, *code)
        number = os.stat(device).st_rdev
        disk = {"major": os.major(number), "minor": os.minor(number)}
        free = _rate(ctr, name, device)

        update_task(name, blockIO={"throttleReadBpsDevice": [{**disk, "rate": int(free / 4)}]})
        limited = _rate(ctr, name, device)
        update_task(name, blockIO={"throttleReadBpsDevice": [{**disk, "rate": 0}]})
        free_again = _rate(ctr, name, device)

        print(f"fio: {free / MIB:.1f} MiB/s, limited to a quarter {limited / MIB:.1f}, then {free_again / MIB:.1f}")
        assert limited / free < 0.25 * 1.2
        assert limited < free_again / 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_the_threads_of_a_vm_run_on_the_pods_cpus_when_containerd_is_confined_to_one(ctr: Ctr, name: str) -> None:
    """As with systemd's `CPUAffinity=`; the shim, which serves containerd, stays there, which is the control."""
    every, one = frozenset(os.sched_getaffinity(0)), frozenset({min(os.sched_getaffinity(0))})
    with _confined(processes.find("/containerd", "--config"), one):
        ctr.start(name, "--cpus", "2")
    sandbox = SandboxCgroups(name)

    servers = [process.pid for process in processes.find("virtiofsd")]
    tids = [int(tid) for pid in (sandbox.vmm, *servers) for tid in os.listdir(f"/proc/{pid}/task")]

    assert frozenset(os.sched_getaffinity(sandbox.shim)) == one
    assert servers
    assert {frozenset(os.sched_getaffinity(tid)) for tid in tids} == {every}


@contextlib.contextmanager
def _confined(found: list[Process], cpus: frozenset[int]) -> Iterator[None]:
    """All threads of the processes run on these CPUs until the end of the block."""
    assert found

    def pin(wanted: frozenset[int]) -> None:
        for process in found:
            for tid in os.listdir(f"/proc/{process.pid}/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(tid), wanted)

    former = frozenset(os.sched_getaffinity(found[0].pid))
    pin(cpus)
    try:
        yield
    finally:
        pin(former)
