"""Pods whose shim, or `delete`, meets a system call that fails. `make peers WHAT=faults` prints the table.

strace makes the Nth call of a kind fail in each thread and process of the shim; the VM and virtiofsd are stand-ins, so
a pod takes a second. The faults come in one part of a pod's life: in `start` and the shim that it makes, from Create
until the containers run, from the first Kill to Shutdown, or in the `delete` of a shim that was killed. What must hold:
each call is answered, by a declared error or by success, State at any time; and after containerd's clean-up, whose
calls do not fail, nothing of the pod is left.

By hand, in an enclosure: `python -m integration.framework.enclosure .venv/bin/python -m
integration.framework.system_calls --call mount --call openat`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.stub_pods import options
from pyshim.start import address
from pyshim.ttrpc import ConnectionClosed, RemoteError

from . import images, stubs, zygote
from .faulty_pod import FaultyPod, faulty_pod
from .leaks import HostState, assert_nothing_left
from .runtime import Runtime
from .waiting import eventually

PROJECT = Path(__file__).resolve().parents[2]
GROUND = Path("/run/pyshim-integration")
FAULTS: dict[str, str] = {
    "openat": "EMFILE",
    "openat2": "EIO",
    "open_tree": "ENOSYS",
    "move_mount": "EPERM",
    "mount": "ENOMEM",
    "umount2": "EBUSY",
    "mkdir": "ENOSPC",
    "mkdirat": "EDQUOT",
    "mknod": "EPERM",
    "rmdir": "EBUSY",
    "rename": "ENOSPC",
    "renameat": "EIO",
    "unlink": "EROFS",
    "unlinkat": "EIO",
    "fsync": "EIO",
    "write": "ENOSPC",
    "read": "EIO",
    "pread64": "EIO",
    "getdents64": "EIO",
    "newfstatat": "EIO",
    "readlink": "EIO",
    "fchmod": "EPERM",
    "chown": "EPERM",
    "fchown": "EPERM",
    "flock": "ENOLCK",
    "ftruncate": "ENOSPC",
    "memfd_create": "ENFILE",
    "clone": "EAGAIN",
    "clone3": "EAGAIN",
    "vfork": "ENOMEM",
    "execve": "ENOMEM",
    "unshare": "ENOSPC",
    "setns": "EPERM",
    "prctl": "EINVAL",
    "capset": "EPERM",
    "setresuid": "EAGAIN",
    "prlimit64": "EPERM",
    "sched_setaffinity": "EINVAL",
    "pidfd_open": "EMFILE",
    "pidfd_send_signal": "EPERM",
    "waitid": "EINTR",
    "socket": "EMFILE",
    "socketpair": "ENFILE",
    "bind": "EADDRINUSE",
    "listen": "ENOBUFS",
    "connect": "EAGAIN",
    "accept4": "ENFILE",
    "sendmsg": "ENOBUFS",
    "sendto": "ENOBUFS",
    "recvmsg": "ENOMEM",
    "recvfrom": "ENOMEM",
    "setsockopt": "ENOPROTOOPT",
    "pipe2": "EMFILE",
    "dup": "EMFILE",
    "fcntl": "EMFILE",
    "ioctl": "EBUSY",
    "epoll_create1": "EMFILE",
    "epoll_ctl": "ENOSPC",
    "inotify_init1": "EMFILE",
    "inotify_add_watch": "ENOSPC",
    "mmap": "ENOMEM",
    "mremap": "ENOMEM",
    "mprotect": "ENOMEM",
    "close": "EIO",
    "lseek": "EIO",
    "access": "EIO",
    "chmod": "EPERM",
    "mount_setattr": "EPERM",
    "seccomp": "EINVAL",
    "capget": "EPERM",
    "setgroups": "EPERM",
    "setresgid": "EAGAIN",
    "setsid": "EPERM",
    "dup2": "EBUSY",
    "chdir": "EACCES",
    "getcwd": "ENOENT",
    "getsockname": "ENOBUFS",
    "getpeername": "ENOTCONN",
    "getsockopt": "ENOBUFS",
    "poll": "ENOMEM",
    "epoll_wait": "EINTR",
    "wait4": "EINTR",
    "getrandom": "ENOSYS",
}
"""Calls of a shim, each with an error that Linux gives for it; one that the host's strace does not know is left out."""
PLACES = ("1", "3", "9", "1+40")
"""Which of a thread's calls fails, as strace counts them; the last: the first and each 40th after it."""
_OF_CONNECTIONS = frozenset({"sendto", "sendmsg", "recvfrom", "recvmsg"})
"""Where one of these fails, the connection ends, as its caller sees; the next one is answered."""
_SOCKETS = (address.SOCKET_DIR, address.NOTES)
"""Of a pod whose `start` failed only these names say that there was one; there is one pod at a time."""
_NEVER_FIRST = frozenset({"mmap", "mprotect"})
"""A thread's first ones give it memory: without, `Thread.start` waits for ever. Source: python/cpython#140746."""
_ATTACHED_S = 30.0
_ANSWERED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    call: str
    place: str

    @property
    def words(self) -> list[str]:
        inject = f"inject={self.call}:error={FAULTS[self.call]}:when={self.place}"
        return ["-f", "-qq", "-e", f"trace={self.call}", "-e", inject, "-e", "signal=none"]

    def __str__(self) -> str:
        return f"{self.call:18} {FAULTS[self.call]:11} {self.place:5}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    fault: Fault
    during: str
    """A key of `PARTS`."""
    times: int
    """How often the fault was met."""
    answer: str
    """The error that the caller got, empty for success."""
    problem: str

    def __str__(self) -> str:
        return f"{self.during:6} {self.fault} {self.times:4} x  {self.problem or 'clean'}  {self.answer[:140]}".rstrip()


