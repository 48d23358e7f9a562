"""The node's endpoint over real monitor sockets: what Prometheus gets of shims and guests, and of silent shims."""

import asyncio
import contextlib
import gzip
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pyshim.model.errors import FailedPrecondition
from pyshim.model.observation import AgentCalls, Durations
from pyshim.model.units import MIB
from pyshim.monitor.answers import ShimAnswers
from pyshim.monitor.exposition import GUEST_PREFIXES, filtered, text_of
from pyshim.monitor.shim_metrics import guest_family
from pyshim.monitor.socket import HttpReply, HttpRequest, MonitorSocket
from pyshim.node.monitor import merge, scrape, shims
from pyshim.node.monitor.merge import Merge, SandboxMetrics
from pyshim.node.monitor.server import MAX_CONNECTIONS, NodeMonitor
from pyshim.node.monitor.shims import NO_NAME, Names
from tests.fakes import floods
from tests.unit.monitor.monitored import FakePod, said
from tests.unit.monitor.test_metrics import scraped

_VALUES = yaml.safe_load((Path(__file__).parents[4] / "configs/helm/pyshim/values.yaml").read_text())
MEMORY_LIMIT_MIB = int(_VALUES["monitor"]["resources"]["limits"]["memory"].removesuffix("Mi"))
COUNT = "kata_monitor_scrape_count "


class Node:
    """An endpoint over the sandboxes in `root`."""

    def __init__(self, root: Path, end: AsyncExitStack) -> None:
        self.root, self.metrics = root / "sbs", root / "metrics"
        self.root.mkdir()
        self.metrics.mkdir()
        self.end = end
        self.monitor = NodeMonitor(
            host="127.0.0.1", port=0, metrics_directory=str(self.metrics), roots=(str(self.root),)
        )
        self.url = ""

    async def open(self) -> None:
        host, port = await self.monitor.open()
        self.end.push_async_callback(self.monitor.close)
        self.url = f"http://{host}:{port}"

    async def sandbox(self, name: str) -> FakePod:
        pod = FakePod()
        (self.root / name).mkdir()
        calls, agent_calls = Durations(), AgentCalls(time.monotonic)
        calls.took("create", 0.003)
        agent_calls.took("grpc.CheckRequest", 0.001)
        agent_calls.answered()
        answers = ShimAnswers(pod, calls=calls, agent_calls=agent_calls)
        for path, answer in (
            (self.root / name / "shim-monitor.sock", answers.answer),
            (self.metrics / name, answers.answer_question),
        ):
            monitor = MonitorSocket(str(path), answer)
            await monitor.open()
            self.end.push_async_callback(monitor.close)
        return pod

    def silent(self, name: str) -> None:
        """A sandbox whose shim takes connections and says nothing."""
        (self.root / name).mkdir()
        listener = socket.socket(socket.AF_UNIX)
        self.end.callback(listener.close)
        listener.bind(str(self.root / name / "shim-monitor.sock"))
        listener.listen()

    def dead(self, name: str) -> None:
        """A sandbox whose shim has died: its socket is there, nothing listens."""
        (self.root / name).mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.root / name / "shim-monitor.sock"))

    async def get(self, target: str, method: str = "GET", **options: Any) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.request(method, self.url + target, **options) as reply:
            return reply.status, await reply.text()


@pytest.fixture
def one(runner: asyncio.Runner, tmp_path: Path) -> Iterator[Node]:
    end = AsyncExitStack()
    one = Node(tmp_path, end)
    runner.run(one.open())
    yield one
    runner.run(end.aclose())


async def test_every_sample_of_a_shim_names_its_sandbox(one: Node) -> None:
    for name in ("s1", "s2"):
        await one.sandbox(name)

    status, text = await one.get("/metrics")

    found = scraped(text)
    assert status == 200
    assert found["kata_monitor_running_shim_count"] == {(): 2}
    assert "\nkata_monitor_scrape_count 1\n" in text
    pod = (("cri_name", "web"), ("cri_namespace", "shop"), ("cri_uid", "u1"))
    assert found["pyshim_containers"] == {(*pod, ("sandbox_id", "s1")): 2, (*pod, ("sandbox_id", "s2")): 2}
    for name, samples in found.items():
        if not name.startswith("kata_monitor_"):
            assert all("sandbox_id" in dict(labels) for labels in samples), name


async def test_sandboxes_come_and_go(one: Node) -> None:
    assert await one.get("/sandboxes") == (200, "")
    await one.sandbox("s1")
    assert await one.get("/sandboxes") == (200, "s1\n")
    assert await one.get("/agent-url?sandbox=s1") == (200, "vsock://3:1024\n")
    assert 'href="/metrics?sandbox=s1"' in (await one.get("/sandboxes", headers={"Accept": "text/html"}))[1]
    assert "\npyshim_containers 2\n" in (await one.get("/metrics?sandbox=s1"))[1]
    os.unlink(one.metrics / "s1")
    assert await one.get("/agent-url?sandbox=s1") == (200, "vsock://3:1024\n"), "by Kata's socket"
    os.unlink(one.root / "s1" / "shim-monitor.sock")
    assert await one.get("/sandboxes") == (200, "")


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/metrics", 405),
        ("GET", "/agent-url", 400),
        ("GET", "/agent-url?sandbox=none", 404),
        ("GET", "/metrics?sandbox=../../etc", 404),
    ],
)
async def test_bad_requests_have_their_status(method: str, target: str, status: int, one: Node) -> None:
    assert (await one.get(target, method))[0] == status


