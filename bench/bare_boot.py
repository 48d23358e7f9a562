"""The reference for every start of a VM: the same QEMU command and kernel, which only reach user space."""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_LIMIT_S = 120.0
_DROPPED_IDS = ("qmp0", "agent0", "share0", "image0")
"""Options that connect the VM to shim, virtiofsd and root image: a bare kernel needs none."""
_CONSOLES = ("hvc0", "tty0")
# The serial line is built into any kernel; hvc0 is a module in Debian's, and a bare kernel has no modules.
_MARK_ON = "tty0"
_MARK = b"UP\n"
# Process 1 must not end: the kernel would panic into the measurement.
_INIT = "#!/bin/busybox sh\necho UP\nwhile :; do read -r line; done\n"


def bare_argv(argv: Sequence[str], initrd: Path, console_fds: dict[str, int]) -> list[str]:
    """The argv of a shim's VMM, changed into one that boots only its kernel.

    It is not paused at the start, has neither control socket, agent port, shared directory, root image nor network, and
    its initrd is `initrd` and its console the serial line. Machine, CPU, memory, the remaining devices and the kernel's
    parameters stay. The descriptors of both consoles are `console_fds`.
    """
    words = [argv[0]]
    for flag, value in _options(argv[1:]):
        if flag in ("-S", "-netdev") or _belongs_to(value, _DROPPED_IDS) or "netdev=" in value:
            continue
        if flag == "-initrd":
            value = str(initrd)
        if flag == "-append":
            value = value.replace("console=hvc0", "console=ttyS0")
        if flag == "-chardev":
            value = next(
                (f"socket,id={name},fd={console_fds[name]}" for name in _CONSOLES if f"id={name}," in value), value
            )
        words += [flag, value] if value else [flag]
    return words


def _options(words: Sequence[str]) -> list[tuple[str, str]]:
    """(flag, value) pairs; a flag without a value has an empty one. No value of ours starts with a dash."""
    pairs: list[tuple[str, str]] = []
    for word in words:
        if word.startswith("-"):
            pairs.append((word, ""))
        else:
            pairs[-1] = (pairs[-1][0], word)
    return pairs


def _belongs_to(value: str, ids: Sequence[str]) -> bool:
    parts = value.split(",")
    return any(f"{key}={name}" in parts for name in ids for key in ("id", "chardev", "drive", "node-name"))


def write_initrd(path: Path) -> None:
    """It only has a BusyBox script that writes one line to the console and waits."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "bin").mkdir()
        shutil.copy("/bin/busybox", Path(name) / "bin/busybox")
        (Path(name) / "init").write_text(_INIT)
        (Path(name) / "init").chmod(0o755)
        names = "bin\nbin/busybox\ninit\n"
        argv = ["cpio", "--create", "--format=newc", "--quiet", f"--file={path.absolute()}"]
        subprocess.run(argv, input=names, text=True, cwd=name, check=True)


def boot_s(argv: Sequence[str], initrd: Path) -> float:
    """Seconds from the spawn of QEMU to the marker on its console, see `bare_argv`.

    Raises RuntimeError with what was seen instead.
    """
    pairs = {name: socket.socketpair() for name in _CONSOLES}
    fds = {name: theirs.fileno() for name, (_, theirs) in pairs.items()}
    words = bare_argv(argv, initrd, fds)
    theirs = [pair[1].fileno() for pair in pairs.values()]
    started = time.monotonic()
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=theirs)
    for _, end in pairs.values():
        end.close()
    ours = {name: pair[0].detach() for name, pair in pairs.items()}
    try:
        _read_until_mark(ours[_MARK_ON], started + _LIMIT_S)
        return time.monotonic() - started
    except RuntimeError as exc:
        process.kill()
        said = process.communicate()[1].decode(errors="replace")
        raise RuntimeError(f"{exc}; QEMU says {said!r}") from exc
    finally:
        process.kill()
        process.wait()
        for fd in ours.values():
            os.close(fd)


def _read_until_mark(fd: int, deadline: float) -> None:
    seen = b""
    while _MARK not in seen.replace(b"\r", b""):
        ready = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]
        more = os.read(fd, 65536) if ready else b""
        if not more:
            raise RuntimeError(f"boot bare kernel: no marker on the console; seen {seen[-2000:]!r}")
        seen += more
