"""The launcher script as containerd executes it: any directory, hardly any environment, through a symlink."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyshim import __version__
from pyshim.node.install.launcher import import_paths, install, launcher_text

VERSION = f"containerd-shim-pykata-v2:\n  Version:  {__version__}\n".encode()


def run(path: Path, *words: str, cwd: str = "/") -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run([path, *words], cwd=cwd, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)


def test_launcher_runs_from_anywhere_without_an_environment(tmp_path: Path) -> None:
    path = Path(install(str(tmp_path / "new" / "bin")))

    result = run(path, "-v")

    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.startswith(VERSION)
    assert path.name == "containerd-shim-pykata-v2"


def test_launcher_runs_through_a_symlink(tmp_path: Path) -> None:
    link = tmp_path / "elsewhere"
    link.symlink_to(install(str(tmp_path / "bin")))

    assert run(link, "-v").stdout.startswith(VERSION)


def test_launcher_can_be_replaced_by_another(tmp_path: Path) -> None:
    first = install(str(tmp_path))

    assert install(str(tmp_path)) == first
    assert [path.name for path in tmp_path.iterdir()] == ["containerd-shim-pykata-v2"]


@pytest.mark.parametrize("directory", ["py thon", "quo'te", "n" * 240], ids=["blank", "quote", "long"])
def test_interpreter_whose_path_no_shebang_can_hold_is_reached_through_sh(tmp_path: Path, directory: str) -> None:
    home = tmp_path / directory
    home.mkdir()
    python = home / f"python x{sys.version_info.minor}"
    python.symlink_to(os.path.realpath(sys.executable))
    launcher = tmp_path / "launcher"
    launcher.write_text(launcher_text(str(python), import_paths()))
    launcher.chmod(0o755)

    result = run(launcher, "-v")

    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.startswith(VERSION)


def test_launcher_ignores_the_python_variables_of_its_caller(tmp_path: Path) -> None:
    (tmp_path / "os.py").write_text("raise SystemExit('hijacked')")
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": "/nonexistent", "PYTHONWARNINGS": "error"}

    result = subprocess.run([install(str(tmp_path / "bin")), "-v"], cwd=tmp_path, env=environment, capture_output=True)

    assert result.stdout.startswith(VERSION)


def test_runcs_shim_finds_the_error_of_an_oci_runtime_that_is_none(tmp_path: Path) -> None:
    """It reads the last error of its file, and Docker shows it to the user."""
    log = tmp_path / "log.json"
    words = ("--root", "/run/x", "--log", str(log), "--log-format", "json", "--systemd-cgroup", "create", "c1")

    result = run(Path(install(str(tmp_path / "bin"))), *words)

    entry = json.loads(log.read_text())
    assert (result.returncode, entry["level"]) == (1, "error")
    assert entry["msg"] == result.stderr.decode().strip()
    assert entry["msg"].startswith("run action 'create': ")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "run action '': expected start, delete, serve or zygote\n"),
        (
            ("--root", "/run/x", "create", "--bundle", "/b", "c1"),
            "run action 'create': expected start, delete, serve or zygote (hint: this is containerd's shim and no OCI"
            " runtime: Docker names it by runtimeType, not by path)\n",
        ),
        (("frobnicate",), "run action 'frobnicate': expected start, delete, serve or zygote\n"),
        (("-id",), "parse flag '-id': it needs a value\n"),
        (("start",), "check flag '-namespace': it is required by 'start'\n"),
    ],
)
def test_wrong_call_fails_with_one_line(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    result = run(Path(install(str(tmp_path))), *words)

    assert (result.returncode, result.stdout, result.stderr.decode()) == (1, b"", text)
