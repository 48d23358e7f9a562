"""Placements beside the naive order, on described machines; the figures are those of docs/NRI.md."""

from pathlib import Path

from .quality import figures, table

DOCUMENT = Path(__file__).parents[4] / "docs" / "NRI.md"


def test_no_placement_is_worse_than_the_naive_order_and_where_there_is_a_choice_they_are_better() -> None:
    better = set()
    for name, (ours, naive) in figures().items():
        assert all(our <= other for our, other in zip(ours, naive, strict=True)), name
        if ours != naive:
            better.add(name)

    assert better >= {"2 sockets x 2 dies x SMT", "2 sockets x 8 L3s x SMT", "2 sockets, 2 nodes each", "no SMT"}


def test_the_document_has_these_figures() -> None:
    assert table() in DOCUMENT.read_text()
