"""docs/LEDGER.md says of every kind what the code does."""

from __future__ import annotations

import re

from pyshim.cleanup import undo
from pyshim.model.ledger import ResourceKind

from .project_files import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "LEDGER.md").read_text().splitlines()
    if line.startswith("| `")
]
KINDS = {row[0].strip("`"): row for row in ROWS}


def test_every_kind_is_on_the_page_and_no_other() -> None:
    assert set(KINDS) == {kind.value for kind in ResourceKind}
    assert set(undo._UNDO) == set(ResourceKind)


def test_the_undo_of_every_kind_is_the_one_the_page_names() -> None:
    for kind, one in undo._UNDO.items():
        assert KINDS[kind.value][4] == f"`{one.__name__}`"


def test_the_module_that_acquires_a_kind_is_named() -> None:
    for kind, row in KINDS.items():
        word = f"ResourceKind.{ResourceKind(kind).name}"
        named = set(re.findall(r"`([\w/]+\.py)`", row[3]))
        assert all(word in (ROOT / path).read_text() for path in named), (kind, named)
        users = {
            str(path.relative_to(ROOT))
            for room in ("pyshim/pod", "pyshim/host", "hypervisors")
            for path in (ROOT / room).rglob("*.py")
            if word in path.read_text() and path.name != "release.py"
        }
        assert named or not users, f"{kind}: acquired in {sorted(users)}"
