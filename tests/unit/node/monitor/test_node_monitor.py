"""The node's endpoint over real monitor sockets: what Prometheus gets, and what happens when shims do not answer."""

import asyncio
import gzip
import os
import socket
from collections.abc import Callable, Coroutine
from concurrent import futures
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from protos.cri import v1_pb2, v1_pb2_grpc
from pyshim.model.durations import Durations
from pyshim.model.errors import FailedPrecondition
from pyshim.monitor.answers import ShimAnswers
from pyshim.monitor.socket import MonitorSocket
from pyshim.node.monitor import names, scrape
from pyshim.node.monitor.names import NO_NAME, Names, PodName
from pyshim.node.monitor.sandboxes import Sandboxes
from pyshim.node.monitor.server import NodeMonitor
from tests.unit.monitor.monitored import FakePod
from tests.unit.monitor.test_metrics import scraped


class Node:
    """An endpoint over the sandboxes in `root`."""

    def __init__(self, root: Path, end: AsyncExitStack, cri_endpoint: str = "") -> None:
        self.root = root
        self.end = end
        self.monitor = NodeMonitor(host="127.0.0.1", port=0, roots=(str(root),), cri_endpoint=cri_endpoint)
        self.url = ""

    async def open(self) -> None:
        host, port = await self.monitor.open()
        self.end.push_async_callback(self.monitor.close)
        self.url = f"http://{host}:{port}"

    async def sandbox(self, name: str) -> FakePod:
        pod = FakePod()
        (self.root / name).mkdir()
        calls, agent_calls = Durations(), Durations()
        calls.took("create", 0.003)
        agent_calls.took("grpc.CheckRequest", 0.001)
        answers = ShimAnswers(pod, calls=calls, agent_calls=agent_calls)
        monitor = MonitorSocket(str(self.root / name / "shim-monitor.sock"), answers.answer)
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


def node(root: Path, scenario: Callable[[Node], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        async with asyncio.timeout(60), AsyncExitStack() as end:
            one = Node(root, end)
            await one.open()
            await scenario(one)

    asyncio.run(body())


def test_every_sample_of_a_shim_names_its_sandbox(tmp_path: Path) -> None:
    async def scenario(one: Node) -> None:
        for name in ("s1", "s2"):
            await one.sandbox(name)

        status, text = await one.get("/metrics")

        found = scraped(text)
        assert status == 200
        assert found["kata_monitor_running_shim_count"] == {(): 2}
        assert "\nkata_monitor_scrape_count 1\n" in text
        none = (("cri_name", ""), ("cri_namespace", ""), ("cri_uid", ""))
        assert found["pyshim_containers"] == {(*none, ("sandbox_id", "s1")): 2, (*none, ("sandbox_id", "s2")): 2}
        for name, samples in found.items():
            if not name.startswith("kata_monitor_"):
                assert all("sandbox_id" in dict(labels) for labels in samples), name

    node(tmp_path, scenario)


def test_sandboxes_come_and_go(tmp_path: Path) -> None:
    async def scenario(one: Node) -> None:
        assert await one.get("/sandboxes") == (200, "")
        await one.sandbox("s1")
        assert await one.get("/sandboxes") == (200, "s1\n")
        assert await one.get("/agent-url?sandbox=s1") == (200, "vsock://3:1024\n")
        assert 'href="/metrics?sandbox=s1"' in (await one.get("/sandboxes", headers={"Accept": "text/html"}))[1]
        assert "\npyshim_containers 2\n" in (await one.get("/metrics?sandbox=s1"))[1]
        os.unlink(tmp_path / "s1" / "shim-monitor.sock")
        assert await one.get("/sandboxes") == (200, "")

    node(tmp_path, scenario)


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
def test_bad_requests_have_their_status(tmp_path: Path, method: str, target: str, status: int) -> None:
    async def scenario(one: Node) -> None:
        assert (await one.get(target, method))[0] == status

    node(tmp_path, scenario)


def test_a_shim_that_does_not_answer_costs_its_deadline_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "SHIM_S", 0.5)

    async def scenario(one: Node) -> None:
        await one.sandbox("good")
        one.silent("silent")
        one.dead("dead")

        text = (await one.get("/metrics"))[1]

        found = scraped(text)
        up = {dict(labels)["sandbox_id"]: value for labels, value in found["pyshim_monitor_shim_up"].items()}
        assert up == {"good": 1, "silent": 0, "dead": 0}
        assert "\nkata_monitor_scrape_failed_count 2\n" in text
        assert (await one.get("/agent-url?sandbox=dead"))[0] == 502

    node(tmp_path, scenario)


def test_a_shim_that_is_gone_between_listing_and_scrape_is_no_failure(tmp_path: Path) -> None:
    async def body() -> None:
        gone = str(tmp_path / "gone" / "shim-monitor.sock")

        text = await scrape.Scrapes().text({"gone": gone}, {"gone": NO_NAME})

        assert "\nkata_monitor_running_shim_count 0\n" in text
        assert "\nkata_monitor_scrape_failed_count 0\n" in text

    asyncio.run(body())


def test_an_answer_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "MAX_ANSWER_BYTES", 1000)

    async def scenario(one: Node) -> None:
        await one.sandbox("s1")

        found = scraped((await one.get("/metrics"))[1])

        assert list(found["pyshim_monitor_shim_up"].values()) == [0]

    node(tmp_path, scenario)


