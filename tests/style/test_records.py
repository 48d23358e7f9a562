"""The README's table of what ran is that of the records."""

from integration import records


def test_the_readme_has_the_table_of_the_records() -> None:
    page = records.PAGE.read_text()

    assert records.with_table(page, records.read()) == page, "run python -m integration.records"


def test_runtimes_stand_in_the_order_of_their_versions() -> None:
    made = records.table({"critest": {"CRI-O 1.36.3": "1", "containerd 2.10.1": "2", "containerd 2.4.2": "3"}})

    assert made.splitlines()[0] == "| | containerd 2.4.2 | containerd 2.10.1 | CRI-O 1.36.3 |"
    assert made.splitlines()[2] == "| critest | 3 | 2 | 1 |"
