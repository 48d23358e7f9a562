"""Fields of log calls: the stdlib raises KeyError for one that a record has already, in the middle of the work."""

import ast
import logging
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("pyshim", "hypervisors", "guest/agent")
RESERVED = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def clashes(source: str, file: str) -> list[str]:
    found = []
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        for keyword in call.keywords:
            if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict):
                keys = [key.value for key in keyword.value.keys if isinstance(key, ast.Constant)]
                found += [f"{file}:{call.lineno}: field {key!r}" for key in keys if key in RESERVED]
    return found


def test_no_log_call_has_a_field_that_records_have_already() -> None:
    files = [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]

    assert [clash for path in files for clash in clashes(path.read_text(), str(path.relative_to(REPOSITORY)))] == []
    assert len(files) > 50


def test_a_clash_is_seen() -> None:
    assert clashes('log.info("x", extra={"pid": 1, "process": 2})', "f.py") == ["f.py:1: field 'process'"]
