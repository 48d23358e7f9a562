"""Fields of log calls: the stdlib raises KeyError for one that a record has already, in the middle of the work."""

import ast
import logging

from .project_files import parsed, python_files, shown

RESERVED = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def clashes(tree: ast.Module, file: str) -> list[str]:
    found = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        for keyword in call.keywords:
            if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict):
                keys = [key.value for key in keyword.value.keys if isinstance(key, ast.Constant)]
                found += [f"{file}:{call.lineno}: field {key!r}" for key in keys if key in RESERVED]
    return found


def test_no_log_call_has_a_field_that_records_have_already() -> None:
    files = python_files("pyshim", "hypervisors", "guest")

    assert [clash for path in files for clash in clashes(parsed(path), shown(path))] == []
