"""Text from an untrusted peer: bounded, paced, on one line, without power over a terminal."""

import asyncio
import os

import pytest

from pyshim.host import untrusted_text
from pyshim.host.fds import OwnedFd
from pyshim.host.untrusted_text import BURST_BYTES, BURST_LINES, MAX_LINE_BYTES, PacedText, TextTail, printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("plain ünïcode", "plain ünïcode", id="plain"),
        pytest.param("\x1b[31;1mred\x1b[0m", "red", id="colour"),
        pytest.param("\x1b]0;title\x07after", "0;titleafter", id="operating-system-command"),
        pytest.param("cut \x1b[12", "cut ", id="unfinished-escape"),
        pytest.param("a\x00b\x7fc\x9bd", "abcd", id="control"),
        pytest.param("tab\there", "tab here", id="tab"),
        pytest.param("one\u2028two", "onetwo", id="line-separator"),
        pytest.param("user\u202etxt.exe", "usertxt.exe", id="right-to-left-override"),
    ],
)
def test_control_characters_are_left_out(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_lines_are_found_however_the_bytes_arrive() -> None:
    data = b"first\r\nsecond \xc3\xa4\nthird"

    for cut in range(len(data)):
        tail = TextTail(max_lines=5)
        tail.feed(data[:cut])
        tail.feed(data[cut:])

        assert tail.lines() == ("first", "second ä", "third")


def test_only_the_last_lines_are_kept_and_every_line_is_passed_on() -> None:
    lines: list[str] = []
    tail = TextTail(max_lines=2, on_line=lines.append)

    tail.feed(b"1\n2\n3\n4")
    tail.finish()

    assert tail.lines() == ("3", "4")
    assert lines == ["1", "2", "3", "4"]


def test_a_line_without_end_is_cut() -> None:
    tail = TextTail(max_lines=3)

    for _ in range(100):
        tail.feed(b"x" * 1000)

    assert [len(line) for line in tail.lines()[:3]] == [MAX_LINE_BYTES] * 3
    assert sum(map(len, tail.lines())) <= 4 * MAX_LINE_BYTES


def read_paced(data: bytes) -> tuple[list[str], list[int]]:
    """The lines that came, and how many had come at each pause."""
    lines: list[str] = []
    pauses: list[int] = []

    async def body() -> None:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(write_fd, True)
        paced = PacedText(OwnedFd(read_fd), max_lines=3, on_line=lines.append)
        writing = asyncio.get_running_loop().run_in_executor(None, write_all, write_fd, data)
        async with asyncio.timeout(120):
            while paced._fd.is_open:
                if paced._resume is not None and (not pauses or pauses[-1] != len(lines)):
                    pauses.append(len(lines))
                await asyncio.sleep(0.001)
            await writing

    asyncio.run(body())
    return lines, pauses


def write_all(fd: int, data: bytes) -> None:
    with open(fd, "wb") as file:
        file.write(data)


def test_a_flood_of_short_lines_is_held_back_though_it_is_few_bytes() -> None:
    """512 KiB of empty-looking lines would be a quarter of a million log records."""
    count = 5 * BURST_LINES
    one_read = untrusted_text._READ_BYTES // 2

    lines, pauses = read_paced(b"x\n" * count)

    assert lines == ["x"] * count
    assert pauses
    assert all(after - before <= BURST_LINES + one_read for before, after in zip((0, *pauses), pauses, strict=False))


def test_a_flood_of_bytes_is_held_back_though_it_is_few_lines() -> None:
    line = b"y" * 1000 + b"\n"

    lines, pauses = read_paced(line * (2 * BURST_BYTES // len(line)))

    assert len(lines) == 2 * BURST_BYTES // len(line)
    assert pauses


def test_little_is_read_without_a_pause() -> None:
    lines, pauses = read_paced(b"one\ntwo")

    assert (lines, pauses) == (["one", "two"], [])
