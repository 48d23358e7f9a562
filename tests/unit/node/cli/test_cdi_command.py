"""`pyshim config cdi`."""

import json
from pathlib import Path

import pytest

from pyshim.node.cli.command import run
from tests.unit.cdi.spec_files import put, spec


@pytest.fixture
def low(tmp_path: Path) -> Path:
    return tmp_path / "low"


def test_list_names_devices_and_errors(low: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(low, "a.json", spec("v.com/a", "x"))

    assert run(["config", "cdi", "--directory", str(low)]) == 0
    assert capsys.readouterr().out == f"v.com/a=x  {low}/a.json\n"
    put(low, "b.json", "{")
    assert run(["config", "cdi", "--json", "--directory", str(low)]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == [{"name": "v.com/a=x", "file": f"{low}/a.json"}]
    assert f"load cdi spec '{low}/b.json': not JSON" in shown.err


def test_resolve_prints_edits_or_a_whole_spec(low: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(low, "a.json", spec("v.com/a", "x"))
    config = put(low, "config.oci", {"process": {"env": ["DEV_x=0"]}})
    where = ["--directory", str(low)]

    assert run(["config", "cdi", "v.com/a=x", *where]) == 0
    assert json.loads(capsys.readouterr().out) == {"env": ["COMMON=1", "DEV_x=1"]}
    assert run(["config", "cdi", "v.com/a=x", "--oci", str(config), *where]) == 0
    assert json.loads(capsys.readouterr().out) == {"process": {"env": ["DEV_x=1", "COMMON=1"]}}
    assert run(["config", "cdi", "v.com/a=y", "v.com/a=z", *where]) == 1
    assert "no spec defines 'v.com/a=y', 'v.com/a=z'" in capsys.readouterr().err
    assert run(["config", "cdi", "v.com/a=x", "--oci", str(low / "none"), *where]) == 1
    assert "ENOENT (no such file or directory)" in capsys.readouterr().err
