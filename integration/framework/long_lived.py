"""The services of a node under callers that come and go: descriptors, threads and memory stay what they are.

`python -m integration.framework.enclosure .venv/bin/python -m integration.framework.long_lived --minutes 10` asks the
webhook (reviews over TLS connections of their own, bodies cut off, handshakes given up), the node's monitor (scrapes,
also unread ones), the NRI plugin (placements of shims that end), the DRA driver (claims prepared and removed, and one
that the API server does not have) and the zygote (shims, and requests cut off), and prints a line for each a minute.
The first third is for what is filled once. A shim with many execs is `bench.stub_rounds`.

With `--attacks` webhook and monitor are flooded instead, attack after attack of `tests/fakes/floods.py`, with an honest
question after each that has to be answered; the lines have the most memory that each ever had, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import errno
import itertools
import json
import os
import platform
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from bench import chart
from protos.kubelet import dra_v1_pb2 as pb
from protos.kubelet.dra_v1_pb2_grpc import DRAPluginStub
from pyshim.model.sizing import PlacementRequest
from pyshim.node.dra.slices import DRIVER, POOL
from pyshim.node.kubernetes.api import Access
from pyshim.node.monitor.server import SEND_S
from pyshim.resources.placement_call import ask_for_placement
from pyshim.start import zygote_client
from pyshim.ttrpc import RemoteError
from tests.fakes import floods
from tests.fakes.api_server import FakeApiServer
from tests.fakes.self_signed import self_signed
from tests.unit.node.webhook.reviews import pod, review

from . import oci
from . import zygote as zygotes
from .cri_soak import private_kib
from .direct import direct_shim
from .runtime import Runtime
from .waiting import eventually

PROJECT = Path(__file__).resolve().parents[2]
CLASS = f"pykata={PROJECT}/configs/configuration-qemu.toml"
GROWTH_KIB = 3072
"""Private memory that may come after the first third: the C library's heap grows in steps of this order."""
ATTACKED_KIB = 16384
"""Resident memory by which a later attack may exceed all of the first third; answers and bodies are MiB long."""
_PLACEMENT_MIB = 256
_ANSWER_S = 240.0
"""Seconds for an answer after an attack, on a busy machine."""
_TURN_S = 0.5
"""Of a service, before the next has its turn: their rounds take from 5 to 500 ms."""
_TYPES = """
[[type]]
name = "gpu-1"
vcpus = 16
memory_mib = 262144
device = "h100"
devices = 1

[device.h100]
kind = "nvidia.com/gpu"
count = 9
"""
_REVIEW = json.dumps(review(pod({"requests": {"cpu": "3", "memory": "4Gi"}}))).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    fds: int
    threads: int
    kib: int
    peak_kib: int
    """Resident at any time, shared memory as well."""

    @classmethod
    def of(cls, pid: int) -> Sizes:
        return cls(
            fds=len(os.listdir(f"/proc/{pid}/fd")),
            threads=len(os.listdir(f"/proc/{pid}/task")),
            kib=private_kib(pid),
            peak_kib=floods.peak_bytes(pid) >> 10,
        )

    def __str__(self) -> str:
        return (
            f"{self.fds} descriptors, {self.threads} threads, {self.kib} KiB private, at most {self.peak_kib} resident"
        )


@dataclass(slots=True, kw_only=True)
class Service:
    """`ask` makes one round of its callers; it may raise OSError for a caller that is turned away."""

    name: str
    pid: int
    ask: Callable[[], None]
    attacks: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    """Each gives the number of its connections that were served at its end."""
    rounds: int = 0
    warm: Sizes | None = None
    seen: list[tuple[float, float]] = field(default_factory=list)
    """Minutes and MiB."""

    def line(self) -> str:
        return f"{self.name:8} {self.rounds:6} rounds: {Sizes.of(self.pid)}"

    def problem(self, *, attacks: bool) -> str:
        """What has grown since `warm`: the private memory, or under attacks, of which each leaves some, the peak."""
        now, warm = Sizes.of(self.pid), self.warm
        assert warm is not None
        grown = now.peak_kib > warm.peak_kib + ATTACKED_KIB if attacks else now.kib > warm.kib + GROWTH_KIB
        if now.fds > warm.fds or now.threads > warm.threads or grown:
            return f"{self.name} grew: {warm} to {now}"
        return ""