_LISTENS = """
import socket, sys, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
time.sleep(600)
"""


async def test_a_stopped_shim_is_said_to_be_stopped(monkeypatch: pytest.MonkeyPatch, one: Node) -> None:
    monkeypatch.setattr(scrape, "SHIM_S", 0.2)
    await one.sandbox("good")
    (one.root / "stopped").mkdir()
    words = [sys.executable, "-I", "-S", "-c", _LISTENS, str(one.root / "stopped" / "shim-monitor.sock")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as shim:
        assert shim.stdout is not None
        assert shim.stdout.readline() == b"ready\n"
        shim.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, shim.pid, os.WSTOPPED)
        found = scraped((await one.get("/metrics"))[1])
        shim.kill()

    said = {dict(labels)["sandbox_id"]: value for labels, value in found["pyshim_monitor_shim_stopped"].items()}
    assert said == {"good": 0, "stopped": 1}


async def test_a_shim_that_does_not_answer_costs_its_deadline_and_no_other(
    monkeypatch: pytest.MonkeyPatch, one: Node
) -> None:
    monkeypatch.setattr(scrape, "SHIM_S", 0.5)

    await one.sandbox("good")
    one.silent("silent")
    one.dead("dead")

    text = (await one.get("/metrics"))[1]

    found = scraped(text)
    up = {dict(labels)["sandbox_id"]: value for labels, value in found["pyshim_monitor_shim_up"].items()}
    assert up == {"good": 1, "silent": 0, "dead": 0}
    assert "\nkata_monitor_scrape_failed_count 2\n" in text
    assert (await one.get("/agent-url?sandbox=dead"))[0] == 502


async def test_a_shim_that_is_gone_between_listing_and_scrape_is_no_failure(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone" / "shim-monitor.sock")

    text = await scrape.Scrapes().text({"gone": gone}, {"gone": NO_NAME})

    assert "\nkata_monitor_running_shim_count 0\n" in text
    assert "\nkata_monitor_scrape_failed_count 0\n" in text


async def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch, one: Node) -> None:
    monkeypatch.setattr(shims, "MAX_ANSWER_BYTES", 1000)

    await one.sandbox("s1")

    found = scraped((await one.get("/metrics"))[1])

    assert list(found["pyshim_monitor_shim_up"].values()) == [0]


async def test_a_client_that_takes_gzip_gets_it(one: Node) -> None:
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.get(f"{one.url}/metrics", headers={"Accept-Encoding": "gzip"}) as reply,
    ):
        assert b"kata_monitor_scrape_count 1" in gzip.decompress(await reply.read())


async def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one = NodeMonitor(host="127.0.0.1", port=port, metrics_directory="/none", roots=(str(tmp_path),))
        with pytest.raises(FailedPrecondition, match=f"listen at 127.0.0.1:{port}"):
            await one.open()


async def test_a_monitor_that_sees_the_metrics_directory_only_gets_all_and_can_change_nothing(
    tmp_path: Path, one: Node
) -> None:
    await one.sandbox("s1")
    tables = b"PUT /iptables HTTP/1.1\r\nContent-Length: 1\r\n\r\n*"

    for path in ("/policy", "/iptables", "/ip6tables", "/direct-volume/resize", "/direct-volume/stats", "/debug/x"):
        for method in ("GET", "PUT", "POST"):
            request = f"{method} {path} HTTP/1.1\r\nContent-Length: 0\r\n\r\n".encode()
            assert (await said(str(one.metrics / "s1"), request))[0] == 404
    assert (await said(str(one.metrics / "s1"), tables))[0] == 404
    assert (await said(str(one.root / "s1" / "shim-monitor.sock"), tables))[0] == 200, "the control"
    one.root.rename(tmp_path / "hidden")
    assert 'cri_name="web"' in (await one.get("/metrics"))[1]
    assert "kata_guest_load" in (await one.get("/metrics?sandbox=s1"))[1]


async def test_a_shim_without_names_is_scraped_without_and_asked_for_them_once(tmp_path: Path) -> None:
    asked = []

    async def answer(request: HttpRequest) -> HttpReply:
        asked.append(request.target)
        return HttpReply(HTTPStatus.NOT_FOUND)

    socket_of_kata = MonitorSocket(str(tmp_path / "m.sock"), answer)
    await socket_of_kata.open()
    try:
        names = Names()
        for _ in range(3):
            assert await names.of({"s1": str(tmp_path / "m.sock")}) == {"s1": NO_NAME}
        assert asked == ["/pod"]
    finally:
        await socket_of_kata.close()


