"""The real host code on a real cgroup v2: `cgroups_v2.py PROJECT PACKAGES DISK` prints the kernel's answers as JSON.

It stands for the shim; a child of it with two extra threads stands for the VMM. Each scene is a key of the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
_VMM = """
import sys, threading, time
for _ in range(2):
    threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()
print(*[t.native_id for t in threading.enumerate()], flush=True)
time.sleep(1000)
"""
_SPIN = "import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass"
_FILL = "x = bytearray(200 << 20); print('not killed')"
_libc = ctypes.CDLL(None, use_errno=True)
_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096


def mount(source: str, target: str, kind: str, flags: int = 0) -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {kind} on {target}")


class Ledger:
    def __init__(self) -> None:
        self.entries: list[Any] = []

    def acquire(self, *entries: Any) -> None:
        self.entries += entries

    async def release(self, entry: Any) -> None:
        from pyshim.cleanup.undo import undo_entry

        await asyncio.to_thread(undo_entry, entry)
        self.entries.remove(entry)


class Records:
    """Those of the only sandbox of its host: nothing is taken."""

    def __init__(self) -> None:
        self.ledger = Ledger()

    @contextlib.contextmanager
    def pins(self) -> Iterator[Any]:
        from types import SimpleNamespace

        yield SimpleNamespace(taken={})

    def claims(self, cgroups: Iterable[str]) -> contextlib.nullcontext[dict[str, str]]:
        return contextlib.nullcontext({})


class Vmm:
    """Its first thread is the main one, the others are its vCPUs; another process stands for virtiofsd."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", _VMM], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.virtiofsd = subprocess.Popen(["sleep", "1000"])
        self.main, *self.vcpus = map(int, self.process.stdout.readline().split())

    helper_pids: tuple[int, ...] = ()

    @property
    def pid(self) -> int:
        return self.process.pid

    async def vcpu_thread_ids(self) -> tuple[int, ...]:
        return tuple(self.vcpus)


def plan_of(path: str, *, systemd: bool = False, **runtime: Any) -> Any:
    from types import SimpleNamespace

    from pyshim.config.load import build_config
    from pyshim.config.sources import Source
    from pyshim.model.host_facts import CgroupMode
    from pyshim.model.sizing import SizingRecord, dimension
    from pyshim.resources.cgroups.plan.cgroups import cgroup_plan

    qemu = {"path": "/q", "kernel": "/k", "image": "/i", "virtio_fs_daemon": "/v"}
    tables = {"hypervisor": {"qemu": qemu}, "agent": {}, "runtime": runtime}
    config = build_config(Source(path="/etc/test.toml", directory="/etc", document=tables))
    ends = {"unit": 1, "least": (1, ""), "most": (1 << 20, ""), "requested_source": "", "base_source": ""}
    sizes = [dimension(base=base, requested=0, **ends) for base in (1, 64)]  # type: ignore[arg-type]
    record = SizingRecord(policy="sum", vcpus=sizes[0], memory_mib=sizes[1], warnings=())
    facts: Any = SimpleNamespace(cgroup_mode=CgroupMode.V2, systemd=systemd)
    cgroups = cgroup_plan(sandbox_id="s1", cgroups_path=path, config=config, host=facts)  # type: ignore[arg-type]
    return SimpleNamespace(
        config=config,
        sandbox_id="s1",
        cgroups=cgroups,
        sizing=record,
        placement=None,
        numa=(),
        numa_why="",
    )


def sandbox(path: str, **runtime: Any) -> Any:
    from pyshim.model.host_facts import CgroupMode
    from pyshim.resources.cgroups.host.hierarchies import mounted
    from pyshim.resources.cgroups.host.sandbox_cgroups import LinuxCgroups
    from pyshim.resources.cgroups.live import SandboxCgroups

    return SandboxCgroups(
        plan=plan_of(path, **runtime),
        host=LinuxCgroups(CgroupMode.V2, mounted()),
        records=Records(),  # type: ignore[arg-type]
        on_change=lambda: None,
    )


def read(path: str) -> str:
    try:
        return (ROOT / path.lstrip("/")).read_text().strip()
    except OSError as exc:
        return type(exc).__name__


def left_over() -> list[str]:
    return [str(each) for each in ROOT.rglob("c1")]


