"""One function per measurement; each takes one sample on a running containerd and leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from integration.framework import erofs, images, oci
from integration.framework.containerd import Containerd
from integration.framework.ctr import Ctr
from integration.framework.direct import direct_shim, wait_until_gone
from integration.framework.processes import Process
from integration.framework.runtime import Runtime
from integration.framework.waiting import eventually
from integration.framework.zygote import Zygote
from protos.containerd import runtimeoptions_pb2, types_pb2
from pyshim.start.dialect import BINARY

PYKATA = Runtime(name="io.containerd.pykata.v2")
RUNC = Runtime(name="io.containerd.runc.v2")
MIB = 1 << 20
SHARED_ROOT, _LAYERS = "root", "layers"
_POLL_S = 0.005
_LIMIT_S = 300.0
_CPU_CLOCK = 2
"""Of a process, in nanoseconds: what clock_getcpuclockid(3) makes a clock's number of. Source: the kernel's
include/linux/posix-timers_types.h, CPUCLOCK_SCHED."""
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Where the measurements happen: a containerd that is up, a directory on a tmpfs, the directory of our binary, and
    configurations whose guest is not rebuilt meanwhile.
    """

    containerd: Containerd
    directory: Path
    binaries: Path
    config: Path
    warm: Path
    """The same with templates, and there is one (docs/WARM_PODS.md)."""
    unshared: Path
    """As `config`, without a share."""
    warm_unshared: Path

    @property
    def ctr(self) -> Ctr:
        return self.containerd.ctr

    def options(self, runtime: Runtime) -> tuple[str, ...]:
        """The options by which `ctr run` uses `runtime`."""
        config = ("--runtime-config-path", str(self.config)) if runtime.has_vm else ()
        return ("--runtime", runtime.name, *config)

    def zygote(self) -> Zygote:
        """While it runs, shims are forked, not executed."""
        return Zygote(self.binaries / BINARY, self.directory / "zygote.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Proportional and private memory of one process, from /proc/PID/smaps_rollup."""

    pss_mib: float
    private_mib: float


def bare_interpreter_s() -> float:
    """An isolated interpreter that does nothing: the floor under `start`."""
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", "pass"], stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    return time.monotonic() - started


def start_s(ground: Ground, runtime: Runtime) -> float:
    """`start`, as containerd calls it, up to its exit. The daemon it makes is ended before this returns."""
    name = f"start{next(_numbers)}"
    with direct_shim(runtime, ground.binaries, name, ground.directory / name, config={}) as shim:
        started = time.monotonic()
        shim.start()
        took_s = time.monotonic() - started
    wait_until_gone(shim)
    return took_s


class Cost(NamedTuple):
    wall_s: float
    cpu_s: float
    """With that of all processes it started and waited for."""


def delete_cost(ground: Ground, runtime: Runtime, spec: oci.Spec) -> Cost:
    """`delete` of a container with `spec` that was not created, as containerd runs it for what may be left."""
    name = f"delete{next(_numbers)}"
    with direct_shim(runtime, ground.binaries, name, ground.directory / name, spec) as shim:
        (shim.bundle / "runtime").write_text("runc")  # runc's shim writes it at Create, and reads it here
        started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        shim.delete()
        took_s, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(ground.directory / name)
    return Cost(took_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


@contextmanager
def container(ground: Ground, runtime: Runtime, *more: str) -> Iterator[str]:
    """A container that sleeps, in its own VM if the runtime has VMs; `more` are options of `ctr run`."""
    name = f"bench{next(_numbers)}"
    try:
        ground.ctr("run", "--detach", *ground.options(runtime), *more, images.IMAGE, name, "sleep", "100000")
        yield name
    finally:
        ground.ctr.remove([name])
        eventually(lambda: not runtime.shims(name), what=f"the shim of {name!r} has exited")


def daemon_of(runtime: Runtime, name: str) -> Process:
    (daemon,) = runtime.shims(name)
    return daemon


def memory_of(pid: int) -> Memory:
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        key, value = line.split()[:2]
        fields[key.rstrip(":")] = int(value) / 1024
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return Memory(pss_mib=fields["Pss"], private_mib=private)


def cpu_s(pid: int) -> float:
    """CPU time of the process so far, with that of its threads which have ended."""
    return time.clock_gettime(~pid << 3 | _CPU_CLOCK)


def first_output_s(ground: Ground, runtime: Runtime) -> float:
    """From the start of `ctr run` to the first byte its command printed."""
    name = f"bench{next(_numbers)}"
    argv = ground.ctr.argv("run", "--rm", *ground.options(runtime), images.IMAGE, name, "echo", "up")
    started = time.monotonic()
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    try:
        first = os.read(process.stdout.fileno(), 1)
        took_s = time.monotonic() - started
        out, err = process.communicate(timeout=_LIMIT_S)
    finally:
        _end(process)
        ground.ctr("container", "rm", name, check=False)
    if first + out != b"up\n" or process.returncode != 0:
        raise RuntimeError(f"run 'echo up' in {runtime.name}: code {process.returncode}, {first + out!r}, {err!r}")
    eventually(lambda: not runtime.shims(name), what=f"the shim of {name!r} has exited")
    return took_s


def write_roots(directory: Path) -> None:
    """`directory` has the image's root file system, as a directory and as the EROFS files of its layers."""
    images.unpack_rootfs(directory / SHARED_ROOT)
    erofs.layer_files(directory / _LAYERS, images.payload_layers())


class Alone(NamedTuple):
    """A pod of one container, made by its shim without containerd."""

    output_s: float
    """From the shim's `start` to the first byte that the container printed."""
    pss_mib: float
    """Of all its processes and the guest's memory, `settle_s` later."""


def alone(ground: Ground, config: Path, *, on_disks: bool, settle_s: float) -> Alone:
    """A pod whose image is an overlay, which the host mounts and shares, or the guest mounts of layers on disks.

    Without containerd, which before 2.2 passes no layers on.
    """
    name = f"alone{next(_numbers)}"
    home = ground.directory / name
    spec = oci.spec("sh", "-c", "echo up; exec sleep 100000", name=name, rootfs="rootfs")
    asked = runtimeoptions_pb2.Options(config_path=str(config))
    with direct_shim(PYKATA, ground.binaries, name, home, spec) as shim:
        stdout = home / "stdout"
        os.mkfifo(stdout)
        with open(os.open(stdout, os.O_RDWR), "rb", buffering=0) as out:
            started = time.monotonic()
            shim.start()
            shim.call(
                "Create",
                bundle=str(shim.bundle),
                rootfs=_layers(ground) if on_disks else [_overlay(ground, home)],
                options={"type_url": "runtimeoptions.v1.Options", "value": asked.SerializeToString()},
                stdout=str(stdout),
            )
            shim.call("Start")
            out.read(1)
            output_s = time.monotonic() - started
        time.sleep(settle_s)
        processes = (*PYKATA.shims(name), *PYKATA.vmms(name), *PYKATA.virtiofsds(name))
        pss_mib = sum(memory_of(process.pid).pss_mib for process in processes)
    wait_until_gone(shim)
    return Alone(output_s=output_s, pss_mib=pss_mib)


def _layers(ground: Ground) -> list[types_pb2.Mount]:
    files = sorted((ground.directory / _LAYERS).glob("*/layer.erofs"))
    return erofs.active_mounts(files, ground.directory / _LAYERS)


def _overlay(ground: Ground, home: Path) -> types_pb2.Mount:
    for name in ("upper", "work"):
        (home / name).mkdir()
    options = [f"lowerdir={ground.directory / SHARED_ROOT}", f"upperdir={home}/upper", f"workdir={home}/work"]
    return types_pb2.Mount(type="overlay", source="overlay", options=options)


def exec_s(ground: Ground, name: str) -> float:
    """`ctr task exec` of /bin/true, the client's own time included."""
    return ground.ctr("task", "exec", "--exec-id", f"e{next(_numbers)}", name, "/bin/true").took_s


def exec_out(ground: Ground, name: str, *command: str) -> str:
    """The stdout of a command executed in the container. Raises AssertionError when it fails."""
    return ground.ctr("task", "exec", "--exec-id", f"e{next(_numbers)}", name, *command).out


def client_s(ground: Ground) -> float:
    """The floor of every `ctr` call: one that asks containerd for its version."""
    return ground.ctr("version").took_s


def stdout_mb_per_s(ground: Ground, runtime: Runtime, size_mib: int, prefix: str = "bench") -> float:
    """Megabytes (10^6 bytes) a second from a container's stdout to a file, from the first byte seen to the last."""
    name, target = f"{prefix}{next(_numbers)}", ground.directory / f"zeros{next(_numbers)}"
    command = ("dd", "if=/dev/zero", "bs=1M", f"count={size_mib}")
    argv = ground.ctr.argv("run", "--rm", *ground.options(runtime), images.IMAGE, name, *command)
    with target.open("wb") as file:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE)
    try:
        first_at, first_size = _when_at_least(target, 1, process)
        last_at, last_size = _when_at_least(target, size_mib * MIB, process)
        process.communicate(timeout=_LIMIT_S)
    finally:
        _end(process)
        target.unlink()
        ground.ctr("container", "rm", name, check=False)
    if last_size != size_mib * MIB or process.returncode != 0:
        raise RuntimeError(
            f"write {size_mib} MiB from {runtime.name}: code {process.returncode}, {last_size} bytes came"
        )
    eventually(lambda: not runtime.shims(name), what=f"the shim of {name!r} has exited")
    return (last_size - first_size) / 1e6 / (last_at - first_at)


def _when_at_least(file: Path, size: int, process: subprocess.Popen[bytes]) -> tuple[float, int]:
    """The time at which the file first had `size` bytes or more, and its size then."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        ended = process.poll() is not None
        now, found = time.monotonic(), file.stat().st_size
        if found >= size:
            return now, found
        if ended or now > deadline:
            raise RuntimeError(f"wait for {size} bytes of output: {found} came, ctr's code {process.returncode}")
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.communicate()
