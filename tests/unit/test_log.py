import json
import logging
import os
import shlex
from collections.abc import Callable, Iterator

import pytest

from pyshim.log import FdHandler, LineFormatter, set_debug, set_up


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.Logger("pyshim.test", logging.DEBUG)
    yield logger
    for handler in logger.handlers:
        handler.close()


def attach(logger: logging.Logger, fd: int, **fields: object) -> None:
    handler = FdHandler(fd)
    handler.setFormatter(LineFormatter(fields))
    logger.addHandler(handler)


def line(logger: logging.Logger, read_end: int) -> str:
    return os.read(read_end, 1 << 16).decode()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe2(os.O_NONBLOCK)
    yield read_end, write_end
    os.close(read_end)
    os.close(write_end)


def test_line_has_containerds_form(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    attach(logger, pipe[1], sandbox="abc")

    logger.warning("vm started", extra={"pid": 7, "path": "/a b", "empty": ""})

    text = os.read(pipe[0], 1000).decode()
    assert text.endswith('level=warning msg="vm started" sandbox=abc pid=7 path="/a b" empty="" logger=pyshim.test\n')
    assert text.startswith('time="20')
    assert text.split('"')[1].endswith("Z")


def test_value_with_line_ends_and_quotes_stays_on_one_line(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    attach(logger, pipe[1])

    logger.info('say "hi"\n', extra={"error": "a\nlevel=fatal\x1b[0m"})

    text = os.read(pipe[0], 1000).decode()
    assert text.count("\n") == 1
    words = dict(word.split("=", 1) for word in shlex.split(text.replace("\\", "\\\\").replace('\\\\"', '\\"')))
    assert json.loads(f'"{words["error"]}"') == "a\nlevel=fatal\x1b[0m"


def test_traceback_is_a_field(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    attach(logger, pipe[1])

    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("call failed")

    text = os.read(pipe[0], 10000).decode()
    assert text.count("\n") == 1
    assert 'level=error msg="call failed"' in text
    assert "KeyError: 'x'" in text


def _raising(kind: type[Exception]) -> Callable[..., str]:
    def fail(*_: object, **__: object) -> str:
        raise kind

    return fail


@pytest.mark.parametrize("kind", [MemoryError, SystemError])
def test_a_traceback_that_memory_is_too_short_for_is_the_errors_name(
    logger: logging.Logger, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    attach(logger, pipe[1])
    monkeypatch.setattr("traceback.print_exception", _raising(kind))

    logger.error("call failed", exc_info=ZeroDivisionError())

    assert line(logger, pipe[0]).endswith(" traceback=ZeroDivisionError\n")


def test_a_line_that_memory_is_too_short_for_does_not_fail_its_caller(
    logger: logging.Logger, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(logger, pipe[1])
    monkeypatch.setattr(LineFormatter, "format", _raising(MemoryError))

    logger.error("lost")

    monkeypatch.undo()
    logger.error("kept")
    assert "kept" in line(logger, pipe[0])


def test_full_pipe_loses_lines_but_never_blocks_or_glues_them(logger: logging.Logger, pipe: tuple[int, int]) -> None:
    attach(logger, pipe[1])

    for _ in range(40):
        logger.info("x" * 5000)
    received = os.read(pipe[0], 1 << 20)
    logger.info("after")

    rest = os.read(pipe[0], 1 << 20)
    *lines, last = (received + rest).decode().removesuffix("\n").split("\n")
    assert 'msg="after"' in last
    assert last.startswith("time=")
    assert 10 < len([text for text in lines if text]) < 40


def test_log_without_a_reader_is_dropped(logger: logging.Logger) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    attach(logger, write_end)

    logger.info("no reader")

    os.close(write_end)


def test_bad_log_call_does_not_fail_its_caller(
    logger: logging.Logger, pipe: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    attach(logger, pipe[1])

    logger.info("%d", "not a number")

    assert "TypeError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("debug", "later", "lines"), [(False, False, 1), (True, False, 2), (False, True, 2)], ids=["off", "on", "later"]
)
def test_debug_decides_about_debug_lines(pipe: tuple[int, int], debug: bool, later: bool, lines: int) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        set_up(debug=debug, fd=pipe[1])
        if later:  # the configuration's enable_debug, read once a sandbox is asked for
            set_debug()
        logging.getLogger("pyshim.x").debug("detail")
        logging.getLogger("pyshim.x").info("news")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)

    assert os.read(pipe[0], 1000).count(b"\n") == lines