def missing() -> str:
    """What this machine lacks for the faults; empty when it has all."""
    return "" if shutil.which("strace") else "strace is not installed (apt install strace)"


def known(call: str) -> bool:
    """The host's strace knows the call."""
    found = subprocess.run(["strace", "-e", f"trace={call}", "true"], capture_output=True, check=False)
    return found.returncode == 0


@contextlib.contextmanager
def attached(pid: int, words: list[str], log: Path) -> Iterator[None]:
    """Each thread of the process, and what it starts, meets the fault that these options of strace are."""
    with subprocess.Popen(["strace", *words, "-o", str(log), "-p", str(pid)], stderr=subprocess.PIPE) as tracer:
        try:
            eventually(lambda: _is_traced(pid), what=f"strace is attached to {pid}", within_s=_ATTACHED_S)
            yield
        finally:
            tracer.send_signal(signal.SIGTERM)
            tracer.communicate()


def _is_traced(pid: int) -> bool:
    threads = [Path(f"/proc/{pid}/task/{thread}/status") for thread in os.listdir(f"/proc/{pid}/task")]
    return all("\nTracerPid:\t0\n" not in status.read_text() for status in threads)


def _injected(log: Path) -> int:
    return log.read_text(errors="replace").count("(INJECTED)") if log.exists() else 0


def of_start(pod: FaultyPod, runtime: Runtime, fault: Fault, log: Path) -> Met:
    """`start`, and the shim that it makes until its address is printed, meet the fault; the rest goes without."""
    out, err = log.with_suffix(".out"), log.with_suffix(".err")
    with (
        out.open("wb") as stdout,
        err.open("wb") as stderr,
        subprocess.Popen(
            ["strace", "-I2", *fault.words, "-o", str(log), *_command(pod, runtime), "start"],
            cwd=pod.shim.bundle,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        ) as tracer,
    ):
        try:
            eventually(
                lambda: tracer.poll() is not None or out.read_bytes(), what="start answers", within_s=_ANSWERED_S
            )
        except AssertionError as error:
            return Met(fault=fault, during="start", times=_injected(log), answer="", problem=str(error))
        finally:
            tracer.send_signal(signal.SIGTERM)  # the shim goes on untraced
    lines = err.read_text(errors="replace").splitlines()
    answer = lines[-1] if tracer.returncode and lines else ""
    pod.shim.address = out.read_text().strip()
    if pod.shim.address:
        pod.live()
    return Met(
        fault=fault,
        during="start",
        times=_injected(log),
        answer=answer or pod.error,
        problem=_traceback(lines) or unanswered(pod, fault) or _cleaned(pod),
    )


def of_a_life(pod: FaultyPod, runtime: Runtime, fault: Fault, log: Path) -> Met:
    """A pod whose shim meets the fault from Create on, until its containers run; then its end, without faults."""
    pod.start_shim()
    with contextlib.suppress(RemoteError):  # it has imported what it needs to answer
        pod.shim.call("State")
    return _of_calls(pod, runtime, fault, log, "life", pod.live)


def of_an_end(pod: FaultyPod, runtime: Runtime, fault: Fault, log: Path) -> Met:
    """A running pod whose shim meets the fault from the first Kill to Shutdown."""
    pod.live()
    return _of_calls(pod, runtime, fault, log, "end", pod.end)


def _of_calls(pod: FaultyPod, runtime: Runtime, fault: Fault, log: Path, during: str, calls: Callable[[], None]) -> Met:
    problem = ""
    try:
        (shim,) = runtime.shims(pod.name)
        with attached(shim.pid, fault.words, log):
            calls()
            if fault.call in _OF_CONNECTIONS:
                pod.shim.disconnect()
            if during == "life":  # after its end there is no shim
                with contextlib.suppress(RemoteError):  # NotFound is an answer
                    pod.shim.call("State", None, 30)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return Met(
        fault=fault,
        during=during,
        times=_injected(log),
        answer=pod.error,
        problem=problem or unanswered(pod, fault) or _cleaned(pod),
    )


