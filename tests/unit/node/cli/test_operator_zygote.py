"""`pyshim zygote`: it becomes a zygote whose forks run as isolated as an executed shim."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pyshim.start.zygote import address

REPOSITORY = Path(__file__).parents[4]


def test_the_command_becomes_an_isolated_zygote_and_ends_at_sigterm() -> None:
    with tempfile.TemporaryDirectory(prefix="zygote-") as directory:
        command = [sys.executable, "-m", "pyshim", "zygote", "--directory", directory]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            assert process.stderr is not None
            first = process.stderr.readline()
            listens = Path(address(directory)).is_socket()
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()

        assert words[1:3] == [b"-I", b"-S"]
        assert (process.returncode, first, err) == (0, b"zygote: ready\n", b"zygote: ended\n")
        assert listens
        assert not Path(address(directory)).exists()


@pytest.mark.parametrize("idle", ["soon", "-1"])
def test_an_idle_time_that_is_none_is_refused(idle: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pyshim", "zygote", f"--idle={idle}"], cwd=REPOSITORY, capture_output=True, timeout=60
    )

    assert done.returncode == 2
    assert b"--idle" in done.stderr
