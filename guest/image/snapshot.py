"""The machine that keeps the agent's process: the guest itself, booted once when its image is built.

It is emulated on every build host, and its CPU is the plainest: what glibc chose for it fits every guest's CPU, and
equal images give equal memory.
"""

from __future__ import annotations

import os
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Final

from guest.image import recipe
from guest.image.cpio import cpio_archive
from guest.image.errors import BuildError
from guest.image.interpreter import AGENT_ROOT
from guest.image.loader import TRACER_ARGV
from guest.image.modules import ModuleStore
from guest.image.resume import Resumption, plan
from guest.image.rootfs import erofs_image, loader_tree
from guest.image.tree import Tree
from guest.snapshot.process import Process, parse
from guest.snapshot.subject import AGENT_ARGV
from guest.snapshot.tracer import STACK_GUARD

_QEMU: Final = "qemu-system-x86_64"
_DISK_BYTES: Final = 64 << 20
_LIMIT_S: Final = 300.0
_KERNEL_PARAMS: Final = "console=hvc0 quiet panic=1 cryptomgr.notests tsc=reliable no_timer_check"


def _argv(kernel: Path, initrd: Path, image: Path, disk: Path, console: Path) -> list[str | Path]:
    return [
        *(_QEMU, "-machine", "q35,accel=tcg", "-cpu", "qemu64", "-m", "512", "-smp", "1", "-nographic", "-no-reboot"),
        *("-no-user-config", "-nodefaults", "-kernel", kernel, "-initrd", initrd, "-append", _KERNEL_PARAMS),
        *("-object", "rng-random,id=rng0,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng0"),
        *("-chardev", f"file,id=console,path={console}", "-device", "virtio-serial-pci"),
        *("-device", "virtconsole,chardev=console"),
        *("-drive", f"id=image,file={image},format=raw,if=none,readonly=on", "-device", "virtio-blk-pci,drive=image"),
        *("-drive", f"id=disk,file={disk},format=raw,if=none", "-device", "virtio-blk-pci,drive=disk"),
    ]


def _kept_process(kernel: Path, initrd: Path, image: Path, scratch: Path) -> Process:
    disk, console = scratch / "snapshot", scratch / "console"
    disk.touch()
    os.truncate(disk, _DISK_BYTES)
    argv = _argv(kernel, initrd, image, disk, console)
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False)
    except FileNotFoundError as exc:
        raise BuildError(f"run {_QEMU}: not installed (hint: `make setup`)") from exc
    except subprocess.TimeoutExpired as exc:
        said = _last_words(console, exc.stderr)
        raise BuildError(f"keep the agent's process: not done after {_LIMIT_S:g} s; the guest says {said!r}") from exc
    try:
        return parse(disk.read_bytes())
    except (ValueError, KeyError, TypeError) as exc:
        said = _last_words(console, done.stderr)
        raise BuildError(f"keep the agent's process: {exc}; the guest says {said!r}") from exc


def _last_words(console: Path, stderr: bytes | None) -> str:
    """The end of what the guest, and then QEMU, wrote."""
    said = console.read_text(errors="replace") if console.exists() else ""
    return " | ".join([*said.splitlines(), *(stderr or b"").decode(errors="replace").splitlines()][-5:])


def _digest(process: Process) -> str:
    digest = sha256()
    for piece in process.pieces():
        digest.update(piece)
    return digest.hexdigest()[:16]


def keep_agent(
    tree: Tree, *, kernel: Path, release: str, store: ModuleStore, erofs_tool: list[str], scratch: Path
) -> Resumption:
    """How a guest with the root file system `tree` goes on as its agent; the memory it needs is in `tree` too.

    Boots such a guest once. Raises BuildError, with the end of the guest's console.
    """
    image, initrd = scratch / "before.img", scratch / "tracer.img"
    (scratch / "before").mkdir()
    erofs_image(tree, erofs_tool, image, scratch / "before")
    initrd.write_bytes(cpio_archive(loader_tree(release, store, argv=TRACER_ARGV), recipe.MTIME_S))
    process = _kept_process(kernel, initrd, image, scratch)
    # The name says whose memory it is: an initrd and a root image of two builds do not go together, and /init says so.
    path = f"{AGENT_ROOT}/memory-{_digest(process)}"
    resumption = plan(process, f"/{path}", STACK_GUARD, AGENT_ARGV)
    tree.add_file(path, resumption.memory)
    return resumption
