"""`pyshim cp`: a file into the guest of a sandbox, or out of it, through its debug console."""

import os
import tempfile
from contextlib import suppress

import click

from pyshim.model.errors import FailedPrecondition
from pyshim.model.ids import SandboxId
from pyshim.node.cli.debug_console import run_in_guest
from pyshim.node.cli.output import examples
from pyshim.node.cli.sandboxes import sandbox_id, state_dir_option

_CHUNK_BYTES = 16 * 1024
_MAX_SAID_BYTES = 1000
_INTO = 'cat > "$1.part" && [ "$(wc -c < "$1.part")" -eq "$2" ] && mv "$1.part" "$1"'
"""A script for the guest's shell: the file gets its name only when it is whole."""
_OUT_OF = 'exec cat -- "$1" 2>/dev/null'


@click.command(epilog=examples("pyshim cp perf.data 1a2b:/tmp/perf.data", "pyshim cp 1a2b:/var/log/x.log ."))
@click.argument("source", metavar="FILE|SANDBOX:FILE")
@click.argument("target", metavar="SANDBOX:FILE|FILE")
@state_dir_option
def command(source: str, target: str, state_dir: str) -> int:
    """Copy a file into the guest of a sandbox, or out of it.

    Paths in the guest are absolute, in its own root file system, outside all containers. The copy goes through the
    debug console, as 'pyshim exec' does. For a directory use tar ('pyshim exec --help').
    """
    (from_sandbox, from_path), (to_sandbox, to_path) = _place(source), _place(target)
    if bool(from_sandbox) == bool(to_sandbox):
        raise click.UsageError("expected one SANDBOX:FILE, with an absolute path, and one file of this host")
    if to_sandbox:
        _copy_into(sandbox_id(to_sandbox, state_dir), state_dir, from_path, to_path)
    else:
        if os.path.isdir(to_path):
            to_path = os.path.join(to_path, os.path.basename(from_path))
        _copy_out_of(sandbox_id(from_sandbox, state_dir), state_dir, from_path, to_path)
    return 0


def _place(text: str) -> tuple[str, str]:
    """The sandbox (empty: this host) and the path. `./NAME` is a file of this host, whatever its name."""
    sandbox, colon, path = text.partition(":/")
    return (sandbox, f"/{path}") if colon and not text.startswith((".", "/")) else ("", text)


def _copy_into(found: SandboxId, state_dir: str, source: str, target: str) -> None:
    said = bytearray()
    with open(source, "rb") as file:
        if not os.path.isfile(source):
            raise FailedPrecondition(f"copy '{source}' into sandbox '{found}': it is not a regular file")
        words = ("sh", "-c", _INTO, "sh", target, str(os.fstat(file.fileno()).st_size))
        code = run_in_guest(found, state_dir, words, write=said.extend, read=lambda: file.read(_CHUNK_BYTES))
    _check(code, f"copy '{source}' to '{target}' in sandbox '{found}'", said)


def _copy_out_of(found: SandboxId, state_dir: str, source: str, target: str) -> None:
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(target) or ".", prefix=".pyshim-cp-", delete=False) as file:
        try:
            code = run_in_guest(found, state_dir, ("sh", "-c", _OUT_OF, "sh", source), write=file.write)
            _check(code, f"copy '{source}' in sandbox '{found}' to '{target}'", b"the guest cannot read it")
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
