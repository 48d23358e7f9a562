"""The webhook over real TLS: who may call it, what it refuses, how it ends."""

import asyncio
import contextlib
import datetime
import gc
import io
import json
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from pyshim.model.errors import FailedPrecondition
from pyshim.model.units import MIB
from pyshim.node.webhook import connections
from pyshim.node.webhook.certificate import Certificate
from pyshim.node.webhook.connections import Connections
from pyshim.node.webhook.server import MAX_BODY_BYTES, Limits, serving
from tests.fakes import floods
from tests.fakes.self_signed import SelfSigned, self_signed
from tests.unit.node.webhook.reviews import pod, pod_class, review

NAME = "pyshim-webhook.pyshim-system.svc"
REQUESTS = {"requests": {"cpu": "3", "memory": "4Gi"}}
PATIENT = Limits()
NOW = datetime.datetime.now(datetime.UTC)
_VALUES = Path(__file__).parents[4] / "configs/helm/pyshim/values.yaml"
_CHART_LIMIT_MIB = int(
    yaml.safe_load(_VALUES.read_text())["webhook"]["resources"]["limits"]["memory"].removesuffix("Mi")
)
GENEROUS_S = 60.0
"""For what has to come, on a busy machine."""


class Cluster:
    """A running webhook, and callers of it."""

    def __init__(self, port: int, pair: SelfSigned, directory: Path) -> None:
        self.port = port
        self.pair = pair
        self.directory = directory

    def trusting(self, authority: bytes) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=authority.decode())

    async def call(
        self, method: str, path: str, *, authority: bytes = b"", body: bytes = b"", name: str = NAME
    ) -> tuple[int, str]:
        """Through a connection of its own."""
        context = self.trusting(authority or self.pair.authority)
        connector = aiohttp.TCPConnector(ssl=context, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            url = f"https://127.0.0.1:{self.port}{path}"
            async with session.request(method, url, data=io.BytesIO(body), server_hostname=name) as response:
                return response.status, await response.text()

    async def connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.trusting(self.pair.authority), server_hostname=NAME
        )


def write(pair: SelfSigned, directory: Path) -> None:
    """Both files change at once, as those of a mounted Secret do: a link is renamed."""
    version = directory / f"..{time.monotonic_ns()}"
    version.mkdir()
    (version / "tls.crt").write_bytes(pair.certificate)
    (version / "tls.key").write_bytes(pair.key)
    (directory / "..new").symlink_to(version.name)
    (directory / "..new").rename(directory / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")


def certificate(directory: Path) -> Certificate:
    return Certificate(str(directory / "tls.crt"), str(directory / "tls.key"))


@asynccontextmanager
async def cluster(
    directory: Path, *, limits: Limits = PATIENT, days: int = 30, now: datetime.datetime = NOW
) -> AsyncIterator[Cluster]:
    pair = self_signed((NAME,), days=days, now=now)
    write(pair, directory)
    async with serving(
        {"pykata": pod_class()}, certificate(directory), host="127.0.0.1", port=0, limits=limits
    ) as port:
        yield Cluster(port, pair, directory)


@pytest.fixture
def limits() -> Limits:
    return PATIENT


@pytest.fixture
def running(runner: asyncio.Runner, tmp_path: Path, limits: Limits) -> Iterator[Cluster]:
    end = contextlib.AsyncExitStack()
    yield runner.run(end.enter_async_context(cluster(tmp_path, limits=limits)))
    runner.run(end.aclose())


REVIEW = json.dumps(review(pod(REQUESTS))).encode()


async def test_a_caller_that_trusts_the_private_authority_is_answered(running: Cluster) -> None:
    for path, member in (("/mutate", "patch"), ("/validate", "warnings")):
        status, text = await running.call("POST", path, body=REVIEW)
        assert (status, member in json.loads(text)["response"]) == (200, True)
    assert await running.call("GET", "/healthz") == (200, "ok\n")


async def test_a_caller_does_not_take_a_wrong_or_expired_certificate(tmp_path: Path) -> None:
    other = self_signed((NAME,), days=1, now=NOW)

    async with cluster(tmp_path) as running:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await running.call("POST", "/mutate", body=REVIEW, authority=other.authority)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await running.call("POST", "/mutate", body=REVIEW, name="another.pyshim-system.svc")
        assert await running.call("GET", "/healthz") == (200, "ok\n")

    async with cluster(tmp_path, now=NOW - datetime.timedelta(days=30), days=29) as running:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="expired"):
            await running.call("POST", "/mutate", body=REVIEW)