def _command(pod: FaultyPod, runtime: Runtime) -> list[str]:
    binary = shutil.which(runtime.binary, path=f"{PROJECT / 'bin'}") or runtime.binary
    words = ["-namespace", "default", "-address", "/run/containerd/containerd.sock", "-publish-binary", "/bin/true"]
    return [binary, *words, "-id", pod.name, "-bundle", str(pod.shim.bundle)]


def of_delete(pod: FaultyPod, runtime: Runtime, fault: Fault, log: Path) -> Met:
    """A running pod whose shim is killed; its `delete` meets the fault, the next one does not."""
    pod.live()
    (shim,) = runtime.shims(pod.name)
    os.kill(shim.pid, signal.SIGKILL)
    command = ["strace", *fault.words, "-o", str(log), *_command(pod, runtime), "delete"]
    done = subprocess.run(command, cwd=pod.shim.bundle, capture_output=True, check=False)
    lines = done.stderr.decode(errors="replace").splitlines()
    problem = _traceback(lines) or _cleaned(pod)
    answer = lines[-1] if done.returncode and lines else ""
    return Met(fault=fault, during="delete", times=_injected(log), answer=answer, problem=problem)


def _traceback(lines: list[str]) -> str:
    """A problem of a command's stderr: an error that none of ours has named.

    The interpreter and the linker fail by themselves where they find or load a module, ours or a library's.
    """
    frames = [line for line in lines if line.startswith('  File "')]
    loading = rf"<frozen |{sysconfig.get_path('stdlib')}"
    is_ours = frames and not re.search(loading, frames[-1] + lines[-1]) and not lines[-1].startswith("ImportError")
    return f"a traceback: {lines[-1]}" if is_ours else ""


def unanswered(pod: FaultyPod, fault: Fault | None = None) -> str:
    """A problem of the calls: one without an answer, or, of a bug, one answered with where to look."""
    for error in pod.refused:
        if fault and fault.call in _OF_CONNECTIONS and isinstance(error, ConnectionClosed):
            continue
        if not isinstance(error, RemoteError):
            return f"no answer: {error}"
        if "the shim's log has more" in str(error):
            return f"undeclared: {error}"
    return ""


def _cleaned(pod: FaultyPod) -> str:
    try:
        pod.clean_up()
        pod.assert_nothing_left()
    except AssertionError as error:
        return str(error).splitlines()[0]
    left = [
        f"{directory}/{name}" for directory in _SOCKETS if os.path.isdir(directory) for name in os.listdir(directory)
    ]
    return f"left: {left}" if left else ""


PARTS = {"start": of_start, "life": of_a_life, "end": of_an_end, "delete": of_delete}


def met(calls: list[str], places: tuple[str, ...], *, during: tuple[str, ...] = tuple(PARTS)) -> Iterator[Met]:
    """Every fault of `calls` at each of `places`, one pod after another. In an enclosure, as root."""
    chosen = itertools.product(calls, places)
    faults = [Fault(call=call, place=at) for call, at in chosen if at[0] != "1" or call not in _NEVER_FIRST]
    with tempfile.TemporaryDirectory(prefix="faults-", dir=GROUND) as ground:
        directory = Path(ground)
        runtime, rootfs, config = Runtime.chosen(), images.unpack_rootfs(directory / "rootfs"), stubs.config(directory)
        for number, (fault, kind) in enumerate(itertools.product(faults, during), 1):
            name, subnet = f"fault{number}pod", number % 250 + 1
            with faulty_pod(
                runtime, PROJECT / "bin", directory, rootfs, name=name, subnet=subnet, config=options(config)
            ) as pod:
                yield PARTS[kind](pod, runtime, fault, directory / f"{name}.strace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call", action="append", choices=FAULTS, help="default: all")
    parser.add_argument("--place", action="append", help=f"default: {', '.join(PLACES)}")
    parser.add_argument("--during", action="append", choices=PARTS, help="default: all")
    asked = parser.parse_args()
    if problem := missing():
        print(problem)
        return 2
    calls = [call for call in asked.call or FAULTS if known(call)]
    for directory in (GROUND, Path("/run/containerd")):  # the latter is containerd's
        directory.mkdir(exist_ok=True)
    zygote.keep_away()
    before = HostState.look((GROUND,))
    found: list[Met] = []
    for one in met(calls, tuple(asked.place or PLACES), during=tuple(asked.during or PARTS)):
        found.append(one)
        print(one, flush=True)
    assert_nothing_left(before, (GROUND,))
    bad = [one for one in found if one.problem]
    times = sum(one.times for one in found)
    print(f"{len(found)} pods met {times} failing calls of {len(calls)} kinds; {len(bad)} with a problem")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
