"""The other side of the protocol: one call per connection, for tests of the peer and for use by hand."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from protos import hypervisor_pb2 as pb
from protos.agent import health_pb2
from pyshim.ttrpc import Client

from .service import SERVICE

CALL_WITHIN_S = 330.0


async def call(path: Path, service: str, method: str, payload: bytes, within_s: float = CALL_WITHIN_S) -> bytes:
    """The reply of the ttrpc server at the unix socket `path`. Raises OSError and what the ttrpc client raises."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, str(path))
    except BaseException:
        sock.close()
        raise
    client = Client(sock)
    try:
        return await client.call(service, method, payload, timeout_s=within_s)
    finally:
        client.close()
        await asyncio.sleep(0)


class RemoteClient:
    """The calls of the peer at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def version(self) -> str:
        reply = await call(self._path, SERVICE, "Version", pb.VersionRequest().SerializeToString())
        return str(pb.VersionResponse.FromString(reply).version)

    async def create(self, id: str, annotations: dict[str, str], netns: str) -> str:
        request = pb.CreateVMRequest(id=id, annotations=annotations, networkNamespacePath=netns)
        reply = await call(self._path, SERVICE, "CreateVM", request.SerializeToString())
        return str(pb.CreateVMResponse.FromString(reply).agentSocketPath)

    async def start(self, id: str) -> None:
        await call(self._path, SERVICE, "StartVM", pb.StartVMRequest(id=id).SerializeToString())

    async def stop(self, id: str) -> None:
        await call(self._path, SERVICE, "StopVM", pb.StopVMRequest(id=id).SerializeToString())


async def agent_health(path: Path, within_s: float = 30.0) -> str:
    """The health that the agent behind the socket `path` reports."""
    reply = await call(path, "grpc.Health", "Check", health_pb2.CheckRequest().SerializeToString(), within_s)
    status = health_pb2.HealthCheckResponse.FromString(reply).status
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