async def test_a_changed_certificate_is_used_from_the_next_connection_on(tmp_path: Path, running: Cluster) -> None:
    assert await running.call("GET", "/healthz") == (200, "ok\n")
    following = self_signed((NAME,), days=30, now=NOW)
    write(following, tmp_path)

    assert await running.call("GET", "/healthz", authority=following.authority) == (200, "ok\n")
    _status, figures = await running.call("GET", "/metrics", authority=following.authority)
    (line,) = (each for each in figures.splitlines() if each.startswith("pyshim_webhook_certificate_not_after"))
    assert float(line.split()[1]) == (NOW + datetime.timedelta(days=30)).replace(microsecond=0).timestamp()


async def test_a_broken_change_leaves_the_last_good_certificate(tmp_path: Path, running: Cluster) -> None:
    good, other = running.pair, self_signed((NAME,), days=30, now=NOW)
    for broken in (
        SelfSigned(authority=b"", certificate=good.certificate, key=other.key),
        SelfSigned(authority=b"", certificate=b"", key=b""),
    ):
        write(broken, tmp_path)
        assert await running.call("GET", "/healthz") == (200, "ok\n")
    (tmp_path / "..data").unlink()
    status, figures = await running.call("GET", "/metrics")
    assert status == 200
    assert "pyshim_webhook_certificate_failures 3" in figures
    write(other, tmp_path)
    assert await running.call("GET", "/healthz", authority=other.authority) == (200, "ok\n")


@pytest.mark.parametrize(
    ("certificate_text", "key_text"), [pytest.param(None, None, id="absent"), pytest.param(b"no", b"pem", id="no-pem")]
)
def test_no_usable_certificate_at_the_start_is_an_error(
    tmp_path: Path, certificate_text: bytes | None, key_text: bytes | None
) -> None:
    for name, content in (("tls.crt", certificate_text), ("tls.key", key_text)):
        if content is not None:
            (tmp_path / name).write_bytes(content)

    with pytest.raises(FailedPrecondition, match=r"^load certificate '.*tls\.crt' with key '.*tls\.key': "):
        certificate(tmp_path)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        pytest.param("POST", "/mutate", b"{", 400, id="not-json"),
        pytest.param("POST", "/validate", json.dumps({**review({}), "kind": "Pod"}).encode(), 400, id="wrong-kind"),
        pytest.param("POST", "/mutate", json.dumps(review({}, uid="")).encode(), 400, id="no-uid"),
        pytest.param("POST", "/mutate", b" " * (10 << 20), 413, id="10-mib"),
        pytest.param("POST", "/mutate", b" " * (MAX_BODY_BYTES + 1), 413, id="one-byte-too-many"),
        pytest.param("GET", "/mutate", b"", 405, id="method"),
        pytest.param("POST", "/other", b"{}", 404, id="path"),
    ],
)
async def test_bad_input_has_its_status_and_the_next_call_works(
    method: str, path: str, body: bytes, status: int, running: Cluster
) -> None:
    assert (await running.call(method, path, body=body))[0] == status
    assert (await running.call("POST", "/mutate", body=REVIEW))[0] == 200


