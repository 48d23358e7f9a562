"""Run a command in namespaces of its own, below a cgroup of its own, with no route outside.

`python -m integration.framework.enclosure COMMAND...` gives COMMAND

- a mount namespace with fresh `/proc`, `/sys`, `/sys/fs/cgroup`, and empty `/run`, `/tmp` and `/dev/shm`: the real
  default paths of the shim and of containerd, used privately;
- a network namespace whose only link is `lo`;
- a pid namespace whose init reaps: every process COMMAND leaves behind is visible to it, and dies with it;
- a cgroup of its own in every mounted hierarchy, seen as the root through a cgroup namespace.

Afterwards nothing is left: the kernel kills what remains in the pid namespace, the mounts and links go with their
namespaces, and the cgroups are removed here. The exit status is COMMAND's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MARK = "PYSHIM_ENCLOSURE"
PREFIX = f"pyshim-enclosure-{os.stat('/proc/self/ns/pid').st_ino}-"
"""Of the cgroups. Enclosures of another pid namespace may share the hierarchies: their processes are not seen here."""

_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC = 0x2, 0x4, 0x8, 0x1000, 0x4000
_MS_PRIVATE, _MS_SHARED = 0x40000, 0x100000
_PR_SET_PDEATHSIG = 1
_EMPTIED = {"/run": "0755", "/tmp": "1777", "/dev/shm": "1777"}
_REMOVE_CGROUPS_WITHIN_S = 20.0

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """One mounted cgroup hierarchy and the directory in it that is ours."""

    mount_point: Path
    fs_type: str
    options: str
    own: Path


def outlives(path: Path) -> bool:
    """Within an enclosure: whether what is written to `path` is still there when the enclosure is gone."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return there.stat().st_dev not in {os.stat(top).st_dev for top in _EMPTIED}


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(f"{what}: {errno.errorcode.get(code, code)} ({os.strerror(code)})")


def _mount(source: str, target: str, fs_type: str = "", flags: int = 0, data: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), fs_type.encode(), ctypes.c_ulong(flags), data.encode())
    _checked(result, f"mount {fs_type or 'bind'!r} on {target!r}")


def _mounted_hierarchies() -> list[Hierarchy]:
    """Every cgroup mount of this process with our new directory below the cgroup we are in now."""
    where_i_am = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        where_i_am[controllers] = path
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        mount_point = left.split()[4]
        fs_type, _, super_options = right.split()
        if fs_type not in ("cgroup", "cgroup2"):
            continue
        options = [
            o for o in super_options.split(",") if o not in ("rw", "ro", "xattr", "nsdelegate", "memory_recursiveprot")
        ]
        key = "" if fs_type == "cgroup2" else ",".join(options)
        # In version 2 a cgroup with processes, such as a login's, gives those below it no controllers: the root does.
        inside = where_i_am.get(key, "/").lstrip("/") if key else ""
        own = Path(mount_point, inside, f"{PREFIX}{os.getpid()}")
        found.append(
            Hierarchy(mount_point=Path(mount_point), fs_type=fs_type, options=",".join(options) if key else "", own=own)
        )
    return found


def _remove_stale(hierarchies: list[Hierarchy]) -> None:
    """Remove the cgroups of enclosures whose process is gone (killed before it could clean up)."""
    for hierarchy in hierarchies:
        for stale in hierarchy.own.parent.glob(f"{PREFIX}*"):
            pid = stale.name.removeprefix(PREFIX)
            if not Path("/proc", pid).exists():
                _remove_tree(stale)


def _join(hierarchies: list[Hierarchy]) -> None:
    if all(hierarchy.fs_type == "cgroup2" for hierarchy in hierarchies):
        for hierarchy in hierarchies:
            _enable_controllers(hierarchy.mount_point)
    for hierarchy in hierarchies:
        hierarchy.own.mkdir()
        for inherited in ("cpuset.cpus", "cpuset.mems"):
            if hierarchy.fs_type == "cgroup" and (hierarchy.own / inherited).exists():
                (hierarchy.own / inherited).write_text((hierarchy.own.parent / inherited).read_text())
        (hierarchy.own / "cgroup.procs").write_text(str(os.getpid()))


def _enable_controllers(root: Path) -> None:
    """Of cgroup v2: what is made at the root may have every controller, as far as the kernel lets it."""
    for controller in (root / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):  # this root is a cgroup with processes
            (root / "cgroup.subtree_control").write_text(f"+{controller}")


