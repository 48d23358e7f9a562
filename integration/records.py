"""What ran on which container runtime, and the README's table of it.

A run adds its result to `records.json`: `make peers WHAT=conformance`, `docker`, `kills` and `nerdctl` when they run
whole, `make integration` with RECORD=WORDS, which names what it runs. `python -m integration.records` writes the table
from the file.
"""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

from integration.framework import crio, releases

CHOICE = "RECORD"
FILE = Path(__file__).with_name("records.json")
PAGE = releases.PROJECT / "README.md"
_TABLE = re.compile(r"(?<=<!-- from integration/records.json -->\n).*?(?=<!-- end -->\n)", re.DOTALL)

Records = dict[str, dict[str, str]]
"""The result by what ran, and by the container runtime (`containerd 2.4.2`)."""


def runtime_name() -> str:
    """The chosen container runtime with its version."""
    if crio.is_chosen():
        return f"CRI-O {crio.VERSION.removeprefix('v')}"
    release = releases.chosen()
    return f"containerd {release.version.removeprefix('v') or f'{release.generation} (Debian)'}"


def read() -> Records:
    found: Records = json.loads(FILE.read_text())
    return found


def add(what: str, result: str) -> None:
    """The result of today, of the chosen container runtime, is in the file and in the README."""
    found = read()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    found.setdefault(what, {})[runtime_name()] = f"{result} ({today})"
    FILE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), found))


def counted(*, passed: int, failed: int, skipped: int) -> str:
    """The result of a run of pytest."""
    total = passed + failed
    return f"{f'all {total}' if not failed else f'{passed} of {total}'}, {skipped} skipped"


def with_table(page: str, records: Records) -> str:
    """The page with the table of these records in place of its own. Raises ValueError for a page without one."""
    if not _TABLE.search(page):
        raise ValueError(f"write the table of records: no place for it in '{PAGE}'")
    return _TABLE.sub(lambda _: table(records), page)


def table(records: Records) -> str:
    """A column for each container runtime, containerd's by their versions, and a row for all that ran."""
    names = sorted({name for results in records.values() for name in results}, key=_order)
    lines = [
        "| | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
        *(
            f"| {what} | " + " | ".join(results.get(name, "") for name in names) + " |"
            for what, results in records.items()
        ),
    ]
    return "".join(f"{line}\n" for line in lines)


def _order(name: str) -> tuple[bool, list[int]]:
    return not name.startswith("containerd"), [int(number) for number in re.findall(r"\d+", name)]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), read()))
