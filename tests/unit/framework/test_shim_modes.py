"""Shims' logs show if each was forked or executed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from integration.framework.shim_modes import CHOICE, FORKED_FILES, Mode, Start, Starts, starts_in
from pyshim.log import LineFormatter

ROOT = Path(__file__).resolve().parents[3]
FORKED, EXECUTED = Start("a", 7, Mode.FORKED), Start("a", 8, Mode.EXECUTED)


def line(start: Start, sandbox: str = "a", text: str = "shim started") -> str:
    """The line that the shim writes."""
    record = logging.makeLogRecord({"name": "pyshim.serve", "msg": text, "levelno": logging.INFO, "levelname": "INFO"})
    vars(record).update(pid=start.pid, made_by=start.mode.value)
    return LineFormatter({"sandbox": sandbox, "namespace": "k8s.io"}).format(record) + "\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "containerd.log"


def test_starts_are_found_among_other_lines() -> None:
    text = line(FORKED) + line(FORKED, text="shim ended") + 'level=info msg="starting"\n' + line(EXECUTED, 'odd "id"')

    assert [*starts_in(text)][:1] == [FORKED]
    assert [(start.pid, start.mode) for start in starts_in(text)] == [(7, Mode.FORKED), (8, Mode.EXECUTED)]


def test_each_start_is_found_once_and_only_in_a_whole_line(log: Path) -> None:
    starts = Starts(log)
    assert starts.new() == []
    log.write_text(line(FORKED) + line(EXECUTED)[:60])

    assert starts.new() == [FORKED]
    with log.open("a") as file:
        file.write(line(EXECUTED)[60:])
    assert starts.new() == [EXECUTED]
    assert starts.new() == []
    assert [start.mode for start in starts.seen] == [Mode.FORKED, Mode.EXECUTED]


@pytest.mark.parametrize(
    ("meant", "seen", "reason", "refused"),
    [
        (Mode.FORKED, [FORKED], "", False),
        (Mode.FORKED, [], "", False),
        (Mode.FORKED, [FORKED, EXECUTED], "", True),
        (Mode.EXECUTED, [EXECUTED], "", False),
        (Mode.EXECUTED, [EXECUTED, FORKED], "", True),
        (Mode.FORKED, [FORKED, EXECUTED], "the zygote has ended", False),
        (Mode.FORKED, [FORKED], "the zygote has ended", True),
        (Mode.EXECUTED, [EXECUTED], "the zygote has ended", False),
    ],
)
def test_a_shim_that_was_not_made_as_meant_is_refused_unless_its_test_says_why(
    log: Path, monkeypatch: pytest.MonkeyPatch, meant: Mode, seen: list[Start], reason: str, refused: bool
) -> None:
    monkeypatch.setattr("integration.framework.shim_modes.TOLD_WITHIN_S", 0.1)
    log.write_text("".join(map(line, seen)))

    if refused:
        with pytest.raises(AssertionError):
            Starts(log).require(meant, executed_because=reason)
    else:
        Starts(log).require(meant, executed_because=reason)


def test_the_choice_holds_for_every_file_but_those_about_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.stem for path in (ROOT / "integration").glob("test_*.py")}
    forked = {}
    for choice in ("", "forked", "executed"):
        monkeypatch.setenv(CHOICE, choice)
        forked[choice] = {file for file in files if Mode.of_file(file) is Mode.FORKED}

    assert forked == {"": FORKED_FILES, "forked": files - {"test_growth"}, "executed": {"test_zygote"}}