def test_a_client_that_takes_gzip_gets_it(tmp_path: Path) -> None:
    async def scenario(one: Node) -> None:
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.get(f"{one.url}/metrics", headers={"Accept-Encoding": "gzip"}) as reply,
        ):
            assert b"kata_monitor_scrape_count 1" in gzip.decompress(await reply.read())

    node(tmp_path, scenario)


def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            one = NodeMonitor(host="127.0.0.1", port=port, roots=(str(tmp_path),), cri_endpoint="")
            with pytest.raises(FailedPrecondition, match=f"listen at 127.0.0.1:{port}"):
                await one.open()

    asyncio.run(body())


def test_changes_are_noticed_also_below_a_directory_that_comes_later(tmp_path: Path) -> None:
    async def body() -> None:
        changed = asyncio.Event()
        sandboxes = Sandboxes((str(tmp_path / "run" / "sbs"),), changed.set)
        sandboxes.watch()
        try:
            async with asyncio.timeout(30):
                for part in ("run", "run/sbs", "run/sbs/s1"):
                    (tmp_path / part).mkdir()
                    await changed.wait()
                    changed.clear()
                os.rmdir(tmp_path / "run/sbs/s1")
                await changed.wait()
        finally:
            sandboxes.close()

    asyncio.run(body())


class _Cri(v1_pb2_grpc.RuntimeServiceServicer):
    def __init__(self) -> None:
        self.asked = 0
        self.pods: list[str] = []

    def ListPodSandbox(self, request: object, context: object) -> v1_pb2.ListPodSandboxResponse:
        self.asked += 1
        metadata = v1_pb2.PodSandboxMetadata(name="web", namespace="shop", uid="u1")
        return v1_pb2.ListPodSandboxResponse(
            items=[v1_pb2.PodSandbox(id=each, metadata=metadata) for each in self.pods]
        )


def test_names_are_asked_for_when_they_are_missing_and_not_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cri = _Cri()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    v1_pb2_grpc.add_RuntimeServiceServicer_to_server(cri, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix://{tmp_path}/containerd.sock")
    server.start()
    monkeypatch.setattr(names, "TIMEOUT_S", 30.0)

    async def body() -> None:
        known = Names(f"{tmp_path}/containerd.sock")
        assert await known.of(["s1"]) == {"s1": NO_NAME}
        cri.pods = ["s1"]
        assert await known.of(["s1"]) == {"s1": NO_NAME}, "asked a moment ago"
        known.forget()
        assert await known.of(["s1"]) == {"s1": PodName("u1", "web", "shop")}
        known.forget()
        assert await known.of(["s1"]) == {"s1": PodName("u1", "web", "shop")}
        assert cri.asked == 2

    try:
        asyncio.run(body())
    finally:
        server.stop(0).wait()


def test_without_containerd_there_are_no_names(tmp_path: Path) -> None:
    async def body() -> None:
        assert await Names(f"{tmp_path}/none.sock").of(["s1"]) == {"s1": NO_NAME}

    asyncio.run(body())
