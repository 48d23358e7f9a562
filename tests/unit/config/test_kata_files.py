"""The 29 configuration files of Kata 4.1: what becomes of each.

`tests/golden/config/kata-4.1.json` is a table of our own, made from the files' keys and values. For each file it has
the settings that differ from our defaults, paths made up, and what is expected here; `names` are the keys of all files.
"""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pyshim.__main__ import operator_main
from pyshim.config.catalogue import spellings
from pyshim.config.effective import Level
from pyshim.config.keys import Table
from pyshim.config.load import build_config, warnings
from pyshim.config.sources import read_source
from pyshim.config.values import toml_value

from .documents import examined, options

KATA = json.loads((Path(__file__).parents[2] / "golden" / "config" / "kata-4.1.json").read_text(), parse_float=Fraction)
FILES: dict[str, dict[str, Any]] = KATA["files"]
STARTS = [name for name, file in FILES.items() if file["starts"]]


def written(directory: Path, name: str) -> Path:
    lines = [f"hypervisor.{FILES[name]['hypervisor']}.enable_debug = false"]
    lines += [f"{dotted} = {toml_value(value)}" for dotted, value in FILES[name]["settings"].items()]
    path = directory / "configuration.toml"
    path.write_text("\n".join([*lines, ""]))
    return path


def test_no_key_of_katas_is_unknown() -> None:
    tables = {str(table): table for table in Table}
    unknown = []
    for dotted in KATA["names"]:
        table, _, name = dotted.replace("hypervisor.factory", "factory").rpartition(".")
        if (tables[table], name) not in spellings():
            unknown.append(dotted)

    assert unknown == []
    assert len(FILES) == 29


@pytest.mark.parametrize("name", FILES)
def test_the_verdict_on_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    file = FILES[name]
    path = written(tmp_path, name)

    code = operator_main(["config", "check", "--elsewhere", str(path)])

    errors = [line for line in capsys.readouterr().out.splitlines() if ": error: " in line]
    assert (code, len(errors)) == (0 if file["starts"] else 1, len(file["errors"]))
    assert all(name in line for name, line in zip(file["errors"], errors, strict=True))
    effective = examined(path)
    named = {warning.partition(" ")[0] for warning in warnings(effective)}
    assert named == set(file["in_vain"])
    assert all(finding.level < Level.WARNING for finding in effective.findings if finding.verdict is not None)


@pytest.mark.parametrize("name", STARTS)
def test_a_file_of_the_rust_runtime_is_sized_by_its_overheads(tmp_path: Path, name: str) -> None:
    config = build_config(read_source(options(written(tmp_path, name)), {}))

    by_overhead = any(".overhead_" in key for key in FILES[name]["settings"])
    assert config.runtime.sizing_policy == ("overhead" if by_overhead else "sum")
