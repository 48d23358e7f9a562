"""Text from an untrusted peer: bounded, on one line, without power over a terminal."""

import pytest

from pyshim.host.streams.text_tail import MAX_LINE_BYTES, TextTail, printable


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
def test_printable(text: str, expected: str) -> None:
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
