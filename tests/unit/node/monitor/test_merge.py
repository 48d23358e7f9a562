"""A hostile guest beside an honest one: it cannot hide the other's metrics, nor fill Prometheus with series."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pyshim.monitor.exposition import text_of
from pyshim.monitor.guest_text import GUEST_PREFIXES, judged
from pyshim.monitor.shim_metrics import guest_family
from pyshim.node.monitor import merge
from pyshim.node.monitor.merge import Merge, SandboxMetrics

HONEST = '# TYPE kata_guest_load gauge\nkata_guest_load{item="load1"} 0.5\n'


def source(sandbox_id: str, text: str, prefixes: tuple[str, ...] = GUEST_PREFIXES) -> SandboxMetrics:
    return SandboxMetrics(sandbox_id, {"sandbox_id": sandbox_id}, judged(text, prefixes, composed=True).families)


def series(text: str) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items())) for family in families for one in family.samples}


HONEST_SERIES = ("kata_guest_load", frozenset({("item", "load1"), ("sandbox_id", "b")}))


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize(
    "hostile",
    [
        "# TYPE kata_guest_load counter\nkata_guest_load 1\n",
        '# TYPE kata_guest_load histogram\nkata_guest_load_bucket{le="1"} 1\nkata_guest_load_sum 1\n',
        "# TYPE kata_guest_load_bucket counter\nkata_guest_load_bucket 1\n# TYPE kata_guest_new counter\n",
    ],
)
def test_a_guest_that_declares_another_type_loses_its_own_family_only(hostile: str, first: str) -> None:
    sources = sorted([source("a", hostile), source("b", HONEST)], key=lambda one: one.sandbox_id != first)

    assert series(Merge().text(sources)) == {HONEST_SERIES}


def test_an_unknown_family_of_a_guest_is_left_out_and_one_without_a_type_has_the_fixed_one() -> None:
    text = Merge().text([source("a", 'kata_guest_unknown 1\nkata_guest_load{item="load5"} 2\n'), source("b", HONEST)])

    assert "unknown" not in text
    assert text.count("# TYPE kata_guest_load gauge\n") == 1
    assert {name for name, _ in series(text)} == {"kata_guest_load"}
    assert len(series(text)) == 2


def test_a_guest_cannot_describe_a_family_for_others() -> None:
    text = Merge().text([source("a", f"# HELP kata_guest_load of pod b: hacked\n{HONEST}"), source("b", HONEST)])

    assert "hacked" not in text


def test_a_shims_families_have_their_type_and_description() -> None:
    shim = text_of([guest_family(is_whole=True)])

    text = Merge().text([source("a", shim, ("pyshim_",)), source("b", shim, ("pyshim_",))])

    assert text.startswith("# HELP pyshim_guest_metrics_whole ")
    assert text.count("# TYPE pyshim_guest_metrics_whole gauge\n") == 1
    assert len(series(text)) == 2


def test_the_series_of_a_guest_are_bounded_over_time_and_the_known_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MAX_SERIES", 50)
    merged, seen = Merge(), set()
    steady = "kata_guest_tasks 1\n"

    for scrape in range(20):
        fresh = "".join(f'kata_guest_load{{item="{scrape}-{n}"}} 1\n' for n in range(20))
        found = series(merged.text([source("a", steady + fresh), source("b", HONEST)]))
        assert {HONEST_SERIES, ("kata_guest_tasks", frozenset({("sandbox_id", "a")}))} <= found
        seen |= found

    assert len([one for one in seen if ("sandbox_id", "a") in one[1]]) == 50


def test_a_sandbox_that_has_gone_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MAX_SERIES", 1)
    merged = Merge()
    merged.text([source("a", "kata_guest_tasks 1\n")])
    merged.text([source("b", HONEST)])

    assert series(merged.text([source("a", HONEST)])) == {
        ("kata_guest_load", frozenset({("item", "load1"), ("sandbox_id", "a")}))
    }
