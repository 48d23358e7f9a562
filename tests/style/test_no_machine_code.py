"""No Python file maps memory to execute it, traces a process, or drops pages of its own heap."""

from __future__ import annotations

import re

from .project_files import python_files, shown, text

_FORBIDDEN = re.compile(r"\bPROT_EXEC\b|\bPTRACE_[A-Z]+\b|\bMADV_(DONTNEED|POPULATE_WRITE)\b|\bob_refcnt\b")


def test_no_file_executes_bytes_or_works_on_the_interpreters_memory() -> None:
    found = [
        f"{shown(path)}:{number}: {match.group()}"
        for path in python_files("pyshim", "hypervisors", "guest", "bench", "integration")
        for number, line in enumerate(text(path).splitlines(), start=1)
        if (match := _FORBIDDEN.search(line))
    ]

    assert found == []
