"""How Kubernetes calls the sandboxes of this node, asked of containerd's CRI plugin."""

import asyncio
import logging
from typing import NamedTuple

import grpc

from protos.cri import v1_pb2, v1_pb2_grpc

log = logging.getLogger(__name__)

ASK_AGAIN_S = 5.0
"""Seconds between two questions at least, as kata-monitor waits: a pod's sandbox is there before CRI lists it."""
TIMEOUT_S = 2.0
"""Seconds for one answer; metrics go without names then."""
MAX_LIST_BYTES = 16 << 20
"""Bytes of the answer: as much as the kubelet takes."""


class PodName(NamedTuple):
    uid: str
    name: str
    namespace: str


NO_NAME = PodName("", "", "")


class Names:
    """Names are asked for when a sandbox is looked up that has none yet, and after `forget`."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the path of containerd's socket; empty for no names."""
        self._endpoint = endpoint.removeprefix("unix://")
        self._known: dict[str, PodName] = {}
        self._next_s = 0.0
        self._asking = asyncio.Lock()
        self._failed = ""

    def forget(self) -> None:
        """Sandboxes have come or gone: the next look asks again, if some sandbox has no name."""
        self._next_s = 0.0

    async def of(self, sandbox_ids: list[str]) -> dict[str, PodName]:
        """Names of these sandboxes; NO_NAME for what containerd does not call a pod, or while it does not answer."""
        if self._endpoint and any(each not in self._known for each in sandbox_ids):
            async with self._asking:
                now_s = asyncio.get_running_loop().time()
                if now_s >= self._next_s:
                    self._next_s = now_s + ASK_AGAIN_S
                    await self._ask()
        return {each: self._known.get(each, NO_NAME) for each in sandbox_ids}

    async def _ask(self) -> None:
        options = [("grpc.max_receive_message_length", MAX_LIST_BYTES)]
        try:
            async with grpc.aio.insecure_channel(f"unix://{self._endpoint}", options=options) as channel:
                stub = v1_pb2_grpc.RuntimeServiceStub(channel)
                reply = await stub.ListPodSandbox(v1_pb2.ListPodSandboxRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            problem = str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)
            if problem != self._failed:
                log.warning("no names of pods", extra={"endpoint": self._endpoint, "error": problem})
            self._failed = problem
            return
        self._failed = ""
        self._known = {
            item.id: PodName(item.metadata.uid, item.metadata.name, item.metadata.namespace) for item in reply.items
        }