def run_python(script: str) -> int:
    return subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, check=False).returncode


def where(pid: int, tid: int | None = None) -> str:
    place = Path(f"/proc/{pid}/task/{tid or pid}/cgroup").read_text()
    return next(line[3:] for line in place.splitlines() if line.startswith("0::"))


@contextlib.asynccontextmanager
async def running(path: str, **runtime: Any) -> AsyncIterator[tuple[Any, Vmm]]:
    """A sandbox that has started, and its end."""
    cgroups = sandbox(path, **runtime)
    await cgroups.enter()
    try:
        async with cgroups.starting_vmm():
            vmm = Vmm()
        await cgroups.restrict_devices()
        await cgroups.place(vmm, vmm.virtiofsd.pid)
        yield cgroups, vmm
        for process in (vmm.process, vmm.virtiofsd):
            process.kill()
            process.wait()
    finally:
        await cgroups.leave()


def places(vmm: Vmm) -> dict[str, object]:
    return {
        "shim": where(os.getpid()),
        "vmm": where(vmm.main),
        "vcpus": sorted({where(vmm.main, tid) for tid in vmm.vcpus}),
    }


_OPEN = """
import errno, os, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
for path in ("/dev/null", sys.argv[2]):
    try:
        os.close(os.open(path, os.O_RDONLY))
        print("opened")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def opens(disk: str, cgroup: str) -> list[str]:
    """What a process in the cgroup may open."""
    command = [sys.executable, "-S", "-c", _OPEN, f"{ROOT}{cgroup}/cgroup.procs", disk]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


async def device_lists(cgroups: Any, vmm: Vmm) -> dict[str, object]:
    from tests.fakes import disks

    disk = sys.argv[3]
    found: dict[str, object] = {"shim opens": opens(disk, where(os.getpid()))}
    found["vmm opens"] = opens(disk, where(vmm.main))
    found["its vcpus open"] = opens(disk, where(vmm.main, vmm.vcpus[0]))
    found["virtiofsd opens"] = opens(disk, where(vmm.virtiofsd.pid))
    await cgroups.allow(disks.disk("one", disk))
    found["with a rule more"] = opens(disk, where(vmm.main))
    return found


async def all_in_one() -> object:
    path = "/pods/pod1/c1"
    group = "/pods/pod1/c1"
    async with running(path, sandbox_cgroup_only=True, sandbox_cgroup_limits=True) as (cgroups, vmm):
        files = (
            "cpu.max",
            "cpu.weight",
            "memory.high",
            "memory.max",
            "cgroup.type",
            "vcpus/cpu.max",
            "vcpus/cgroup.type",
        )
        found: dict[str, object] = {name: read(f"{group}/{name}") for name in files}
        found |= places(vmm)
        await cgroups.fit([{"cpu": {"cpus": "0"}}], cgroups._record)
        found["cpuset"] = [read(f"{group}/cpuset.cpus"), read(f"{group}/cpuset.cpus.effective")]
        await cgroups.fit([{"pids": {}}], cgroups._record)
        found["no cpuset"] = [read(f"{group}/cpuset.cpus"), read("/pods/pod1/cpuset.cpus.effective")]
        await cgroups.fit([{"unified": {"memory.swap.max": "4096"}}], cgroups._record)
        limited = read(f"{group}/memory.swap.max")
        await cgroups.fit([{"pids": {}}], cgroups._record)
        found["swap"] = [limited, read(f"{group}/memory.swap.max")]
        found["notes"] = cgroups.saved()["Notes"]
        found |= await device_lists(cgroups, vmm)
    found["left"] = left_over()
    found["ledger"] = len(cgroups._records.ledger.entries)
    found["shim after"] = where(os.getpid())
    return found


async def overhead_apart() -> object:
    async with running("/pods/pod1/c1", sandbox_cgroup_limits=True) as (cgroups, vmm):
        found = places(vmm)
        found |= await device_lists(cgroups, vmm)
        found["overhead limit"] = read("/kata_overhead/s1/cpu.max")
    found["left"] = (ROOT / "kata_overhead/s1").exists()
    return found


async def out_of_memory() -> object:
    """The pod's own limit, above ours, is met."""
    from pyshim.model.vm import VmExit, VmExitKind

    async with running("/pods/pod1/c1", sandbox_cgroup_only=True) as (cgroups, _):
        (ROOT / "pods/pod1/memory.max").write_text(str(64 << 20))
        async with cgroups.starting_vmm():
            code = run_python(_FILL)
        told = await cgroups.explain(VmExit(kind=VmExitKind.VMM_DIED, reason="qemu was killed by SIGKILL"))
        calm = await cgroups.explain(VmExit(kind=VmExitKind.GUEST_PANIC, reason="the guest's kernel panicked"))
    (ROOT / "pods/pod1/memory.max").write_text("max")
    return {"code": code, "told": told, "panic": calm}


