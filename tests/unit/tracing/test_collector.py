"""A real OpenTelemetry Collector takes what a shim's exporter sends: the program `otelcol`, of any distribution."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pyshim.host.processes.children import Children
from pyshim.model.observation import Trace, span
from pyshim.tracing.exporter import SpanExporter, export

from .receivers import PATIENCE_S, until

PROGRAM = os.environ.get("PYSHIM_TEST_OTELCOL") or shutil.which("otelcol")
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="otelcol is missing (an OpenTelemetry Collector, on PATH or as PYSHIM_TEST_OTELCOL)"
)
_FIELD = re.compile(r"^ +(Trace ID|Parent ID|ID|Name|Status code|Status message) +: *(.*)$", re.MULTILINE)


def started(config: Path, log: Path) -> subprocess.Popen[bytes]:
    with open(log, "wb") as file:
        return subprocess.Popen([str(PROGRAM), f"--config={config}"], stdout=file, stderr=file)


@asynccontextmanager
async def collector(directory: Path) -> AsyncIterator[tuple[str, Path]]:
    """The base URL of a Collector, and the file in which it says what it has taken."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    config = {
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": address}}}},
        "exporters": {"debug": {"verbosity": "detailed"}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["debug"]}},
        },
    }
    (directory / "config.yaml").write_text(json.dumps(config))
    log = directory / "log"
    process = started(directory / "config.yaml", log)
    try:
        await until(lambda: "Everything is ready" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield f"http://{address}", log
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


def test_a_collector_takes_the_spans_and_joins_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    children, trace = Children(), Trace(iter(range(1, 1 << 20)).__next__)

    async def create(url: str) -> None:
        sender = export(children, trace, endpoint=url, sandbox_id="pod1", annotations={})
        with pytest.raises(ValueError, match="no"), span("start vmm"):
            raise ValueError("no")
        senders.append(sender)

    async def body() -> str:
        async with asyncio.timeout(PATIENCE_S), collector(tmp_path) as (url, log):
            with trace.of("create c1"):
                await create(url)
            await senders[0].close()
            await until(lambda: "Span #1" in log.read_text())
            return log.read_text()

    senders: list[SpanExporter] = []
    output = asyncio.run(body())

    spans = [dict(_FIELD.findall(part)) for part in re.split(r"^Span #\d+$", output, flags=re.MULTILINE)[1:]]
    by_name = {each["Name"]: each for each in spans}
    assert by_name["create c1"]["Parent ID"] == ""
    assert by_name["start vmm"]["Parent ID"] == by_name["create c1"]["ID"]
    assert by_name["start vmm"]["Trace ID"] == by_name["create c1"]["Trace ID"]
    assert (by_name["start vmm"]["Status code"], by_name["start vmm"]["Status message"]) == ("Error", "ValueError")
    assert "service.name: Str(pyshim)" in output
    assert "sandbox.id: Str(pod1)" in output
    assert [record for record in caplog.records if record.name.startswith("pyshim.tracing")] == []
