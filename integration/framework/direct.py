"""A shim called without containerd: `start` by hand, the Task API over ttrpc, `delete` by hand.

For what `ctr` cannot ask: repeated calls, ids that do not exist, mounts of the test's own, frames that break the rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from protos.containerd import task_v2_pb2
from pyshim.ttrpc import Client, RemoteError

from . import oci, zygote
from .runtime import Runtime
from .waiting import PATIENCE_S, eventually

NAMESPACE = "default"
SERVICE = "containerd.task.v2.Task"
_LIMIT_S = 90.0
LOG = Path("/run/pyshim-integration/direct-shims.log")
_LOG_BYTES = 1 << 16
_open_logs: set[int] = set()
_logs_lock = threading.Lock()
"""For each change or read of the set: some tests drive many shims, a thread each."""


class StartFailed(Exception):
    """`start` exited with an error; the text is what containerd would show its client."""


@dataclass(slots=True)
class DirectShim:
    """One shim serving one bundle. Calls are synchronous; `call` raises RemoteError for a status of the shim."""

    runtime: Runtime
    binaries: Path
    container: str
    bundle: Path
    address: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    """More variables for the shim, as containerd's own environment would give them."""
    _runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    _clients: list[Client] = field(default_factory=list)

    @property
    def socket_path(self) -> str:
        return self.address.removeprefix("unix://")

    def invoke(
        self, action: str, *flags: str, within_s: float = PATIENCE_S, input: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """The binary with the flags containerd gives it."""
        argv = [str(self.runtime.binary), "-namespace", NAMESPACE, "-address", "/run/containerd/containerd.sock"]
        argv += ["-publish-binary", "/bin/true", "-id", self.container, *flags, action]
        path = f"{self.binaries}:/usr/sbin:/usr/bin:/sbin:/bin"
        environment = {"PATH": path, "TTRPC_ADDRESS": "/run/containerd/containerd.sock.ttrpc", "GOMAXPROCS": "2"}
        environment |= zygote.PATIENT | self.environment
        return subprocess.run(
            argv, cwd=self.bundle, env=environment, input=input, capture_output=True, timeout=within_s, check=False
        )

    def start(self, options: Message | None = None) -> str:
        """The shim's address; containerd gives `start` the same options as Create."""
        done = self.invoke("start", input=options.SerializeToString() if options is not None else b"")
        if done.returncode != 0:
            raise StartFailed((done.stdout + done.stderr).decode(errors="replace"))
        self.address = done.stdout.decode().strip()
        return self.address

    def delete(self) -> task_v2_pb2.DeleteResponse:
        done = self.invoke("delete", "-bundle", str(self.bundle))
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return task_v2_pb2.DeleteResponse.FromString(done.stdout)

    def connect(self) -> Client:
        """A new connection, closed when the shim is."""
        return self._runner.run(self._connect())

    async def _connect(self) -> Client:
        self._clients.append(Client(self._connected()))
        return self._clients[-1]

    def _connected(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            # runc's shim answers with an absolute path; the shim under test may as well.
            sock.connect(self.socket_path)
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        return sock

    def call(self, method: str, reply: type[Message] | None = None, within_s: float = _LIMIT_S, **fields: Any) -> Any:
        """The reply to `method` for this container. `fields` are the request's; `id` is filled in."""
        return self._runner.run(self.ask(method, reply, within_s, **fields))

    async def ask(
        self, method: str, reply: type[Message] | None = None, within_s: float = _LIMIT_S, **fields: Any
    ) -> Any:
        if not self._clients:
            await self._connect()
        request = _request_type(method)(id=fields.pop("id", self.container), **fields)
        answer = await self._clients[0].call(SERVICE, method, request.SerializeToString(), timeout_s=within_s)
        return reply.FromString(answer) if reply else answer

    def together(self, *calls: Callable[[], Any]) -> list[Any]:
        """The results of coroutine functions run at the same moment; an error is its result."""

        async def gather() -> list[Any]:
            return await asyncio.gather(*(call() for call in calls), return_exceptions=True)

        return self._runner.run(gather())

    def disconnect(self) -> None:
        """The next call is on a new connection."""
        while self._clients:
            self._clients.pop().close()

    def close(self) -> None:
        self.disconnect()
        self._runner.run(asyncio.sleep(0))
        self._runner.close()


def _request_type(method: str) -> type[Message]:
    odd = {
        "Create": "CreateTaskRequest",
        "Exec": "ExecProcessRequest",
        "Checkpoint": "CheckpointTaskRequest",
        "Update": "UpdateTaskRequest",
    }
    found: type[Message] = getattr(task_v2_pb2, odd.get(method, f"{method}Request"))
    return found


@contextlib.contextmanager
def direct_shim(
    runtime: Runtime, binaries: Path, container: str, bundle: Path, config: oci.Spec | None
) -> Iterator[DirectShim]:
    """A shim whose bundle is there but that is not started; ended the way containerd ends one, whatever the test
    did.
    """
    (bundle / "rootfs").mkdir(parents=True)
    if config is not None:
        oci.write(config, bundle)
    os.mkfifo(bundle / "log")
    log = os.open(bundle / "log", os.O_RDWR | os.O_NONBLOCK)
    with _logs_lock:
        _open_logs.add(log)
    shim = DirectShim(runtime, binaries, container, bundle)
    try:
        yield shim
    finally:
        if shim.address:
            for method, fields in (
                ("Kill", {"signal": 9, "all": True}),
                ("Wait", {}),
                ("Delete", {}),
                ("Shutdown", {}),
            ):
                with contextlib.suppress(Exception):
                    shim.call(method, None, 15, **fields)
        with contextlib.suppress(Exception):
            shim.close()
        with contextlib.suppress(Exception):
            shim.delete()
        take_logs()
        with _logs_lock:
            _open_logs.remove(log)
            os.close(log)


def take_logs() -> None:
    """`LOG` holds what the shims of this module have said up to now."""
    if not _open_logs:
        return
    LOG.parent.mkdir(exist_ok=True)
    with _logs_lock, LOG.open("ab") as taken:
        for log in _open_logs:
            with contextlib.suppress(BlockingIOError):
                while told := os.read(log, _LOG_BYTES):
                    taken.write(told)


def linux_resources(resources: Mapping[str, object]) -> dict[str, Any]:
    """Limits in a request, as containerd writes them."""
    kind = "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources"
    return {"type_url": kind, "value": json.dumps(resources).encode()}


def ask_shim(address: str, service: str, method: str, request: Message) -> None:
    """A call of the shim that containerd runs at this address. Raises RemoteError."""

    async def ask() -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.removeprefix("unix://"))
        sock.setblocking(False)
        client = Client(sock)
        try:
            await client.call(service, method, request.SerializeToString(), timeout_s=_LIMIT_S)
        finally:
            client.close()
            await asyncio.sleep(0)

    asyncio.run(ask())


def update_task(container: str, **resources: object) -> None:
    """Task.Update as containerd sends it. Raises RemoteError."""
    address = Path("/run/containerd/io.containerd.runtime.v2.task", NAMESPACE, container, "address").read_text()
    request = task_v2_pb2.UpdateTaskRequest(id=container, resources=linux_resources(resources))
    ask_shim(address, SERVICE, "Update", request)


def code_of(error: RemoteError) -> int:
    return int(error.code)


def wait_until_gone(shim: DirectShim) -> None:
    eventually(lambda: not shim.runtime.shims(shim.container), what="the shim daemon has exited")
