"""`pyshim cp`: a file into the guest of a sandbox, or out of it, through its debug console."""

import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress

import click

from pyshim.model.errors import FailedPrecondition
from pyshim.model.ids import SandboxId
from pyshim.model.units import MIB
from pyshim.node.cli.debug_console import run_in_guest
from pyshim.node.cli.output import examples
from pyshim.node.cli.sandboxes import sandbox_id, state_dir_option

_CHUNK_BYTES = 16 * 1024
_MAX_SAID_BYTES = 1000
_SILENCE_S = 60.0
"""Seconds in which the guest takes or gives something: then the copy fails."""
_INTO = (
    'if [ -p "$1" ] || [ -c "$1" ] || [ -b "$1" ]; then exec cat > "$1"; fi; '
    'if [ -e "$1" ] && [ ! -f "$1" ]; then cat >/dev/null; echo "it is no regular file"; exit 1; fi; '
    'cat > "$1.part" && [ "$(wc -c < "$1.part")" -eq "$2" ] && chmod "$3" "$1.part" && mv "$1.part" "$1"'
)
"""A script for the guest's shell: a regular file gets its name only when it is whole; devices and FIFOs are written."""
_OUT_OF = 'stat -L -c %a -- "$1" 2>/dev/null && exec cat -- "$1" 2>/dev/null'
"""Its first line is the mode."""
_MAX_MODE_CHARS = 8


@click.command(epilog=examples("pyshim cp perf.data 1a2b:/tmp/perf.data", "pyshim cp 1a2b:/var/log/x.log ."))
@click.argument("source", metavar="FILE|SANDBOX:FILE")
@click.argument("target", metavar="SANDBOX:FILE|FILE")
@click.option(
    "--max-size",
    "max_mib",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    metavar="MIB",
    help="A larger file is refused.",
)
@state_dir_option
def command(source: str, target: str, max_mib: int, state_dir: str) -> int:
    """Copy a file into the guest of a sandbox, or out of it.

    Paths in the guest are absolute, in its own root file system, outside all containers. The copy goes through the
    debug console, as 'pyshim exec' does. A regular file keeps its permissions, and only a regular file is replaced;
    devices and FIFOs are written into. For a directory use tar ('pyshim exec --help').
    """
    (from_sandbox, from_path), (to_sandbox, to_path) = _place(source), _place(target)
    if bool(from_sandbox) == bool(to_sandbox):
        raise click.UsageError("expected one SANDBOX:FILE, with an absolute path, and one file of this host")
    if to_sandbox:
        _copy_into(sandbox_id(to_sandbox, state_dir), state_dir, from_path, to_path, max_mib * MIB)
    else:
        if os.path.isdir(to_path):
            to_path = os.path.join(to_path, os.path.basename(from_path))
        _copy_out_of(sandbox_id(from_sandbox, state_dir), state_dir, from_path, to_path, max_mib * MIB)
    return 0


def _place(text: str) -> tuple[str, str]:
    """The sandbox (empty: this host) and the path. `./NAME` is a file of this host, whatever its name."""
    sandbox, colon, path = text.partition(":/")
    return (sandbox, f"/{path}") if colon and not text.startswith((".", "/")) else ("", text)


def _copy_into(found: SandboxId, state_dir: str, source: str, target: str, most: int) -> None:
    said = bytearray()
    action = f"copy '{source}' to '{target}' in sandbox '{found}'"
    mode = os.stat(source).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a directory is the error of open()
        raise FailedPrecondition(f"copy '{source}' into sandbox '{found}': it is not a regular file")
    with open(source, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size > most:
            raise FailedPrecondition(f"{action}: {status.st_size} bytes are more than {most} (hint: --max-size)")
        words = ("sh", "-c", _INTO, "sh", target, str(status.st_size), f"{status.st_mode & 0o777:o}")
        code = run_in_guest(
            *(found, state_dir, words),
            write=said.extend,
            read=lambda: file.read(_CHUNK_BYTES),
            silence_s=_SILENCE_S,
        )
    _check(code, action, said)


def _copy_out_of(found: SandboxId, state_dir: str, source: str, target: str, most: int) -> None:
    action = f"copy '{source}' in sandbox '{found}' to '{target}'"
    with _Received(action, most) as received:
        code = run_in_guest(
            *(found, state_dir, ("sh", "-c", _OUT_OF, "sh", source)), write=received.take, silence_s=_SILENCE_S
        )
        _check(code, action, b"the guest cannot read it")
        received.place(target)


class _Received:
    """A file that arrives from an untrusted guest: its mode as the first line, then its content, of limited size."""

    def __init__(self, action: str, most: int) -> None:
        self._action, self._most = action, most
        self._mode = b""
        self._has_mode = False
        self._size = 0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> "_Received":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take(self, data: bytes) -> None:
        if not self._has_mode:
            line, end, data = data.partition(b"\n")
            self._mode += line
            self._has_mode = bool(end)
            if len(self._mode) > _MAX_MODE_CHARS:
                raise FailedPrecondition(f"{self._action}: the guest names no mode")
        self._size += len(data)
        if self._size > self._most:
            raise FailedPrecondition(f"{self._action}: it is larger than {self._most} bytes (hint: --max-size)")
        self._file.write(data)

    def place(self, target: str) -> None:
        """`target` has the content: a device or FIFO is written, a regular file replaced by a whole one."""
        if not re.fullmatch(rb"[0-7]{1,4}", self._mode):
            raise FailedPrecondition(f"{self._action}: the guest names no mode")
        self._file.seek(0)
        kind = os.stat(target).st_mode if os.path.exists(target) else stat.S_IFREG
        if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            with open(target, "wb", buffering=0) as special:
                shutil.copyfileobj(self._file, special)
            return
        if not stat.S_ISREG(kind):
            raise FailedPrecondition(f"{self._action}: '{target}' is no regular file")
        directory = os.path.dirname(target) or "."
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".pyshim-cp-", delete=False) as file:
            try:
                shutil.copyfileobj(self._file, file)
                os.fchmod(file.fileno(), int(self._mode, 8) & 0o777)
                file.flush()
                os.replace(file.name, target)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(file.name)
                raise


def _check(code: int, action: str, said: bytes | bytearray) -> None:
    if code:
        text = " ".join(said[:_MAX_SAID_BYTES].decode(errors="replace").split())
        raise FailedPrecondition(f"{action}: {text or f'exit {code}'}")
