"""`pyshim trace`: the same spans as text and as OTLP."""

import json
from pathlib import Path
from typing import Any

import pytest

from pyshim.node.cli.command import run
from tests.unit.state import states

SPANS = [
    ["create a<b", -1, 1_000_000, 9_000_000, ""],
    ["start vmm", 0, 2_000_000, 4_500_000, "ShimError"],
    ["first output", 0, 8_000_000, 8_000_000, ""],
    ["start", -1, 9_000_000, 0, ""],
]


def shown(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["trace", "pod1", "--state-dir", str(root), *words]) == 0
    return capsys.readouterr().out


def test_text_has_offsets_durations_and_nesting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states.save(tmp_path, "pod1", trace={"Spans": SPANS})

    assert shown(tmp_path, capsys).splitlines() == [
        "        at       took",
        "    0.0 ms     8.0 ms  create a<b",
        "    1.0 ms     2.5 ms    start vmm (failed: ShimError)",
        "    7.0 ms               first output",
        "    8.0 ms unfinished  start",
    ]


def test_json_is_a_traces_message_of_otlp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states.save(tmp_path, "pod1", trace={"Spans": SPANS})

    document: dict[str, Any] = json.loads(shown(tmp_path, capsys, "--json"))

    (resource,) = document["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "pyshim"}} in resource["resource"]["attributes"]
    spans = resource["scopeSpans"][0]["spans"]
    assert [len(span["spanId"]) for span in spans] == [16] * 4
    assert {len(span["traceId"]) for span in spans} == {32}
    assert "parentSpanId" not in spans[0]
    assert spans[1]["parentSpanId"] == spans[0]["spanId"]
    assert (spans[1]["startTimeUnixNano"], spans[1]["status"]["code"]) == ("2000000", 2)
    assert int(spans[3]["endTimeUnixNano"]) >= int(spans[3]["startTimeUnixNano"])


@pytest.mark.parametrize(
    ("trace", "text"),
    [
        pytest.param({}, "nothing is recorded yet", id="none"),
        pytest.param({"Spans": [1]}, "span 0 is not", id="damaged"),
    ],
)
def test_a_missing_trace_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trace: object, text: str
) -> None:
    states.save(tmp_path, "pod1", trace=trace)

    assert run(["trace", "pod1", "--state-dir", str(tmp_path)]) == 1
    assert text in capsys.readouterr().err
