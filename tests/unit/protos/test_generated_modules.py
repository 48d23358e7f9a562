"""The generated modules are current, import side by side, and import grpc only for a caller of gRPC."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "protos"


def _run(*imports: str) -> subprocess.CompletedProcess[str]:
    program = "\n".join(["import sys", *(f"import {name}" for name in imports), "print(*sys.modules)"])
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _message_modules(*rooms: str) -> list[str]:
    paths = sorted(path for room in rooms for path in (SOURCE / room).glob("*_pb2.py"))
    assert paths
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]


def test_generated_modules_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    code = importlib.import_module("protos.generate").main(["--check"])

    assert (code, capsys.readouterr().err) == (0, "")


def test_grpc_stubs_exist_exactly_for_what_is_called_over_grpc() -> None:
    stubs = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*_pb2_grpc.py")}

    kubelet = {f"kubelet/{name}_v1_pb2_grpc.py" for name in ("dra", "pluginregistration", "podresources")}
    assert stubs == {"cri/v1_pb2_grpc.py", *kubelet}


def test_all_message_modules_import_in_one_process() -> None:
    done = _run(*_message_modules(".", "containerd", "agent", "cgroups", "kubelet", "cri"))

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("room", [".", "containerd", "agent", "cgroups", "kubelet", "cri"])
def test_message_modules_import_neither_grpc_nor_the_rest_of_the_project(room: str) -> None:
    done = _run(*_message_modules(room))

    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "protos" in loaded
    assert loaded.isdisjoint({"grpc", "grpc_tools", "pyshim", "hypervisors", "guest"})


def test_message_modules_of_one_edge_do_not_load_another_s() -> None:
    done = _run("protos.containerd.task_v2_pb2")

    rooms = {name for name in done.stdout.split() if name.startswith("protos.") and name.count(".") == 1}
    assert rooms == {"protos.containerd"}
