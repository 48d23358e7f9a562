"""A TaskService that tests call as containerd does, over fakes of what is behind it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fake_sandboxes import FakeSandboxes
from google.protobuf.message import Message

from protos.containerd import task_v2_pb2
from pyshim.model.host_facts import CgroupMode
from pyshim.task.calls import Calls
from pyshim.task.service import SERVICES, TaskService
from pyshim.ttrpc import Client, RemoteError
from tests.fakes.served import served

V2, V3 = SERVICES
PROCESS_URL = "types.containerd.io/opencontainers/runtime-spec/1/Process"
RESOURCES_URL = "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources"


class Bench:
    """A TaskService behind a ttrpc connection, over FakeSandboxes in which the container `c1` exists."""

    def __init__(self, client: Client, service: TaskService, calls: Calls, sandboxes: FakeSandboxes) -> None:
        self.client = client
        self.service = service
        self.calls = calls
        self.sandboxes = sandboxes

    async def call(self, method: str, request: Message | bytes, service: str = V2, timeout_s: float = 30) -> bytes:
        payload = request if isinstance(request, bytes) else request.SerializeToString()
        return await self.client.call(service, method, payload, timeout_s=timeout_s)

    async def fails(self, method: str, request: Message | bytes, service: str = V2) -> RemoteError:
        with pytest.raises(RemoteError) as caught:
            await self.call(method, request, service)
        return caught.value


@asynccontextmanager
async def bench(cgroup_mode: CgroupMode = CgroupMode.V2) -> AsyncIterator[Bench]:
    sandboxes = FakeSandboxes()
    calls = Calls()
    service = TaskService(tasks=sandboxes, cgroup_mode=cgroup_mode, calls=calls)
    async with served(service.services()) as (_, client):
        bench = Bench(client, service, calls, sandboxes)
        await bench.call("Create", task_v2_pb2.CreateTaskRequest(id="c1", bundle="/b"))
        sandboxes.calls.clear()
        yield bench