async def test_scrapes_at_the_same_time_are_one(one: Node) -> None:
    await one.sandbox("s1")

    texts = await asyncio.gather(*(one.get("/metrics") for _ in range(50)))

    counts = {float(line.split()[1]) for _, text in texts for line in text.splitlines() if line.startswith(COUNT)}
    assert max(counts) < 25


HONEST = '# TYPE kata_guest_load gauge\nkata_guest_load{item="load1"} 0.5\n'


def source(sandbox_id: str, text: str, prefixes: tuple[str, ...] = GUEST_PREFIXES) -> SandboxMetrics:
    return SandboxMetrics(sandbox_id, {"sandbox_id": sandbox_id}, filtered(text, prefixes, composed=True).families)


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

    for number in range(20):
        fresh = "".join(f'kata_guest_load{{item="{number}-{n}"}} 1\n' for n in range(20))
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


async def test_callers_that_hold_connections_lock_no_scrape_out(one: Node) -> None:
    await one.sandbox("s1")
    host, port = one.url.removeprefix("http://").split(":")
    holders = [await asyncio.open_connection(host, int(port)) for _ in range(3 * MAX_CONNECTIONS)]

    assert (await one.get("/metrics"))[0] == 200
    assert one.monitor.connections <= MAX_CONNECTIONS
    for _, writer in holders:
        writer.close()


async def test_a_caller_that_does_not_read_loses_its_connection(one: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyshim.node.monitor.server.SEND_S", 0.2)
    monkeypatch.setattr(one.monitor, "_sockets", lambda: {f"s{n:0100}": "" for n in range(100_000)})
    host, port = one.url.removeprefix("http://").split(":")
    _reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    writer.write(b"GET /sandboxes HTTP/1.1\r\nHost: x\r\n\r\n")

    for wanted in (1, 0):
        for _ in range(1000):
            if one.monitor.connections == wanted:
                break
            await asyncio.sleep(0.02)
        assert one.monitor.connections == wanted
    writer.close()
    monkeypatch.undo()
    assert (await one.get("/sandboxes"))[0] == 200


def tried(call: Callable[[], Any]) -> Any:
    """As Prometheus does: again after a while, where it is turned away."""
    while True:
        with contextlib.suppress(OSError):
            return call()
        time.sleep(0.1)


@pytest.mark.slow
def test_readers_that_are_slow_share_what_they_do_not_read(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("--listen-address", f"127.0.0.1:{port}", "--metrics-dir", str(tmp_path), "--state-dir", str(tmp_path))
    with floods.shims(tmp_path, large=8), floods.ended([sys.executable, "-m", "pyshim", "monitor", *words]) as pid:
        tried(floods.plain(port)).close()
        for attack in ("answers that are not read", "one sandbox's answers that are not read"):
            assert floods.flood(floods.plain(port), floods.ON_MONITOR[attack]) > 0
        answer = tried(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics"))
        with answer:
            found = answer.read()
        peak = floods.peak_bytes(pid)

    assert found.count(b"kata_guest_tasks{") == 8 * 9_900
    assert peak < MEMORY_LIMIT_MIB * MIB // 2


async def test_a_caller_that_does_not_read_gives_way_to_a_new_one(one: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyshim.node.monitor.server.MAX_CONNECTIONS", 3)
    monkeypatch.setattr(one.monitor, "_sockets", lambda: {f"s{n:0100}": "" for n in range(100_000)})
    host, port = one.url.removeprefix("http://").split(":")
    held = [await asyncio.open_connection(host, int(port), limit=1) for _ in range(3)]
    for _, writer in held:
        writer.write(b"GET /sandboxes HTTP/1.1\r\nHost: x\r\n\r\n")
    for _ in range(1000):
        if len(one.monitor._unread) == 3:
            break
        await asyncio.sleep(0.02)

    assert len((await one.get("/sandboxes"))[1]) == 100_000 * 102
    for _, writer in held:
        writer.close()


async def test_many_sandboxes_share_the_samples_of_an_answer(one: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("s1", "s2"):
        await one.sandbox(name)
    everything = scraped((await one.get("/metrics"))[1])["pyshim_monitor_shim_whole"]
    monkeypatch.setattr(scrape, "NODE_SAMPLES", 20)
    monkeypatch.setattr(scrape, "USUAL_SAMPLES", 5)
    cut = scraped((await one.get("/metrics"))[1])["pyshim_monitor_shim_whole"]

    assert (set(everything.values()), set(cut.values())) == ({1.0}, {0.0})


async def test_questions_to_one_shim_at_the_same_time_are_one(one: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await one.sandbox("s1")
    asked = []

    async def answer(path: str, target: str, *, within_s: float) -> str:
        asked.append(target)
        await asyncio.sleep(0.2)
        return "vsock://3:1024"

    monkeypatch.setattr("pyshim.node.monitor.server.shim_answer", answer)
    answers = await asyncio.gather(*(one.get("/agent-url?sandbox=s1") for _ in range(20)))

    assert {status for status, _ in answers} == {200}
    assert len(asked) < 5
