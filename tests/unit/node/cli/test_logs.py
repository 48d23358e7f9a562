"""`pyshim logs`: containerd's log and the console, parsed."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pyshim.log import LineFormatter
from pyshim.node.cli.command import run
from pyshim.node.cli.logs import LogEntry, parsed, shim_entries, text_of

PROJECT = Path(__file__).parents[4]
LOG = """\
time="2026-11-23T01:00:00Z" level=info msg="starting containerd" revision=x
time="2026-11-23T01:00:01Z" level=info msg="vm started" sandbox=ab12 pid=77 logger=pyshim.pod
time="2026-11-23T01:00:02Z" level=debug msg="-->" sandbox=ab12 logger=pyshim.task
Nov 23 01:00:03 node containerd[1]: time="2026-11-23T01:00:03Z" level=warning msg="say \\"no\\"\\nagain" sandbox=ab12
time="2026-11-23T01:00:04Z" level=error msg="of another" sandbox=ab123
not a line of logrus about ab12
time="2026-11-23T01:00:05Z" level=info msg="StopPodSandbox" id=ab12
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "sbs" / "ab12").mkdir(parents=True)
    (tmp_path / "vm" / "ab12").mkdir(parents=True)
    (tmp_path / "vm" / "ab12" / "console.log.1").write_text("older\n")
    (tmp_path / "vm" / "ab12" / "console.log").write_bytes(b"[    0.1] Linux\r\n\x1b]0;title\x07evil\xff\n")
    (tmp_path / "containerd.log").write_text(LOG)
    places = ["--file", f"{tmp_path}/containerd.log", "--state-dir", f"{tmp_path}/sbs", "--vm-root", f"{tmp_path}/vm"]
    return ["logs", "ab", *places]


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert run([*words, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_lines_of_the_sandbox_are_parsed_and_its_console_follows(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = shown(words, capsys)

    assert [(each["source"], each["level"], each["message"]) for each in found] == [
        ("shim", "info", "vm started"),
        ("shim", "debug", "-->"),
        ("shim", "warning", 'say "no"\nagain'),
        ("shim", "info", "StopPodSandbox"),
        ("console", "", "older"),
        ("console", "", "[    0.1] Linux"),
        ("console", "", "\x1b]0;title\x07evil�"),
    ]
    assert found[0]["time"] == "2026-11-23T01:00:01Z"
    assert found[0]["fields"] == {"pid": "77", "logger": "pyshim.pod"}


def test_people_get_lines_that_steer_no_terminal(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2026-11-23T01:00:01Z info    vm started pid=77 logger=pyshim.pod"
    assert lines[2] == '2026-11-23T01:00:03Z warning say "no" again'
    assert lines[-1] == "console  ]0;title evil�"


@pytest.mark.parametrize(
    ("more", "messages"),
    [
        (["--level", "warning", "--only", "shim"], ['say "no"\nagain']),
        (["--only", "console"], ["older", "[    0.1] Linux", "\x1b]0;title\x07evil�"]),
    ],
)
def test_less_is_shown_on_request(
    words: list[str], more: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [each["message"] for each in shown([*words, *more], capsys)] == messages


def test_lines_of_the_shims_own_formatter_are_read_back() -> None:
    record = logging.makeLogRecord(
        {"msg": 'a "b"\\ \n é', "levelname": "WARNING", "name": "pyshim.x", "error": "x=y z"}
    )

    fields = parsed(LineFormatter({"sandbox": "ab12"}).format(record))

    assert fields.pop("time")
    assert fields == {
        "level": "warning",
        "msg": 'a "b"\\ \n é',
        "sandbox": "ab12",
        "error": "x=y z",
        "logger": "pyshim.x",
    }


@pytest.mark.parametrize("line", ['time="', 'a="b', "ab12", "=", 'x="\\', "sandbox=ab12 " * 1000])
def test_broken_lines_end_nothing(line: str) -> None:
    list(shim_entries([line], "ab12"))


def test_a_sandbox_of_which_nothing_is_known_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["logs", "zz", *words[2:]]) == 1

    assert capsys.readouterr().err == (
        "pyshim: find sandbox 'zz': no recorded id begins with this, and no line names it\n"
    )


def test_a_sandbox_that_has_ended_still_has_its_shims_lines(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sbs" / "ab12").rmdir()

    assert len(shown([*words[:1], "ab12", *words[2:], "--only", "shim"], capsys)) == 4


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (None, "pyshim: read journal for 'ab12': journalctl: ENOENT"),
        ("#!/bin/sh\necho 'No journal files were found.' >&2\nexit 1\n", "No journal files were found. (hint: --file"),
    ],
)
def test_a_node_without_a_journal_is_one_line(
    words: list[str],
    tmp_path: Path,
    program: str | None,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bin").mkdir()
    if program:
        (tmp_path / "bin" / "journalctl").write_text(program)
        (tmp_path / "bin" / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")

    assert run([*words[:2], *words[4:]]) == 1

    captured = capsys.readouterr()
    assert error in captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(("more", "unit"), [([], "containerd"), (["--unit", "crio"], "crio")])
def test_the_journal_is_asked_for_the_runtimes_unit(
    words: list[str],
    tmp_path: Path,
    more: list[str],
    unit: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "journalctl"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexec cat {tmp_path}/containerd.log\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    assert len(shown([*words[:2], *words[4:], *more, "--only", "shim"], capsys)) == 4
    assert (tmp_path / "asked").read_text().startswith(f"--unit {unit} --output cat ")


def test_a_line_of_text_has_no_control_characters() -> None:
    entry = LogEntry(source="shim", time="t", level="info", message="a\x1b[2J\x9b", fields={"k": "\r\n"})

    assert text_of(entry) == "t info    a [2J  k="


def test_the_last_lines_of_each_are_shown_on_request(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = shown([*words, "--tail", "1"], capsys)

    assert [each["message"] for each in found] == ["StopPodSandbox", "\x1b]0;title\x07evil\ufffd"]


def test_lines_are_shown_as_they_come(words: list[str], tmp_path: Path) -> None:
    log, console = tmp_path / "containerd.log", tmp_path / "vm" / "ab12" / "console.log"
    command = [sys.executable, "-m", "pyshim", *words, "--tail", "1", "--follow"]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout is not None
            first = [follower.stdout.readline() for _ in range(2)]
            with log.open("a") as file:
                file.write('time="2026-11-23T01:01:00Z" level=info msg="later" sandbox=ab12\n')
            with console.open("a") as file:
                file.write("later\n")
            coming = {follower.stdout.readline() for _ in range(2)}
            console.rename(f"{console}.1")
            console.write_text("rotated\n")
            rotated = follower.stdout.readline()
            follower.send_signal(signal.SIGINT)
            code = follower.wait(60)
        finally:
            follower.kill()

    assert "StopPodSandbox" in first[0]
    assert first[1].startswith("console")
    assert coming == {"2026-11-23T01:01:00Z info    later\n", "console later\n"}
    assert (rotated, code) == ("console rotated\n", 0)


def test_the_journal_is_asked_for_the_time(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "journalctl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexec cat {tmp_path}/containerd.log\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    from_journal = [*words[:2], *words[4:], "--only", "shim", "--since", "1 hour ago"]

    assert run(from_journal) == 0
    assert run([*from_journal, "--follow"]) == 0, "the journal of this test ends"
    once, history, coming = (tmp_path / "asked").read_text().splitlines()
    assert once.endswith(" --since=1 hour ago")
    until = history.rpartition(" --until=@")[2]
    assert coming.endswith(f" --follow --no-tail --since=@{until}")
    assert run([*words, "--since", "today"]) == 2