@contextlib.contextmanager
def _run(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file, subprocess.Popen([sys.executable, "-m", "pyshim", *words], stderr=file) as process:
        try:
            yield process
        finally:
            process.terminate()


def _port(log: Path) -> int:
    found: list[str] = eventually(lambda: re.findall(r"\bport=(\d+)", log.read_text()), what=f"a port in '{log}'")
    return int(found[0])


def check_answer(caller: socket.socket) -> None:
    """The caller has an answer. Raises OSError when the connection ends without one."""
    if not (begin := caller.recv(1 << 16)):
        raise ConnectionResetError(errno.ECONNRESET, "no answer")
    assert begin.startswith(b"HTTP/1.1 ")


def attacks_on(
    connect: Callable[[], socket.socket], all_floods: Mapping[str, floods.Flood]
) -> dict[str, Callable[[], int]]:
    return {name: partial(floods.flood, connect, flood) for name, flood in all_floods.items()}


@contextlib.contextmanager
def webhook(directory: Path) -> Iterator[Service]:
    pair = self_signed(("127.0.0.1",), days=1, now=datetime.datetime.now(datetime.UTC))
    certificate, key, log = (directory / name for name in ("tls.crt", "tls.key", "webhook.log"))
    certificate.write_bytes(pair.certificate)
    key.write_bytes(pair.key)
    words = ("--class", CLASS, "--listen", "127.0.0.1:0", "--certificate", str(certificate), "--key", str(key))
    context = ssl.create_default_context(cadata=pair.authority.decode())
    head = f"POST /mutate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(_REVIEW)}\r\n\r\n".encode()

    with _run(log, "webhook", "serve", *words) as process:
        port = _port(log)

        def ask() -> None:
            for sent in (head + _REVIEW, head + _REVIEW[:100], head + b"{" * len(_REVIEW), b""):
                with socket.create_connection(("127.0.0.1", port), 30) as plain:
                    if sent:
                        with context.wrap_socket(plain, server_hostname="127.0.0.1") as caller:
                            caller.sendall(sent)
                            if len(sent) == len(head) + len(_REVIEW):
                                check_answer(caller)

        attacks = attacks_on(floods.over_tls(port, context), floods.ON_WEBHOOK)
        yield Service(name="webhook", pid=process.pid, ask=ask, attacks=attacks)


@contextlib.contextmanager
def monitor(directory: Path, large: int = 0) -> Iterator[Service]:
    """Over so many sandboxes with large answers, and then one more that never answers."""
    log, metrics = directory / "monitor.log", directory / "metrics"
    metrics.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("--listen-address", f"127.0.0.1:{port}", "--metrics-dir", str(metrics), "--state-dir", str(metrics))

    def is_up() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30):
            return True
        return False

    silent = floods.silent_shim(metrics) if large else contextlib.nullcontext()
    with floods.shims(metrics, large), silent, _run(log, "monitor", *words) as process:
        eventually(is_up, what="the monitor listens")

        def ask() -> None:
            for path, is_read in (("/metrics", True), ("/sandboxes", True), ("/metrics", False), ("/none", True)):
                with socket.create_connection(("127.0.0.1", port), 30) as caller:
                    caller.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                    if is_read:
                        check_answer(caller)

        attacks = attacks_on(floods.plain(port), floods.ON_MONITOR)
        yield Service(name="monitor", pid=process.pid, ask=ask, attacks=attacks)


@contextlib.contextmanager
def nri(directory: Path) -> Iterator[Service]:
    """Without a runtime, for which it waits."""
    log, path = directory / "nri.log", directory / "placement.sock"
    words = ("run", "--socket", str(directory / "none.sock"), "--placement-socket", str(path))
    need = PlacementRequest(sandbox_id="s1", name="n/p", vcpus=1, memory_bytes=_PLACEMENT_MIB << 20, exclusive=False)

    with _run(log, "nri", *words) as process:
        eventually(path.exists, what="the plugin serves shims")

        def ask() -> None:  # a placement ends with the process that asked for it
            _in_child(lambda: asyncio.run(ask_for_placement(str(path), need)), log)

        yield Service(name="nri", pid=process.pid, ask=ask)


