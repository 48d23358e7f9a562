"""What must not be written anywhere: paths of a developer's machine, hosts of package registries."""

from __future__ import annotations

import re

from .project_files import shown, text, text_files

# Written so that this file does not match itself.
_FORBIDDEN = {
    "a home directory": re.compile(r"/hom[e]/[a-z]+/|/User[s]/[A-Za-z]+/|/roo[t]/\.[a-z]"),
    "a developer's checkout": re.compile(r"(?<![\w.$}/-])/wor[k]/"),
    "a directory outside the project": re.compile(r"\.\./share[d]\b"),
    "a package registry": re.compile(r"(?i)\bpyp[i]\.org|pythonhoste[d]\.org|proxy\.golan[g]\.org|cdn-fastl[y]"),
}
# A lock file names what it locks; licences say what they say.
_EXEMPT = {"requirements.lock", "requirements-dev.lock", "LICENSE"}


def test_no_file_names_a_place_of_a_developers_machine() -> None:
    found = [
        f"{shown(path)}:{number}: {what}: {line.strip()[:120]}"
        for path in text_files()
        if path.name not in _EXEMPT
        for what, pattern in _FORBIDDEN.items()
        if pattern.search(text(path))
        for number, line in enumerate(text(path).splitlines(), 1)
        if pattern.search(line)
    ]

    assert found == []
