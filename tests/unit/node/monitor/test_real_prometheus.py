"""A real Prometheus (Debian's package) scrapes the node's endpoint over five sandboxes; the dashboard's queries run."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from guest.agent.calls import stats as guest
from tests.unit.monitor.test_names import DASHBOARD
from tests.unit.node.monitor.test_node_monitor import Node

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is missing (Debian's package prometheus)"
    ),
]
SANDBOXES = 5
_PAUSE_S, _TRIES = 0.2, 500


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def asked(port: int, query: str) -> Any:
    """The result of a query; empty while Prometheus is not ready, or has scraped too little for a rate."""
    url = f"http://127.0.0.1:{port}/api/v1/query"
    try:
        async with aiohttp.ClientSession() as session, session.get(url, params={"query": query}) as reply:
            answer = await reply.json(content_type=None)
    except (aiohttp.ClientError, json.JSONDecodeError):
        return []
    assert answer["status"] == "success", (query, answer)
    return answer["data"]["result"]


async def results(port: int, query: str) -> Any:
    for _ in range(_TRIES):
        if found := await asked(port, query):
            return found
        await asyncio.sleep(_PAUSE_S)
    raise AssertionError(f"{query} has no result")


def started(directory: Path, port: int) -> subprocess.Popen[bytes]:
    """Prometheus with the configuration in `directory`, where its data and its log are, too."""
    words = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with open(directory / "log", "wb") as log:
        return subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stderr=log, stdout=log)


def test_prometheus_scrapes_and_the_dashboard_has_something_to_draw(tmp_path: Path) -> None:

    async def scenario(one: Node) -> None:
        for number in range(SANDBOXES):
            pod = await one.sandbox(f"s{number}")
            pod.guest = guest.text()
            pod.pids = (os.getpid(), os.getpid())
        port = free_port()
        target = one.url.removeprefix("http://")
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [{"job_name": "pyshim", "static_configs": [{"targets": [target]}]}],
        }
        (tmp_path / "prometheus.yml").write_text(json.dumps(config))
        process = started(tmp_path, port)
        try:
            (count,) = await results(port, "count(pyshim_containers)")
            assert count["value"][1] == str(SANDBOXES)
            (up,) = await results(port, "up")
            assert up["value"][1] == "1"
            dashboard = json.loads(DASHBOARD.read_text())
            for panel in dashboard["panels"]:
                for each in panel["targets"]:
                    await results(port, each["expr"].replace("$namespace", ".*"))
            log_text = (tmp_path / "log").read_text()
            assert "level=error" not in log_text
            assert "out-of-order" not in log_text
            assert "duplicate" not in log_text
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)

    async def body() -> None:
        async with asyncio.timeout(110), AsyncExitStack() as end:
            one = Node(tmp_path, end)
            await one.open()
            await scenario(one)

    asyncio.run(body())
