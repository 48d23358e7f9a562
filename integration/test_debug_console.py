"""`pyshim exec` and `cp` through the debug console of a guest, over a vsock that a vhost-device-vsock serves."""

from __future__ import annotations

import hashlib
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import GROUND
from .framework import shim_config
from .framework.ctr import Ctr

PROJECT = Path(__file__).resolve().parents[1]
EVERY_BYTE = bytes(range(256)) * 64

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(
        shutil.which(shim_config.VSOCK_PROGRAM) is None,
        reason=f"no {shim_config.VSOCK_PROGRAM} (cargo install {shim_config.VSOCK_PROGRAM})",
    ),
]


def ask(*words: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([PROJECT / "bin" / "pyshim", *words], input=given, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def sandbox(ctr: Ctr, module_leaves_nothing: None) -> Iterator[str]:
    """A container whose guest has a console."""
    program = shutil.which(shim_config.VSOCK_PROGRAM)
    assert program is not None
    directory = GROUND / "console"
    directory.mkdir()
    way = {"agent_channel": "vhost-user", "vhost_user_vsock_daemon": program}
    config = shim_config.with_keys(directory, way, agent={"debug_console_enabled": True})
    ctr.start("console", config=config)
    try:
        yield "console"
    finally:
        ctr.remove(["console"])
        shutil.rmtree(directory)


def test_exec_has_output_and_exit_code_of_the_command(sandbox: str) -> None:
    done = ask("exec", sandbox, "sh", "-c", "uname -r; exit 7")

    assert (done.returncode, done.stderr) == (7, b"")
    assert done.stdout.decode().strip() not in ("", platform.release())


def test_exec_passes_its_input_on_byte_by_byte(sandbox: str) -> None:
    done = ask("exec", "-i", sandbox, "sha256sum", given=EVERY_BYTE)

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.split()[0].decode() == hashlib.sha256(EVERY_BYTE).hexdigest()


def test_a_command_that_its_reader_leaves_is_over_and_the_guest_there_for_the_next(sandbox: str) -> None:
    for _ in range(3):
        words = [str(PROJECT / "bin" / "pyshim"), "exec", sandbox, "sh", "-c", "while :; do echo x; done"]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as command:
            assert command.stdout is not None
            command.stdout.read(2000)
            command.stdout.close()

        assert command.returncode == 128 + signal.SIGPIPE
        assert ask("exec", sandbox, "true").returncode == 0


def test_cp_copies_a_file_into_the_guest_and_back(sandbox: str) -> None:
    sent, came, none = (GROUND / "console" / name for name in ("sent", "came", "none"))
    sent.write_bytes(EVERY_BYTE)

    for source, target in ((str(sent), f"{sandbox}:/run/copied"), (f"{sandbox}:/run/copied", str(came))):
        done = ask("cp", source, target)
        assert (done.returncode, done.stderr) == (0, b"")

    assert came.read_bytes() == EVERY_BYTE
    missing = ask("cp", f"{sandbox}:/run/none", str(none))
    assert missing.returncode == 1
    assert b"/run/none" in missing.stderr
    assert not none.exists()