@pytest.mark.parametrize(
    ("sent", "limits"),
    [
        pytest.param(b"", Limits(idle_s=0.2), id="nothing"),
        pytest.param(b"POST /mutate HTTP/1.1\r\nHo", Limits(idle_s=0.2), id="half-a-header"),
        pytest.param(
            b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", Limits(body_s=0.2), id="half-a-body"
        ),
    ],
)
async def test_a_slow_caller_loses_its_connection(sent: bytes, limits: Limits, running: Cluster) -> None:
    reader, writer = await running.connection()
    writer.write(sent)
    answer = await reader.read()
    assert (b"408" in answer.partition(b"\r\n")[0]) is (limits.body_s < 1)
    writer.close()


@pytest.mark.parametrize("limits", [Limits(handshake_s=0.2)], ids=["at once"])
async def test_a_caller_that_does_not_shake_hands_loses_its_connection(running: Cluster) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    assert await reader.read() == b""
    writer.close()


async def test_a_hundred_reviews_at_once_are_answered(running: Cluster) -> None:
    answers = await asyncio.gather(*(running.call("POST", "/mutate", body=REVIEW) for _ in range(100)))
    assert {status for status, _text in answers} == {200}
    _status, figures = await running.call("GET", "/metrics")
    assert 'pyshim_webhook_reviews_total{action="mutate",outcome="patched"} 100' in figures


async def test_figures_count_outcomes_and_warnings(running: Cluster) -> None:
    await running.call("POST", "/validate", body=REVIEW)
    await running.call("POST", "/validate", body=json.dumps(review(pod())).encode())
    await running.call("POST", "/mutate", body=b"{")
    await running.call("POST", "/mutate", body=b" " * (MAX_BODY_BYTES + 1))
    _status, figures = await running.call("GET", "/metrics")
    for line in (
        'pyshim_webhook_reviews_total{action="validate",outcome="passed"} 1',
        'pyshim_webhook_reviews_total{action="validate",outcome="denied"} 1',
        'pyshim_webhook_reviews_total{action="mutate",outcome="malformed"} 1',
        'pyshim_webhook_reviews_total{action="mutate",outcome="too large"} 1',
        'pyshim_webhook_warnings_total{kind="VM below requests"} 2',
    ):
        assert line in figures


async def test_a_request_under_way_is_answered_before_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with cluster(tmp_path) as running:
            reader, writer = await running.connection()
            head = f"POST /mutate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(REVIEW)}\r\n"
            writer.write(head.encode() + b"Expect: 100-continue\r\n\r\n")
            # The server asks for the body: the request is under way.
            assert b"100" in await reader.readline()
            ending = asyncio.create_task(_later(writer))
        await ending
        answer = await reader.read()
        assert b"200 OK" in answer
        writer.close()

    async def _later(writer: asyncio.StreamWriter) -> None:
        """Once the way out has begun, which is at the next turn of the loop."""
        await asyncio.sleep(0)
        writer.write(REVIEW)

    async with asyncio.timeout(GENEROUS_S):
        await main()


_SERVER = """
import asyncio, sys
from pyshim.node.webhook.certificate import Certificate
from pyshim.node.webhook.server import Limits, serving
from tests.unit.node.webhook.reviews import pod_class

async def main():
    certificate = Certificate(f"{sys.argv[1]}/tls.crt", f"{sys.argv[1]}/tls.key")
    limits = Limits(body_s=8)
    async with serving({"pykata": pod_class()}, certificate, host="127.0.0.1", port=0, limits=limits) as port:
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""
FLOOD_BODY_BYTES = MAX_BODY_BYTES
"""Of an attacker's bodies, whose last byte never comes."""


_UNIT = b'{"a":0},'
EXPENSIVE = b"[" + _UNIT * (MAX_BODY_BYTES // len(_UNIT) - 1) + b"0]"
"""A whole body that takes thirty times its size as objects."""


async def _flood(running: Cluster, count: int) -> list[asyncio.StreamWriter]:
    """The attacker's connections, which have sent all that the server took within a time."""
    size = FLOOD_BODY_BYTES
    writers = [(await running.connection())[1] for _ in range(count)]
    for writer in writers:
        writer.write(f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + b" " * (size - 1))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3):
            await asyncio.gather(*(writer.drain() for writer in writers), return_exceptions=True)
    return writers


