"""Of a guest's metrics only well-formed lines of its own names pass, up to a number."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from guest.agent.calls import stats
from pyshim.monitor.exposition import GUEST_PREFIXES, MAX_SAMPLES, filtered_text

PREFIXES = GUEST_PREFIXES


@pytest.mark.parametrize(
    ("line", "passed"),
    [
        ("kata_guest_a 1", "kata_guest_a 1"),
        ('kata_guest_a{x="1"} 1.5e-3', 'kata_guest_a{x="1"} 1.5e-3'),
        ('kata_guest_a{x="a\\"b\\\\c\\n",} +Inf', 'kata_guest_a{x="a\\"b\\\\c\\n"} +Inf'),
        ("kata_guest_a 1 1700000000000", "kata_guest_a 1"),
        ("process_open_fds 3", "kata_agent_process_open_fds 3"),
        ('kata_guest_a{sandbox_id="other",x="1"} 1', 'kata_guest_a{x="1"} 1'),
        ('kata_guest_a{cri_name="other"} 1', "kata_guest_a 1"),
        ('kata_guest_a{x="1",x="2"} 1', 'kata_guest_a{x="1"} 1'),
    ],
)
def test_a_good_line_passes(line: str, passed: str) -> None:
    text, problem = filtered_text(line + "\n", PREFIXES)

    assert text.splitlines()[-1] == passed
    assert problem == ""


@pytest.mark.parametrize(
    "line",
    [
        "kata_shim_fds 3",
        "pyshim_containers 3",
        "kata_guest_a",
        "kata_guest_a x",
        "kata_guest_a 1.2.3",
        'kata_guest_a{x="1" 1',
        'kata_guest_a{x="\n"} 1',
        'kata_guest_a{x="1"y="2"} 1',
        'kata_guest_a{1x="1"} 1',
        "kata_guest_a{} 1 2 3",
        f'kata_guest_a{{x="{"y" * 1100}"}} 1',
        "\x00\ufffd\ufffd",
    ],
)
def test_a_bad_line_is_left_out_and_named(line: str) -> None:
    text, problem = filtered_text(f"kata_guest_b 1\n{line}\nkata_guest_c 2\n", PREFIXES)

    families = {family.name: family.samples[0].value for family in text_string_to_metric_families(text)}
    assert families == {"kata_guest_b": 1, "kata_guest_c": 2}
    assert "left out" in problem


def test_a_flood_is_cut() -> None:
    text, problem = filtered_text("".join(f'kata_guest_a{{x="{n}"}} 1\n' for n in range(MAX_SAMPLES + 5)), PREFIXES)

    assert text.count("\nkata_guest_a{") == MAX_SAMPLES
    assert "others are left out" in problem


def test_families_stand_together_and_a_series_is_there_once() -> None:
    text, _ = filtered_text(
        "# TYPE kata_guest_a gauge\nkata_guest_a 1\nkata_guest_b 2\nkata_guest_a 3\n# TYPE kata_guest_a counter\n",
        PREFIXES,
    )

    assert text.splitlines() == [
        "# TYPE kata_guest_a gauge",
        "kata_guest_a 1",
        "# TYPE kata_guest_b untyped",
        "kata_guest_b 2",
    ]


def test_a_guest_cannot_begin_a_histogram_that_has_no_end() -> None:
    text, _ = filtered_text('# TYPE kata_guest_h histogram\nkata_guest_h_bucket{le="1"} 5\nkata_guest_h 1\n', PREFIXES)

    assert "histogram" not in text


def test_the_metrics_of_our_own_guest_pass_whole() -> None:
    said = stats.text()

    text, problem = filtered_text(said, PREFIXES)

    assert problem == ""
    assert sorted(text.splitlines()) == sorted(said.splitlines())