async def held_to_quota() -> object:
    async with running("/pods/pod1/c1", sandbox_cgroup_only=True) as (_, _):
        (ROOT / "pods/pod1/c1/cpu.max").write_text("10000 100000")
        started = time.monotonic()
        run_python(_SPIN)
        took_us = (time.monotonic() - started) * 1e6
        stat = dict(line.split() for line in read("/pods/pod1/c1/cpu.stat").splitlines())
    return {"throttled": int(stat["nr_throttled"]), "share": int(stat["usage_usec"]) / took_us}


async def refused(prepare: Any, path: str, **runtime: Any) -> object:
    """The error of a start that must fail, and what is left of it."""
    undo = prepare()
    cgroups = sandbox(path, **runtime)
    try:
        await cgroups.enter()
        error = "none"
    except Exception as exc:
        error = f"{type(exc).__name__}: {exc}"
    finally:
        undo()
    notes = cgroups.saved()["Notes"]
    await cgroups.leave()
    left = left_over()
    return {"error": error, "notes": notes, "left": left, "shim": where(os.getpid())}


def _full() -> Any:
    (ROOT / "full").mkdir()
    (ROOT / "full/cgroup.max.descendants").write_text("0")
    return lambda: (ROOT / "full").rmdir()


def _read_only() -> Any:
    mount("none", str(ROOT), "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY)
    return lambda: mount("none", str(ROOT), "", _MS_REMOUNT | _MS_BIND)


def _occupied() -> Any:
    """A cgroup with a process in it cannot give controllers to those below it."""
    (ROOT / "occupied").mkdir(exist_ok=True)
    child = subprocess.Popen(["sleep", "1000"])
    (ROOT / "occupied/cgroup.procs").write_text(str(child.pid))

    def end() -> None:
        child.kill()
        child.wait()

    return end


async def removed_under_us() -> object:
    async with running("/pods/pod1/c1") as (cgroups, _):
        (ROOT / "kata_overhead/runner").mkdir()
        for pid in read("/kata_overhead/s1/cgroup.procs").split():
            (ROOT / "kata_overhead/runner/cgroup.procs").write_text(pid)
        (ROOT / "kata_overhead/s1/vmm").rmdir()
        (ROOT / "kata_overhead/s1").rmdir()
        await cgroups.fit([{"cpu": {"cpus": "0"}}], cgroups._record)
    (ROOT / "runner/cgroup.procs").write_text(str(os.getpid()))
    (ROOT / "kata_overhead/runner").rmdir()
    return {"left": left_over()}


async def scenes() -> dict[str, object]:
    return {
        "all in one": await all_in_one(),
        "overhead apart": await overhead_apart(),
        "out of memory": await out_of_memory(),
        "held to quota": await held_to_quota(),
        "full": await refused(_full, "/full/c1"),
        "read-only": await refused(_read_only, "/fresh/c1"),
        "no delegation": await refused(_occupied, "/occupied/c1", sandbox_cgroup_only=True),
        "no delegation, limits": await refused(
            _occupied, "/occupied/c1", sandbox_cgroup_only=True, sandbox_cgroup_limits=True
        ),
        "removed under us": await removed_under_us(),
    }


def main() -> int:
    sys.path.insert(0, sys.argv[1])
    sys.path.append(sys.argv[2])
    ROOT.mkdir(parents=True, exist_ok=True)
    mount("cgroup2", str(ROOT), "cgroup2")
    (ROOT / "runner").mkdir(exist_ok=True)
    for pid in read("cgroup.procs").split():
        (ROOT / "runner/cgroup.procs").write_text(pid)
    (ROOT / "pods/pod1").mkdir(parents=True)
    try:
        print(json.dumps(asyncio.run(scenes())))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
