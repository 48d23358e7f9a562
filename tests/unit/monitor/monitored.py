"""A pod behind a monitor socket, for tests that ask it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

from pyshim.model.errors import NotFound, ShimError
from pyshim.model.observation import AgentCalls, Durations, Observation, SizeFigures, Span
from pyshim.model.oci import PodName
from pyshim.model.volumes import VolumeStats, VolumeUsage
from pyshim.monitor.answers import ShimAnswers
from pyshim.monitor.socket import MonitorSocket

GUEST = '# HELP kata_guest_load Load.\n# TYPE kata_guest_load gauge\nkata_guest_load{item="load1"} 0.5\n'


class FakePod:
    """`seams.MonitorRpc` in memory; `guest` is what the guest says, or how it fails."""

    def __init__(self) -> None:
        self.guest: str | ShimError = GUEST
        self.pids = (0, 0)
        """VMM and virtiofsd."""
        self.resized: list[tuple[str, int]] = []
        self.tables: dict[bool, bytes] = {}
        self.policy = ""
        self.checks = 0

    def observe(self) -> Observation:
        vmm, virtiofsd = self.pids
        return Observation(
            vmm_pid=vmm,
            virtiofsd_pid=virtiofsd,
            vcpus=SizeFigures(requested=1.5, booted=1, current=2, limit=8),
            memory_mib=SizeFigures(requested=512, booted=256, current=512, limit=4096),
            containers=2,
            ledger={"mount": 3},
            spans=(
                Span("create c1", -1, 0, 2_000_000_000, ""),
                Span("wait for agent", 0, 0, 1_500_000_000, ""),
                Span("unfinished", 0, 5, 0, ""),
            ),
            streams={("c1", "stdout"): 42},
            oom_kills={"c1": 1},
            is_cloned=False,
            missed_checks=0,
        )

    def agent_url(self) -> str:
        return "vsock://3:1024"

    def name(self) -> PodName:
        return PodName(uid="u1", name="web", namespace="shop")

    @property
    def agent(self) -> "FakePod":
        return self

    async def metrics(self) -> str:
        if isinstance(self.guest, ShimError):
            raise self.guest
        return self.guest

    async def check(self, timeout_s: float) -> None:
        self.checks += 1
        if isinstance(self.guest, ShimError):
            raise self.guest

    async def iptables(self, *, ipv6: bool) -> bytes:
        return self.tables.get(ipv6, b"")

    async def set_iptables(self, data: bytes, *, ipv6: bool) -> None:
        self.tables[ipv6] = data

    async def set_policy(self, policy: str) -> None:
        self.policy = policy

    async def volume_stats(self, volume_path: str) -> VolumeStats:
        if volume_path != "/var/lib/a b?c":
            raise NotFound(f"find direct volume '{volume_path}'")
        usage = VolumeUsage(total=100, available=100, used=0, unit=1)
        return VolumeStats(usages=(usage,), abnormal=False, message="OK")

    async def resize_volume(self, volume_path: str, size_bytes: int) -> None:
        self.resized.append((volume_path, size_bytes))


@asynccontextmanager
async def served(
    directory: Path, debug: Mapping[str, Callable[[], str]] = MappingProxyType({})
) -> AsyncIterator[tuple[str, FakePod]]:
    """The path of a monitor socket, and the pod behind it."""
    pod, path = FakePod(), str(directory / "shim-monitor.sock")
    calls, agent_calls = Durations(), AgentCalls(time.monotonic)
    calls.took("create", 0.003)
    agent_calls.took("grpc.CheckRequest", 5.0)
    answers = ShimAnswers(pod, calls=calls, agent_calls=agent_calls, debug=debug)
    monitor = MonitorSocket(path, answers.answer, address_file=str(directory / "monitor_address"))
    await monitor.open()
    try:
        yield path, pod
    finally:
        await monitor.close()


async def said(path: str, request: bytes) -> tuple[int, bytes]:
    """Status and body of the reply to these bytes."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(request)
    reply = await reader.read()
    writer.close()
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def got(path: str, target: str) -> str:
    """The body of a GET that was answered well."""
    status, body = await said(path, f"GET {target} HTTP/1.1\r\nHost: shim\r\n\r\n".encode())
    assert status == 200, body
    return body.decode()
