"""The action `zygote`, as a unit of systemd runs it."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.node.cli.launcher import import_paths
from pyshim.start.zygote import address

CODE = f"import sys; sys.path += {list(import_paths())!r}; from pyshim.__main__ import main; sys.exit(main())"


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="zygote-") as found:  # a short path: a socket's has 107 bytes at most
        yield found


def zygote(*words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", CODE, *words, "zygote"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_it_listens_and_ends_at_sigterm(directory: str) -> None:
    with zygote("-idle", "0", "-directory", directory) as process:
        try:
            assert process.stderr is not None
            first = process.stderr.readline()
            listens = Path(address(directory)).is_socket()
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()

    assert (process.returncode, first, err) == (0, b"zygote: ready\n", b"zygote: ended\n")
    assert listens
    assert not Path(address(directory)).exists()


@pytest.mark.parametrize("idle", ["soon", "-1", "nan"])
def test_an_idle_time_that_is_none_is_refused(idle: str) -> None:
    with zygote("-idle", idle) as process:
        _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (1, f"parse flag '-idle': '{idle}' is not a number of seconds\n".encode())


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "word").touch()
    with zygote("-directory", f"{tmp_path}/word") as process:
        _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (1, f"run zygote '{tmp_path}/word': EEXIST (file exists)\n".encode())
