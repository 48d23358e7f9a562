"""Reads the handlers of the node's container runtime over CRI, and runs a pod with one of ours."""

import os
import time
from typing import Any

import grpc
import msgspec

from protos.cri import v1_pb2 as pb
from protos.cri import v1_pb2_grpc
from pyshim.model.decoding import damaged, from_json
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Unavailable

_READY_S = 60.0
"""Seconds for a runtime that was just started."""
_POD_S = 300.0
"""Seconds for the test pod. The guest has three minutes to answer, the shipped configuration's dial_timeout."""
_NEEDED = ("RuntimeReady", "NetworkReady")


class _Plugin(msgspec.Struct, frozen=True):
    runtimes: dict[str, Any] = {}


class _CriConfig(msgspec.Struct, frozen=True):
    """The part of the CRI plugin's configuration that is read here."""

    containerd: _Plugin = _Plugin()


def verify(socket: str, handlers: frozenset[str], *, pod: str | None) -> str:
    """The runtime is ready and has `handlers`; a pod of the handler `pod` ran. Returns the runtime's name and version.

    Raises Unavailable, FailedPrecondition, DeadlineExceeded, with the runtime's error text.
    """
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        stub = v1_pb2_grpc.RuntimeServiceStub(channel)
        try:
            answer = _ready(stub)
            _require_listed(stub.Status(pb.StatusRequest(verbose=True), timeout=10), handlers)
            if pod is not None:
                _run_pod(stub, pod)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(f"verify through '{socket}': {error.details()}") from error
            raise FailedPrecondition(f"verify through '{socket}': {error.details()}") from error
    return f"{answer.runtime_name} {answer.runtime_version}"


def _ready(stub: v1_pb2_grpc.RuntimeServiceStub) -> pb.VersionResponse:
    """The version of the runtime once it is ready for pods. It has _READY_S for that."""
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            answer: pb.VersionResponse = stub.Version(pb.VersionRequest(), timeout=5)
            conditions = stub.Status(pb.StatusRequest(), timeout=5).status.conditions
            waits = [f"{each.type}: {each.message}" for each in conditions if not each.status and each.type in _NEEDED]
            if not waits:
                return answer
            why = "; ".join(waits)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise FailedPrecondition(
                    "ask the CRI plugin: containerd runs without it (hint: see its log)"
                ) from error
            why = error.details()
        if time.monotonic() > deadline:
            raise Unavailable(f"ask the container runtime: not ready within {_READY_S:g} s: {why}")
        time.sleep(0.2)


def _require_listed(status: pb.StatusResponse, handlers: frozenset[str]) -> None:
    """containerd before 2.0 does not list its handlers; its plugin's configuration has them."""
    listed = {handler.name for handler in status.runtime_handlers}
    if not listed:
        refused = damaged("status of the container runtime", FailedPrecondition)
        listed = set(from_json(status.info.get("config", "{}"), _CriConfig, refused).containerd.runtimes)
    lacking = sorted(handlers - listed)
    if lacking:
        hint = "it has not been restarted since the files were written"
        raise FailedPrecondition(f"ask the container runtime: it has no handler {', '.join(lacking)} (hint: {hint})")


def _run_pod(stub: v1_pb2_grpc.RuntimeServiceStub, handler: str) -> None:
    name = f"pyshim-verify-{os.getpid()}"
    metadata = pb.PodSandboxMetadata(name=name, uid=name, namespace="pyshim-verify")
    config = pb.PodSandboxConfig(metadata=metadata, hostname=name, linux=pb.LinuxPodSandboxConfig())
    pod = stub.RunPodSandbox(
        pb.RunPodSandboxRequest(config=config, runtime_handler=handler), timeout=_POD_S
    ).pod_sandbox_id
    try:
        status = stub.PodSandboxStatus(pb.PodSandboxStatusRequest(pod_sandbox_id=pod), timeout=10).status
        if status.state != pb.SANDBOX_READY or status.runtime_handler != handler:
            raise FailedPrecondition(f"run a test pod with runtime '{handler}': it is not ready")
    finally:
        stub.StopPodSandbox(pb.StopPodSandboxRequest(pod_sandbox_id=pod), timeout=60)
        stub.RemovePodSandbox(pb.RemovePodSandboxRequest(pod_sandbox_id=pod), timeout=60)
