"""A container runtime as NRI plugins see it: takes a registration, configures, synchronizes, tells events, is asked for
updates. A true peer over a socket: mux and ttrpc, the other way round.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any

from protos.nri import v1alpha1_pb2 as pb
from pyshim.node.nri.mux import PLUGIN_SERVICE, RUNTIME_SERVICE, Mux, MuxError
from pyshim.ttrpc import CallContext, Client, Code, Server, TtrpcError

_PLUGIN, _RUNTIME = "nri.pkg.api.v1alpha1.Plugin", "nri.pkg.api.v1alpha1.Runtime"
_EVENTS = {
    "RunPodSandbox": 1,
    "StopPodSandbox": 2,
    "RemovePodSandbox": 3,
    "PostCreateContainer": 5,
    "RemoveContainer": 11,
}
"""Those of which runtimes before NRI 0.12 tell by StateChange, and their numbers."""


class FakeRuntime:
    """One connection of a plugin. Use as `async with`; `containers` is what it has, by id, as CPUs and nodes."""

    def __init__(self, sock: socket.socket, *, refuses: str = "", is_old: bool = False) -> None:
        self._mux = Mux(sock)
        self._refuses = refuses
        self._is_old = is_old
        self.registered: asyncio.Future[pb.RegisterPluginRequest] = asyncio.get_running_loop().create_future()
        self.updates: asyncio.Queue[dict[str, tuple[str, str]]] = asyncio.Queue()
        self.cannot_update: set[str] = set()
        self.answers_updates = asyncio.Event()
        self.answers_updates.set()
        services = {_RUNTIME: {"RegisterPlugin": self._register, "UpdateContainers": self._update}}
        self._server = Server(services=services)
        self._tasks: list[asyncio.Future[Any]] = []

    async def __aenter__(self) -> FakeRuntime:
        self._serving = self._mux.open(RUNTIME_SERVICE)
        self._client = Client(self._mux.open(PLUGIN_SERVICE))
        self._tasks = [
            asyncio.ensure_future(self._server.serve_connection(self._serving)),
            asyncio.ensure_future(self._carry()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.close()
        await self._server.shutdown(grace_s=0)
        await asyncio.gather(*self._tasks)

    async def ended(self) -> None:
        """The plugin has closed the connection."""
        await self._client.closed()

    async def call(self, method: str, message: Any) -> bytes:
        """As the runtime calls it; an old one tells by StateChange what it has no call for."""
        if self._is_old and method in _EVENTS:
            message = pb.StateChangeEvent(
                event=pb.Event.ValueType(_EVENTS[method]),
                pod=message.pod,
                container=getattr(message, "container", None),
            )
            method = "StateChange"
        return await self._client.call(_PLUGIN, method, message.SerializeToString(), timeout_s=60)

    async def accept(self, pods: Sequence[pb.PodSandbox] = (), containers: Sequence[pb.Container] = ()) -> int:
        """Registration, Configure and Synchronize; the events that the plugin wants."""
        await self.registered
        request = pb.ConfigureRequest(runtime_name="containerd", runtime_version="v2.3.4", request_timeout=2000)
        events = pb.ConfigureResponse.FromString(await self.call("Configure", request)).events
        chunks = [pods] if len(pods) < 2 else [pods[:1], pods[1:]]
        for number, sent in enumerate(chunks, 1):
            more = number < len(chunks)
            part = pb.SynchronizeRequest(pods=sent, containers=() if more else containers, more=more)
            reply = pb.SynchronizeResponse.FromString(await self.call("Synchronize", part))
            assert reply.more == more
        return int(events)

    async def _register(self, payload: bytes, _call: CallContext) -> bytes:
        if self._refuses:
            raise TtrpcError(Code.UNKNOWN, self._refuses)
        self.registered.set_result(pb.RegisterPluginRequest.FromString(payload))
        return b""

    async def _update(self, payload: bytes, _call: CallContext) -> bytes:
        request = pb.UpdateContainersRequest.FromString(payload)
        self.updates.put_nowait(cpus_of(request.update))
        await self.answers_updates.wait()
        failed = [each for each in request.update if each.container_id in self.cannot_update]
        return pb.UpdateContainersResponse(failed=failed).SerializeToString()

    async def _carry(self) -> None:
        with contextlib.suppress(MuxError):  # the plugin was ended in the middle of a frame
            await self._mux.run()


def cpus_of(updates: Any) -> dict[str, tuple[str, str]]:
    """CPUs and memory nodes by container."""
    cpus = {each.container_id: each.linux.resources.cpu for each in updates}
    return {key: (cpu.cpus, cpu.mems) for key, cpu in cpus.items()}


def pod(name: str, *, handler: str = "runc", cpus: float = 0, parent: str = "/kubepods") -> pb.PodSandbox:
    """A Guaranteed pod of so many CPUs, or one without limits."""
    message = pb.PodSandbox(id=name, name=name, namespace="default", uid=f"uid-{name}", runtime_handler=handler)
    message.linux.cgroup_parent = f"{parent}/pod{name}"
    if cpus:
        message.linux.pod_resources.cpu.CopyFrom(_limited(cpus))
        message.linux.pod_resources.memory.limit.value = 1 << 30
    return message


def container(name: str, pod_id: str, *, had: str = "", cpus: float = 0, ours: bool = False) -> pb.Container:
    message = pb.Container(id=name, pod_sandbox_id=pod_id, name=name, state=pb.CONTAINER_RUNNING)
    if cpus:
        message.linux.resources.cpu.CopyFrom(_limited(cpus))
    message.linux.resources.cpu.cpus = had
    if ours:
        message.annotations["io.pyshim.nri/cpus"] = "shared"
    return message


def _limited(cpus: float) -> pb.LinuxCPU:
    found = pb.LinuxCPU()
    found.quota.value, found.period.value, found.shares.value = int(cpus * 100_000), 100_000, int(cpus * 1024)
    return found
