"""What the documents name exists: linked files, tests, paths of the source, verbs of make."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pyshim.node.cli.command import SUBCOMMANDS

from .project_files import ROOT, python_files, shown, text

_DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("packages/*/*.md"))]
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


def _words(document: str) -> Iterator[str]:
    """What stands in backticks, word by word."""
    for quoted in re.findall(r"`([^`\n]+)`", re.sub(r"(?s)```.*?```", "", document)):
        yield from quoted.split()


def _paths(document: str) -> Iterator[str]:
    for word in _words(document):
        if word.startswith(_OURS) and not _PLACEHOLDER.search(word):
            yield word.rstrip(",;:")


def _offenders(find: Callable[[Path], Iterable[str]]) -> list[str]:
    """What `find` finds in each document, with the document's name in front."""
    return [f"{shown(document)}: {found}" for document in _DOCUMENTS for found in find(document)]


def _sections(document: Path) -> set[str]:
    """The names by which links reach the headings of a page, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?s)```.*?```", "", text(document)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_pages_and_sections_that_exist() -> None:
    def dead_links(document: Path) -> Iterator[str]:
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text(document)):
            page, _, section = target.partition("#")
            found = document.parent / page if page else document
            if "://" in target or (found.exists() and (not section or section in _sections(found))):
                continue
            yield target

    assert _offenders(dead_links) == []


def test_named_files_and_folders_exist() -> None:
    def missing_paths(document: Path) -> Iterator[str]:
        return (path for path in _paths(text(document)) if not (ROOT / path).exists())

    assert _offenders(missing_paths) == []


def test_named_tests_exist() -> None:
    pattern = re.compile(r"(?m)^\s*(?:async )?def (test_\w+)")
    known = {name for path in python_files("tests", "integration") for name in pattern.findall(text(path))}

    def unknown_tests(document: Path) -> set[str]:
        return {word.rstrip(",") for word in _words(text(document)) if re.fullmatch(r"test_\w+,?", word)} - known

    assert _offenders(unknown_tests) == []


def test_named_verbs_of_make_exist() -> None:
    verbs = set(re.findall(r"(?m)^([a-z-]+):", text(ROOT / "Makefile")))

    def unknown_verbs(document: Path) -> set[str]:
        return set(re.findall(r"(?m)(?:`|^ *)make ([a-z-]+)(?=[`\s])", text(document))) - verbs

    assert _offenders(unknown_verbs) == []


def test_named_subcommands_exist() -> None:
    """`pyshim NAME ...` in backticks or as a line of an example."""

    def unknown_subcommands(document: Path) -> set[str]:
        examples = "\n".join(re.findall(r"(?s)```\w*\n(.*?)```", text(document)))
        named = set(re.findall(r"`(?:bin/)?pyshim ([a-z][a-z-]+)", text(document)))
        named |= set(re.findall(r"(?m)^ *(?:\$ )?(?:bin/)?pyshim ([a-z][a-z-]+)", examples))
        return named - set(SUBCOMMANDS)

    assert _offenders(unknown_subcommands) == []


def test_files_of_the_walks_exist() -> None:
    """In ARCHITECTURE.md's tables of folders, a file is in the row's folder, or in that of the row above."""
    missing, seen, folder = [], 0, ""
    for line in text(ROOT / "docs" / "ARCHITECTURE.md").splitlines():
        if not line.startswith("| "):
            folder = ""
            continue
        first, *cells = line.strip("|").split("|")
        named = re.match(r" `([a-z_/]+)` $", first)
        folder = named[1] if named else folder if not first.strip() else ""
        for file in re.findall(r"`([\w/]+\.py)`", "|".join(cells)) if folder else ():
            seen += 1
            path = ROOT / file if file.startswith(_OURS) else ROOT / folder / file
            if not path.exists():
                missing.append(f"{folder}: {file}")

    assert (missing, seen > 50) == ([], True)


def test_files_that_the_source_names_exist() -> None:
    """A file in backticks is in the file's folder, in one below, or counts from one above."""
    files = python_files("pyshim", "hypervisors", "protos", "guest", "tests", "integration", "bench", "scripts")
    names = {"/" + shown(path) for path in files}

    def exists(named: str, by: Path) -> bool:
        folders = [*(f"{shown(above)}/" for above in by.parents if ROOT in above.parents), "", "pyshim/", "guest/"]
        below = f"/{shown(by.parent)}/"
        return any(f"/{folder}{named}" in names for folder in folders) or any(
            name.startswith(below) and name.endswith(f"/{named}") for name in names
        )

    found = [(path, named) for path in files for named in re.findall(r"`([\w./]+\.py)`", text(path))]
    assert len(found) > 100
    assert [f"{shown(path)}: {named}" for path, named in found if not exists(named, path)] == []


def test_every_page_is_in_the_index() -> None:
    index = text(ROOT / "docs" / "README.md")

    pages = [page.name for page in _DOCUMENTS if page.parent == ROOT / "docs"]
    assert [page for page in pages if f"({page})" not in index] == ["README.md"]


def test_an_entry_of_the_changelog_is_one_line_that_links_its_page() -> None:
    later = text(ROOT / "CHANGELOG.md").partition("\n## [0.1.0]")[0]  # a release's first commit has no entry yet
    entries = re.findall(r"(?m)^- .*(?:\n  .*)*", later)

    assert entries
    assert [entry for entry in entries if not re.fullmatch(r"- .*\]\([\w/]+\.md(?:#[\w-]+)?\)\)[^\n]*\.", entry)] == []