def _in_child(call: Callable[[], object], log: Path) -> None:
    """A process of its own has made the call, without an error."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            call()
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, log.read_text()[-500:]


@contextlib.contextmanager
def _api_server(directory: Path) -> Iterator[Access]:
    """Serves the claim `ns/c`, whose uid is `u1`."""
    results = [{"request": "a", "driver": DRIVER, "pool": POOL, "device": "h100-3"}]
    server = FakeApiServer()
    server.claims["ns/c"] = {
        "metadata": {"namespace": "ns", "name": "c", "uid": "u1"},
        "status": {"allocation": {"devices": {"results": results}}},
    }
    answer, said = os.pipe()

    async def serve() -> None:
        async with server.serving(directory) as access:
            os.write(said, json.dumps(access).encode())
            await asyncio.Event().wait()

    pid = os.fork()
    if pid == 0:
        asyncio.run(serve())
    try:
        yield Access(*json.loads(os.read(answer, 1 << 16)))
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def dra(directory: Path) -> Iterator[Service]:
    log, types, root = directory / "dra.log", directory / "instances.toml", directory / "kubelet"
    types.write_text(_TYPES)
    pki = directory / "api"
    pki.mkdir()
    requests = [pb.Claim(namespace="ns", uid="u1", name="c"), pb.Claim(namespace="ns", uid="u2", name="none")]

    def as_kubelet() -> None:
        with grpc.insecure_channel(f"unix:{root}/plugins/{DRIVER}/dra.sock") as channel:
            driver = DRAPluginStub(channel)
            for _ in range(2):
                prepared = driver.NodePrepareResources(pb.NodePrepareResourcesRequest(claims=requests)).claims
                assert prepared["u1"].devices
                assert prepared["u2"].error
            removed = driver.NodeUnprepareResources(pb.NodeUnprepareResourcesRequest(claims=requests)).claims
            assert not removed["u1"].error

    with _api_server(pki) as access:
        place = ("--server", access.server, "--token", access.token, "--authority", access.authority)
        where = ("--types", str(types), "--kubelet-root", str(root), "--cdi", str(directory / "cdi"))
        with _run(log, "dra", "run", *where, *place) as process:
            eventually((root / "plugins" / DRIVER / "dra.sock").exists, what="the driver serves the kubelet")
            yield Service(name="dra", pid=process.pid, ask=lambda: _in_child(as_kubelet, log))


@contextlib.contextmanager
def zygote(directory: Path) -> Iterator[Service]:
    runtime, binaries, numbers = Runtime.chosen(), PROJECT / "bin", itertools.count(1)
    with zygotes.Zygote(binaries / runtime.binary, directory / "zygote.log") as program:

        def ask() -> None:
            name = f"forked{next(numbers)}"
            spec = oci.spec("true", name=name, rootfs=directory)
            with direct_shim(runtime, binaries, name, directory / name, spec) as shim:
                shim.start()
                with contextlib.suppress(RemoteError):  # it serves: there is no such container
                    shim.call("State")
                (made,) = runtime.shims(name)
                assert made.never_executed
            shutil.rmtree(directory / name)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
                caller.connect(zygote_client.address(str(zygotes.DIRECTORY)))
                caller.send(b"cut")

        yield Service(name="zygote", pid=program.pid, ask=ask)


Made = Callable[[Path], contextlib.AbstractContextManager[Service]]
SERVICES: dict[str, Made] = {"webhook": webhook, "monitor": monitor, "nri": nri, "dra": dra, "zygote": zygote}
ATTACKED: dict[str, Made] = {"webhook": webhook, "monitor": partial(monitor, large=4)}


def turn(service: Service, *, attacks: bool) -> None:
    """The service was asked for a time, or attacked once and then answered."""
    if attacks:
        [*every] = service.attacks.values()
        every[service.rounds % len(every)]()
    until = time.monotonic() + (_ANSWER_S if attacks else _TURN_S)
    while time.monotonic() < until:
        try:
            service.ask()
        except OSError:
            continue
        if attacks:
            break
        service.rounds += 1
    else:
        assert not attacks, f"{service.name} answers no more after attack {service.rounds}"
    service.rounds += attacks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="an SVG of the sizes")
    parser.add_argument("--service", action="append", choices=SERVICES, help="default: all")
    parser.add_argument("--attacks", action="store_true", help="flood webhook and monitor")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="between two attacks")
    asked = parser.parse_args()
    all_services = ATTACKED if asked.attacks else SERVICES
    settle_s = SEND_S if asked.attacks else 1
    Path("/run/containerd").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as ground, contextlib.ExitStack() as end:
        services = [end.enter_context(all_services[name](Path(ground))) for name in asked.service or all_services]
        began = shown = time.monotonic()
        while (now := time.monotonic()) < began + asked.minutes * 60:
            for service in services:
                turn(service, attacks=asked.attacks)
                time.sleep(asked.pause)
                service.seen.append(((now - began) / 60, Sizes.of(service.pid).kib / 1024))
                if service.warm is None and now > began + asked.minutes * 20:
                    time.sleep(settle_s)  # what is about to end has ended
                    service.warm = Sizes.of(service.pid)
            if now > shown + 60:
                shown = now
                for service in services:
                    print(f"{now - began:5.0f} s  {service.line()}", flush=True)
        time.sleep(2 * settle_s)
        for service in services:
            print(f"{service.line()}; {service.warm} after the first third", flush=True)
        if asked.picture:
            lines = {
                f"{each.name}: {each.rounds} rounds, {Sizes.of(each.pid).fds} descriptors": each for each in services
            }
            callers = "attacks" if asked.attacks else "callers that come and go"
            caption = f"services of a node under {callers}, Python {platform.python_version()}"
            chart.write_sizes(asked.picture, {name: each.seen for name, each in lines.items()}, caption)
        problems = [problem for service in services if (problem := service.problem(attacks=asked.attacks))]
    print("\n".join(problems) or "flat")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
