"""What must not be written anywhere: paths of somebody's machine, hosts of package registries, names that say
nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .project_files import python_files, shown, text_files

# Written so that this file does not match itself.
_FORBIDDEN = {
    "a home directory": re.compile(r"/hom[e]/[a-z]+/|/User[s]/[A-Za-z]+/|/roo[t]/\.[a-z]"),
    "a developer's checkout": re.compile(r"(?<![\w.$}/-])/wor[k]/"),
    "a directory outside the project": re.compile(r"\.\./share[d]\b"),
    "a package registry": re.compile(r"(?i)\bpyp[i]\.org|pythonhoste[d]\.org|proxy\.golan[g]\.org|cdn-fastl[y]"),
}
_VAGUE_MODULES = re.compile(r"^(utils?|helpers?|manager|misc|common)\.py$")
# A lock file names what it locks; licences say what they say.
_EXEMPT = {"requirements.lock", "requirements-dev.lock", "LICENSE"}


@pytest.mark.parametrize("path", list(text_files()), ids=shown)
def test_file_names_no_place_of_a_developers_machine(path: Path) -> None:
    if path.name in _EXEMPT:
        return
    found = [
        f"{shown(path)}:{number}: {what}: {line.strip()[:120]}"
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        for what, pattern in _FORBIDDEN.items()
        if pattern.search(line)
    ]

    assert found == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [shown(path) for path in python_files() if _VAGUE_MODULES.match(path.name)] == []
