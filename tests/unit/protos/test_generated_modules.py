"""The generated modules are current, import side by side, and import grpc only for a caller of gRPC."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "protos"


def _generator() -> ModuleType:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    return importlib.import_module("protos.generate")


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A directory named protos with one service, its modules generated."""
    source = tmp_path / "protos"
    source.mkdir()
    shutil.copy(SOURCE / "hypervisor.proto", source)
    assert _generator().main([], source) == 0
    return source


def _run(*imports: str) -> subprocess.CompletedProcess[str]:
    program = "\n".join(["import sys", *(f"import {name}" for name in imports), "print(*sys.modules)"])
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _message_modules(*rooms: str) -> list[str]:
    paths = sorted(path for room in rooms for path in (SOURCE / room).glob("*_pb2.py"))
    assert paths
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]


def test_generated_modules_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    code = _generator().main(["--check"])

    assert (code, capsys.readouterr().err) == (0, "")


def test_check_names_every_module_that_is_not_current_and_changes_none(
    small_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_tree / "hypervisor_pb2.py").write_text("# edited\n")
    (small_tree / "hypervisor_pb2.pyi").unlink()
    (small_tree / "gone_pb2.py").write_text("")
    capsys.readouterr()

    code = _generator().main(["--check"], small_tree)

    said = capsys.readouterr().err.splitlines()
    assert code == 1
    assert said[:3] == ["left over: gone_pb2.py", "stale: hypervisor_pb2.py", "missing: hypervisor_pb2.pyi"]
    assert (small_tree / "hypervisor_pb2.py").read_text() == "# edited\n"
    assert (small_tree / "gone_pb2.py").exists()
    assert not (small_tree / "hypervisor_pb2.pyi").exists()


def test_generating_repairs_every_kind_of_difference(small_tree: Path) -> None:
    (small_tree / "hypervisor_pb2.py").write_text("# edited\n")
    (small_tree / "hypervisor_pb2.pyi").unlink()
    (small_tree / "gone_pb2.py").write_text("")

    assert _generator().main([], small_tree) == 0

    assert _generator().main(["--check"], small_tree) == 0
    assert not (small_tree / "gone_pb2.py").exists()
    assert (small_tree / "hypervisor_pb2.py").read_bytes() == (SOURCE / "hypervisor_pb2.py").read_bytes()


def test_a_changed_definition_makes_its_modules_stale(small_tree: Path) -> None:
    definition = small_tree / "hypervisor.proto"
    definition.write_text(definition.read_text() + "\nmessage Added {}\n")

    assert _generator().main(["--check"], small_tree) == 1


def test_a_definition_protoc_refuses_stops_the_run_and_leaves_the_modules(small_tree: Path) -> None:
    before = {path.name: path.read_bytes() for path in small_tree.iterdir() if path.suffix != ".proto"}
    (small_tree / "hypervisor.proto").write_text("message {")

    with pytest.raises(SystemExit, match="protoc failed"):
        _generator().main([], small_tree)

    assert {path.name: path.read_bytes() for path in small_tree.iterdir() if path.suffix != ".proto"} == before


def test_grpc_stubs_exist_exactly_for_what_is_called_over_grpc() -> None:
    stubs = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*_pb2_grpc.py")}

    assert stubs == {"cri/v1_pb2_grpc.py", "kubelet/podresources_v1_pb2_grpc.py"}


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
