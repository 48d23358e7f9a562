"""What `make bench-compare` says about two results."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import compare


def row(title: str, ratio: float, unit: str = "ms", spread: float = 0.0) -> dict[str, Any]:
    return {"title": title, "unit": unit, "ratio": ratio, "ratios": [ratio - spread, ratio, ratio + spread]}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (row("t", 2.0), row("t", 1.0), "better (-50%)"),
        (row("t", 1.0), row("t", 2.0), "worse (+100%)"),
        (row("t", 1.0, "MB/s"), row("t", 2.0, "MB/s"), "better (+100%)"),
        (row("t", 1.0), row("t", 1.04), "same (+4%)"),
        (row("t", 1.0, spread=0.5), row("t", 1.4), "same (+40%)"),
    ],
)
def test_verdicts(old: dict[str, Any], new: dict[str, Any], expected: str) -> None:
    assert compare.verdict(old, new) == expected


def test_rows_of_one_result_only_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps({"rows": [row("both", 2.0), row("gone", 1.0)]}))
    b.write_text(json.dumps({"rows": [row("both", 2.0), row("new", 1.0)]}))

    assert compare.main([str(a), str(b)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "what         A         B  change",
        "both      2.00      2.00  same (+0%)",
        "gone      1.00         -  only in A",
        "new          -      1.00  only in B",
    ]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"rows": [{}]}'])
def test_what_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)

    assert compare.main([str(path), str(path)]) == 1
    assert "not a result of `make bench`" in capsys.readouterr().err
    assert compare.main([]) == 2
