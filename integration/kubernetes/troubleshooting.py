"""The table of docs/KUBERNETES.md that leads from an event to its cause: each row, as the tests have to produce it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "KUBERNETES.md"
_HEADING = "## Troubleshooting by event\n"
_ROW = re.compile(r"\| `(?P<reason>\w+)`(?:, `(?P<detail>\w+)`)? \| `(?P<text>[^|]+)` \|")


@dataclass(frozen=True, kw_only=True)
class Row:
    reason: str
    """Of an event; with a `detail`, the type of a condition whose reason that is."""
    detail: str
    text: str
    """The parts of the message; `...` stands for anything."""

    def fits(self, message: str) -> bool:
        pattern = ".*".join(map(re.escape, self.text.split("...")))
        return re.search(pattern, message, re.DOTALL) is not None


def rows() -> list[Row]:
    """In the page's order. Raises ValueError for a row that is not understood."""
    section = PAGE.read_text().split(_HEADING)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| Event")]
    found = []
    for line in lines:
        match = _ROW.match(line)
        if match is None:
            raise ValueError(f"read '{PAGE.name}': no event and text in {line[:80]!r}")
        found.append(Row(reason=match["reason"], detail=match["detail"] or "", text=match["text"]))
    return found
