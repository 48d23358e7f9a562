"""What the run of Kata's suite makes of bats' words and of its own table."""

from __future__ import annotations

import re

import pytest

from integration.kubernetes.kata_suite import PAGE, expectations, outcome, page_table, read_table

PASSED = "1..2\nok 1 first\nok 2 second\n"


@pytest.mark.parametrize(
    ("said", "code", "comes_to"),
    [
        (PASSED, 0, "passes"),
        ("1..2\nok 1 first\nnot ok 2 second\n# (in test file k8s-x.bats, line 3)\n", 1, "differs"),
        ("1..1\nok 1 first # skip Test not supported for qemu.\n", 0, "skips"),
        ("1..2\nok 1 first\nok 2 second # skip no discard\n", 0, "mixed"),
        ("", 0, "differs"),
        ("bash: bats: command not found\n", 127, "differs"),
        ("1..2\nok 1 first\n", 0, "differs"),
        (PASSED, 1, "differs"),
        (PASSED, -9, "differs"),
    ],
    ids=["passed", "failed", "all skipped", "some skipped", "silent", "no bats", "ended early", "exit code", "killed"],
)
def test_a_file_passes_only_when_every_test_that_it_has_did(said: str, code: int, comes_to: str) -> None:
    assert outcome(said, code).comes_to == comes_to


def test_a_failed_test_is_named() -> None:
    assert "second" in outcome("1..2\nok 1 first\nnot ok 2 second\n", 1).shown


def test_a_file_without_a_line_and_a_line_without_a_file_are_named() -> None:
    table = {"passes": {"caps": ""}, "skips": {"gone": "why"}}

    assert expectations({"passes": {"caps": ""}}, {"caps"}) == {"caps": "passes"}
    with pytest.raises(ValueError, match=r"no line for the file new.*a line for no file: gone"):
        expectations(table, {"caps", "new"})


def test_each_file_is_in_one_section_and_on_the_page_and_has_a_reason_unless_it_passes() -> None:
    table = read_table()
    names = [name for lines in table.values() for name in lines]

    assert len(names) == len(set(names))
    for section, lines in table.items():
        assert [name for name, why in lines.items() if bool(why) == (section == "passes")] == []
    assert [name for name in names if not re.search(rf"[ |]{name}[ ,]", PAGE.read_text())] == []


def test_the_page_says_of_a_file_that_did_not_run_or_came_to_something_else() -> None:
    table = {"passes": {"caps": "", "env": "", "exec": ""}}
    results = {
        "caps": {"comes_to": "passes", "shown": "1 of 1 passed"},
        "exec": {"comes_to": "differs", "shown": "1 of 1 failed: exec"},
    }

    rows = page_table(table, results).splitlines()[2:]

    assert rows == ["| caps | passes |", "| env | not run; expected: passes |", "| exec | **1 of 1 failed: exec** |"]