def _delegate_unified(own: Path) -> None:
    """Make our cgroup v2 directory usable as a root: we move to a leaf, then every controller is enabled for its
    siblings.
    """
    controllers = (own / "cgroup.controllers").read_text().split()
    if not controllers:
        return
    leaf = own / "runner"
    leaf.mkdir()
    (leaf / "cgroup.procs").write_text(str(os.getpid()))
    (own / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in controllers))


def _remove_tree(root: Path) -> bool:
    """True once `root` and all cgroups below it are gone. Names what is still busy on standard error."""
    deadline = time.monotonic() + _REMOVE_CGROUPS_WITHIN_S
    while root.exists():
        busy = None
        for directory, _, _ in os.walk(root, topdown=False):
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                continue
            except OSError as exc:
                busy = f"{directory}: {errno.errorcode.get(exc.errno or 0, exc.errno)}"
        if busy and time.monotonic() > deadline:
            print(f"enclosure: remove cgroup {busy}", file=sys.stderr)
            return False
        if busy:
            time.sleep(0.05)  # the kernel empties a cgroup a moment after its last process was reaped
    return True


def _private_tree(hierarchies: list[Hierarchy], keep: Path) -> None:
    """Mounts of the new namespace. `keep` (the work tree) stays visible even when it lies below a covered directory."""
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    # As on a systemd host: whatever propagates there propagates here too, but only inside this namespace.
    _mount("none", "/", flags=_MS_REC | _MS_SHARED)
    kept = os.open(keep, os.O_PATH | os.O_DIRECTORY)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount("sysfs", "/sys", "sysfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for path, mode in _EMPTIED.items():
        _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode={mode}")
    for covered in ("/run", "/tmp"):
        if keep.is_relative_to(covered):
            keep.mkdir(parents=True)
            _mount(f"/proc/self/fd/{kept}", str(keep), flags=_MS_BIND | _MS_REC)
    os.close(kept)
    Path("/run/lock").mkdir(mode=0o1777)
    if any(h.fs_type == "cgroup" for h in hierarchies):
        _mount("tmpfs", "/sys/fs/cgroup", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=0755")
    for hierarchy in hierarchies:
        hierarchy.mount_point.mkdir(parents=True, exist_ok=True)
        _mount("cgroup", str(hierarchy.mount_point), hierarchy.fs_type, 0xE, hierarchy.options)


def _init(command: list[str]) -> int:
    """The namespace's pid 1: runs `command`, passes signals on, reaps every orphan, returns the command's status."""
    child = os.fork()
    if child == 0:
        try:
            os.execvpe(command[0], command, {**os.environ, MARK: "1"})
        except OSError as exc:
            print(f"enclosure: run {command[0]!r}: {exc}", file=sys.stderr)
            os._exit(127)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: os.kill(child, received))
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def run(command: list[str], keep: Path) -> int:
    """Run `command` in an enclosure and return its exit status (128+n after signal n), with nothing left behind."""
    hierarchies = _mounted_hierarchies()
    _remove_stale(hierarchies)
    outside = os.fork()
    if outside == 0:
        os._exit(_inside(command, hierarchies, keep))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else lambda n, _: os.kill(outside, n))
    _, status = os.waitpid(outside, 0)
    clean = [_remove_tree(h.own) for h in hierarchies]
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and not all(clean):
        return 1
    return code if code >= 0 else 128 - code


def _inside(command: list[str], hierarchies: list[Hierarchy], keep: Path) -> int:
    try:
        _join(hierarchies)
        new = _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWPID | _CLONE_NEWCGROUP | _CLONE_NEWIPC | _CLONE_NEWUTS
        _checked(_libc.unshare(new), "unshare namespaces")
        for hierarchy in hierarchies:
            if hierarchy.fs_type == "cgroup2":  # after unshare: the namespace's root is where we were at that moment
                _delegate_unified(hierarchy.own)
        pid = os.fork()
        if pid == 0:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _private_tree(hierarchies, keep)
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            code = _init(command)
            sys.stdout.flush()
            os._exit(code if code >= 0 else 128 - code)
    except OSError as exc:
        print(f"enclosure: {exc} (hint: this needs root with CAP_SYS_ADMIN)", file=sys.stderr)
        return 125
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: os.kill(pid, received))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m integration.framework.enclosure COMMAND...")
    sys.exit(run(sys.argv[1:], Path.cwd()))
