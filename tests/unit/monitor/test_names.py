"""Which metrics there are: docs/METRICS.md's table, Kata's list and the dashboard agree with what is really served."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from guest.agent.calls import stats as guest
from pyshim.model.observation import AgentCalls
from pyshim.model.oci import PodName
from pyshim.monitor.answers import ShimAnswers
from pyshim.monitor.exposition import filtered
from pyshim.monitor.socket import MonitorSocket
from pyshim.node.monitor.scrape import Scrapes
from tests.unit.monitor.monitored import FakePod

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "METRICS.md"
DASHBOARD = ROOT / "configs" / "grafana" / "pyshim.json"
_ROW = re.compile(r"(?m)^\| `(\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \|$")
_MISSING = re.compile(r"(?m)^\| `(kata_\w+)`(?:, `\w+`)* \| ([^|]+) \|$")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text that Prometheus gets of a node with one sandbox and our guest."""

    async def body() -> str:
        path = str(tmp_path_factory.mktemp("s1") / "shim-monitor.sock")
        pod, calls = FakePod(), AgentCalls(time.monotonic)
        pod.guest = guest.text()
        pod.pids = (os.getpid(), os.getpid())
        calls.took("grpc.CheckRequest", 0.001)
        calls.answered()
        monitor = MonitorSocket(path, ShimAnswers(pod, calls=calls, agent_calls=calls).answer)
        await monitor.open()
        try:
            scrapes = Scrapes()
            await scrapes.text({"s1": path}, {"s1": PodName()})
            return await scrapes.text({"s1": path}, {"s1": PodName()})
        finally:
            await monitor.close()

    return asyncio.run(body())


def found(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Kind and labels of each family; the labels that every sandbox's sample has, and `le`, are left out."""
    families = filtered(text, ("kata_", "pyshim_"), composed=True).families
    common = {"le"}
    # The labels of the sandbox are reserved: `filtered` takes them away.
    return {
        name: (
            family.kind,
            frozenset(label for _, labels in family.samples for label in re.findall(r'(\w+)="', labels)) - common,
        )
        for name, family in families.items()
    }


def test_the_page_lists_what_is_served(served: str) -> None:
    rows = {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels, _ in _ROW.findall(PAGE.read_text())
    }

    there = found(served)
    assert {name: rows.get(name) for name in there} == there
    # A guest's metrics depend on its devices, and the guest is this machine here.
    assert {name for name in rows.keys() - there.keys() if not name.startswith("kata_guest_")} == set()


def test_a_metric_of_kata_that_is_missing_has_its_reason(served: str) -> None:
    missing = dict(_MISSING.findall(PAGE.read_text().split("## Kata's metrics that are missing")[1]))

    assert missing
    assert missing.keys().isdisjoint(found(served))
    assert all(missing.values())


def test_every_query_of_the_dashboard_names_metrics_that_exist(served: str) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"]]
    named = {
        re.sub(r"_(bucket|sum|count)$", "", name) if "histogram" in name else name
        for query in queries
        for name in re.findall(r"\b(?:kata|pyshim)_\w+", query)
    }

    assert len(named) > 10
    assert named - found(served).keys() == set()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing (Debian's package prometheus)")
def test_promtool_has_nothing_to_say_but_about_katas_names(served: str) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=served, capture_output=True, text=True, timeout=60)

    said = [line for line in (done.stdout + done.stderr).splitlines() if line]
    assert done.returncode in (0, 3), said  # 3: the names are criticised, 1: the text is no metrics
    assert [line for line in said if not line.startswith("kata_")] == []
