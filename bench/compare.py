"""`make bench-compare A=OLD.json B=NEW.json`: what changed between two results of `make bench`, by ratios.

Ratios, not times: each is relative to a reference of its own run, so two runs on differently busy machines compare.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_NOISE = 0.05
"""A median that lies within the other run's rounds and differs by less than this is called the same."""


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line per row that either run has: both ratios, and what became of it."""
    before = {row["title"]: row for row in old["rows"]}
    after = {row["title"]: row for row in new["rows"]}
    titles = list(dict.fromkeys([*before, *after]))
    width = max(map(len, titles), default=0)
    lines = [f"{'what':<{width}}  {'A':>8}  {'B':>8}  change"]
    for title in titles:
        one, other = before.get(title), after.get(title)
        if one is None or other is None:
            lines.append(
                f"{title:<{width}}  {_ratio(one):>8}  {_ratio(other):>8}  only in {'A' if other is None else 'B'}"
            )
        else:
            lines.append(f"{title:<{width}}  {_ratio(one):>8}  {_ratio(other):>8}  {verdict(one, other)}")
    return lines


def verdict(old: dict[str, Any], new: dict[str, Any]) -> str:
    """`better`, `worse` or `same`, with the change of the ratio in percent."""
    change = new["ratio"] / old["ratio"] - 1 if old["ratio"] else 0.0
    overlap = min(old["ratios"]) <= new["ratio"] <= max(old["ratios"])
    if abs(change) < _NOISE or overlap:
        return f"same ({change:+.0%})"
    more_is_better = new["unit"].endswith("/s")
    return f"{'better' if (change > 0) == more_is_better else 'worse'} ({change:+.0%})"


def _ratio(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{row['ratio']:.2f}"


def main(words: list[str]) -> int:
    if len(words) != 2:
        print(
            "compare: expected two results, A and B (hint: make bench-compare A=OLD.json B=NEW.json)", file=sys.stderr
        )
        return 2
    documents = []
    for word in words:
        try:
            document = json.loads(Path(word).read_text())
            documents.append(document)
            document["rows"][0]["ratio"]
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            print(f"compare: read {word!r}: not a result of `make bench` ({type(error).__name__})", file=sys.stderr)
            return 1
    print("\n".join(compare(*documents)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