@pytest.mark.parametrize("count", [60, 250])
def test_a_flood_of_unfinished_bodies_stays_below_the_memory_limit_and_a_review_is_answered(
    runner: asyncio.Runner, tmp_path: Path, count: int
) -> None:
    pair = self_signed((NAME,), days=30, now=NOW)
    write(pair, tmp_path)

    async def attack(running: Cluster) -> None:
        writers = await _flood(running, count)
        assert (await running.call("POST", "/mutate", body=REVIEW))[0] == 200
        for writer in writers[:4]:  # so that a large body has its turn
            writer.transport.abort()
        with contextlib.suppress(aiohttp.ClientError):
            assert (await running.call("POST", "/mutate", body=EXPENSIVE))[0] in (400, 408)
        for writer in writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)

    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        running = Cluster(int(server.stdout.readline()), pair, tmp_path)
        runner.run(attack(running))
        peak_bytes = floods.peak_bytes(server.pid)
        server.kill()

    assert peak_bytes < _CHART_LIMIT_MIB * MIB


@pytest.mark.parametrize("tls", [False, True], ids=["in-the-handshake", "after-it"])
async def test_connections_that_only_wait_are_bounded_and_lock_no_caller_out(
    monkeypatch: pytest.MonkeyPatch, tls: bool, running: Cluster
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(connections, "GRACE_S", 0.2)

    held = []
    for _ in range(6):
        held.append(await (running.connection() if tls else asyncio.open_connection("127.0.0.1", running.port)))
        assert (await running.call("POST", "/mutate", body=REVIEW))[0] == 200
    assert await held[0][0].read() == b"", "the oldest was closed"
    for _, writer in held:
        writer.transport.abort()


async def test_a_request_under_way_keeps_its_connection_as_long_as_others_are_idle(
    monkeypatch: pytest.MonkeyPatch, running: Cluster
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(connections, "GRACE_S", 0.2)

    reader, writer = await running.connection()
    head = f"POST /mutate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(REVIEW)}\r\n"
    writer.write(head.encode() + b"Expect: 100-continue\r\n\r\n")
    assert b"100" in await reader.readline()
    held = [await running.connection() for _ in range(6)]
    writer.write(REVIEW)
    assert b"200 OK" in await reader.read()
    for _, other in (*held, (reader, writer)):
        other.transport.abort()


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["wide bodies", "compressed bodies", "answers that are not read"])
def test_an_attack_takes_neither_memory_nor_answers(runner: asyncio.Runner, attack: str, tmp_path: Path) -> None:
    pair = self_signed((NAME,), days=30, now=NOW)
    write(pair, tmp_path)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        running = Cluster(int(server.stdout.readline()), pair, tmp_path)
        attacked = floods.flood(floods.over_tls(running.port, context), floods.ON_WEBHOOK[attack])
        status, _ = runner.run(running.call("POST", "/mutate", body=REVIEW))
        peak = floods.peak_bytes(server.pid)
        server.kill()

    assert attacked > 0
    assert status == 200
    assert peak < _CHART_LIMIT_MIB * MIB


async def test_a_compressed_body_is_refused(running: Cluster) -> None:
    reader, writer = await running.connection()
    writer.write(floods.COMPRESSED)
    assert b" 415 " in await reader.readline()
    writer.transport.abort()


async def test_nothing_is_kept_of_ended_connections(running: Cluster) -> None:
    for _ in range(5):
        assert await running.call("GET", "/healthz") == (200, "ok\n")
    kept = [len(each._since_s) for each in gc.get_objects() if isinstance(each, Connections)]

    assert kept  # those of servers that have ended may be there, too
    assert max(kept) <= 2
