"""`pyshim`: its subcommands, `pyshim state`, and what wrong usage comes to."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pyshim import __version__
from pyshim.__main__ import operator_main
from pyshim.node.cli.command import SUBCOMMANDS

RECORD = {
    "SandboxContainer": "pod1",
    "HypervisorState": {"Pid": 4711, "Type": "qemu", "APISocket": ""},
    "Network": {"Endpoints": [{"Name": "eth0", "MTU": 1450}, {}], "Tags": ["a", "b"]},
    "Devices": [],
}


def record_in(directory: Path, text: str) -> None:
    (directory / "pod1").mkdir()
    (directory / "pod1" / "persist.json").write_text(text)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert operator_main(["--version"]) == 0

    assert capsys.readouterr().out.startswith(f"pyshim {__version__} (Python 3.")


def test_state_is_a_readable_summary_without_empty_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_in(tmp_path, json.dumps(RECORD))

    assert operator_main(["state", "pod1", "--state-dir", str(tmp_path)]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "SandboxContainer: pod1",
        "HypervisorState:",
        "  Pid: 4711",
        "  Type: qemu",
        "Network:",
        "  Endpoints:",
        "    - Name: eth0",
        "      MTU: 1450",
        "  Tags:",
        "    - a",
        "    - b",
    ]


def test_state_is_printed_as_it_is_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_in(tmp_path, json.dumps(RECORD))

    assert operator_main(["state", "pod1", "--state-dir", str(tmp_path), "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == RECORD


def test_help_names_every_subcommand_without_loading_any() -> None:
    program = """if True:
        import sys
        from pyshim.__main__ import operator_main
        operator_main(["--help"])
        print(*sys.modules)
    """

    output = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=Path(__file__).parents[4])

    shown, loaded = output.rsplit("\n", 2)[:2]
    assert re.findall(r"^  ([a-z-]+)(?: |$)", shown.partition("Subcommands:")[2], re.MULTILINE) == list(SUBCOMMANDS)
    assert not {module for module, _summary in SUBCOMMANDS.values()} & set(loaded.split())


def test_a_launcher_that_others_could_replace_is_not_installed_unless_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o777)
    directory = tmp_path / "bin"

    assert operator_main(["launcher", "install", str(directory)]) == 1
    assert f"root would execute or boot what others can write: '{tmp_path}' by everyone" in capsys.readouterr().err
    assert list(directory.iterdir()) == []

    assert operator_main(["launcher", "install", "--anyway", str(directory)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{directory}/containerd-shim-pykata-v2\n"
    assert f"'{tmp_path}' by everyone" in captured.err
