"""What the documents name exists: linked files, tests, paths of the source, verbs of make."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.operator.command import SUBCOMMANDS

from .project_files import ROOT, shown

_DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_OURS = (
    "pyshim/",
    "hypervisors/",
    "protos/",
    "guest/",
    "tests/",
    "integration/",
    "bench/",
    "configs/",
    "scripts/",
    "docs/",
)
# Named as places for something still to be made, or made by running something.
_PLACEHOLDER = re.compile(r"[<>*{}]|FILE")


def _words(text: str) -> Iterator[str]:
    """What stands in backticks, word by word."""
    for quoted in re.findall(r"`([^`\n]+)`", re.sub(r"(?s)```.*?```", "", text)):
        yield from quoted.split()


def _paths(text: str) -> Iterator[str]:
    for word in _words(text):
        if word.startswith(_OURS) and not _PLACEHOLDER.search(word):
            yield word.rstrip(",;:")


@pytest.mark.parametrize("document", _DOCUMENTS, ids=shown)
def test_relative_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    relative = [target for target in targets if "://" not in target]

    assert [target for target in relative if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", _DOCUMENTS, ids=shown)
def test_named_files_and_folders_exist(document: Path) -> None:
    assert [path for path in _paths(document.read_text()) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", _DOCUMENTS, ids=shown)
def test_named_tests_exist(document: Path) -> None:
    sources = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "integration").rglob("*.py")]
    known = {name for path in sources for name in re.findall(r"(?m)^\s*(?:async )?def (test_\w+)", path.read_text())}
    named = {word.rstrip(",") for word in _words(document.read_text()) if re.fullmatch(r"test_\w+,?", word)}

    assert sorted(named - known) == []


@pytest.mark.parametrize("document", _DOCUMENTS, ids=shown)
def test_named_verbs_of_make_exist(document: Path) -> None:
    verbs = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    named = set(re.findall(r"(?m)(?:`|^ *)make ([a-z]+)\b(?=[`\s])", document.read_text()))

    assert sorted(named - verbs) == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()

    assert [page.name for page in _DOCUMENTS if page.parent != ROOT and f"({page.name})" not in index] == ["README.md"]


@pytest.mark.parametrize("document", _DOCUMENTS, ids=shown)
def test_named_subcommands_exist(document: Path) -> None:
    """`pyshim NAME ...` in backticks or as a line of an example."""
    text = document.read_text()
    examples = "\n".join(re.findall(r"(?s)```\w*\n(.*?)```", text))
    named = set(re.findall(r"`(?:bin/)?pyshim ([a-z][a-z-]+)", text))
    named |= set(re.findall(r"(?m)^ *(?:\$ )?(?:bin/)?pyshim ([a-z][a-z-]+)", examples))

    assert sorted(named - set(SUBCOMMANDS)) == []


def test_what_is_named_is_found_in_the_text() -> None:
    """The test of the tests: the patterns see what they are for."""
    text = (
        "see `pyshim/x.py` and `tests/<room>`\n```\nmake no\n```\nuse `make demo`, test `test_a_b`, `hypervisors/q/`."
    )

    assert list(_paths(text)) == ["pyshim/x.py", "hypervisors/q/"]
    assert "test_a_b" in _words(text)
