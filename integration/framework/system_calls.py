"""Pods whose shim, or `delete`, meets a system call that fails. `make peers WHAT=faults` prints the table.

strace makes the Nth call of a kind fail in each thread and process of the shim, from Create on; the VM and virtiofsd
are stand-ins, so a pod takes a second. What must hold: each call of the Task API is answered, by a declared error or by
success, State at any time; and after containerd's clean-up, whose calls do not fail, nothing of the pod is left. Then
shims are killed, and their `delete` meets the faults: the next one, without, leaves nothing.

By hand, in an enclosure: `python -m integration.framework.enclosure .venv/bin/python -m
integration.framework.system_calls --call mount --call openat`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.stub_pods import options
from pyshim.ttrpc import RemoteError

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
}
"""Calls of a shim, each with an error that Linux gives for it; one that the host's strace does not know is left out."""
PLACES = ("1", "3", "9", "1+40")
"""Which of a thread's calls fails, as strace counts them; the last: the first and each 40th after it."""
_ATTACHED_S = 30.0


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
    """`life` or `delete`."""
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
def attached(pid: int, fault: Fault, log: Path) -> Iterator[None]:
    """Each thread of the process, and what it starts, meets the fault."""
    with subprocess.Popen(["strace", *fault.words, "-o", str(log), "-p", str(pid)], stderr=subprocess.PIPE) as tracer:
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


def of_a_life(pod: FaultyPod, runtime: Runtime, fault: Fault, log: Path) -> Met:
    """A pod whose shim meets the fault from Create on, until its containers run; then its end, without faults."""
    problem = ""
    try:
        pod.start_shim()
        with contextlib.suppress(RemoteError):  # it has imported what it needs to answer
            pod.shim.call("State")
        (shim,) = runtime.shims(pod.name)
        with attached(shim.pid, fault, log):
            pod.live()
            with contextlib.suppress(RemoteError):  # NotFound is an answer
                pod.shim.call("State", None, 30)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    answer = pod.error
    if not problem:
        problem = _checked(answer) or _cleaned(pod)
    return Met(fault=fault, during="life", times=_injected(log), answer=answer, problem=problem)


def of_delete(pod: FaultyPod, runtime: Runtime, fault: Fault, log: Path) -> Met:
    """A running pod whose shim is killed; its `delete` meets the fault, the next one does not."""
    pod.live()
    (shim,) = runtime.shims(pod.name)
    os.kill(shim.pid, signal.SIGKILL)
    binary = shutil.which(runtime.binary, path=f"{PROJECT / 'bin'}") or runtime.binary
    words = ["-namespace", "default", "-address", "/run/containerd/containerd.sock", "-publish-binary", "/bin/true"]
    command = [binary, *words, "-id", pod.name, "-bundle", str(pod.shim.bundle), "delete"]
    done = subprocess.run(
        ["strace", *fault.words, "-o", str(log), *command], cwd=pod.shim.bundle, capture_output=True, check=False
    )
    lines = done.stderr.decode(errors="replace").splitlines()
    has_traceback = any(line.startswith("Traceback") for line in lines)
    # The interpreter lists its library before it runs a line of ours.
    is_ours = has_traceback and sysconfig.get_path("stdlib") not in lines[-1]
    problem = f"delete ended with a traceback: {lines[-1]}" if is_ours else _cleaned(pod)
    answer = lines[-1] if done.returncode and lines else ""
    return Met(fault=fault, during="delete", times=_injected(log), answer=answer, problem=problem)


def _checked(answer: str) -> str:
    """A problem of the error text: of a bug the caller gets the exception's type and where to look."""
    return f"undeclared: {answer}" if "the shim's log has more" in answer else ""


def _cleaned(pod: FaultyPod) -> str:
    try:
        pod.clean_up()
        pod.assert_nothing_left()
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""


def met(calls: list[str], places: tuple[str, ...], *, during: tuple[str, ...] = ("life", "delete")) -> Iterator[Met]:
    """Every fault of `calls` at each of `places`, one pod after another. In an enclosure, as root."""
    faults = [Fault(call=call, place=place) for call in calls for place in places]
    with tempfile.TemporaryDirectory(prefix="faults-", dir=GROUND) as ground:
        directory = Path(ground)
        runtime, rootfs, config = Runtime.chosen(), images.unpack_rootfs(directory / "rootfs"), stubs.config(directory)
        for number, (fault, kind) in enumerate(itertools.product(faults, during), 1):
            name, subnet = f"fault{number}pod", number % 250 + 1
            with faulty_pod(
                runtime, PROJECT / "bin", directory, rootfs, name=name, subnet=subnet, config=options(config)
            ) as pod:
                one = of_a_life if kind == "life" else of_delete
                yield one(pod, runtime, fault, directory / f"{name}.strace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call", action="append", choices=FAULTS, help="default: all")
    parser.add_argument("--place", action="append", help=f"default: {', '.join(PLACES)}")
    parser.add_argument("--during", action="append", choices=("life", "delete"), help="default: both")
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
    for one in met(calls, tuple(asked.place or PLACES), during=tuple(asked.during or ("life", "delete"))):
        found.append(one)
        print(one, flush=True)
    assert_nothing_left(before, (GROUND,))
    bad = [one for one in found if one.problem]
    times = sum(one.times for one in found)
    print(f"{len(found)} pods met {times} failing calls of {len(calls)} kinds; {len(bad)} with a problem")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
