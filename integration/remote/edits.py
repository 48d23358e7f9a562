"""The cloud adaptor's edits: what its proxy changes in the shim's calls on their way to the agent."""

from __future__ import annotations

from protos.agent import agent_pb2 as pb
from pyshim.ttrpc.framing import HEADER, REQUEST, Frame
from pyshim.ttrpc.messages import decode_request

_GPUS = "io.katacontainers.config.hypervisor.default_gpus"
_ALL_GPUS = ("cdi.k8s.io/peer-pods", "nvidia.com/gpu=all")


def edit_container(request: pb.CreateContainerRequest) -> None:
    """A container that has the annotation `default_gpus`, with any value but an empty one, gets all GPUs of the VM."""
    annotations = request.OCI.Annotations
    if annotations.get(_GPUS):
        key, value = _ALL_GPUS
        annotations[key] = value


def edited_frame(frame: Frame) -> bytes:
    """The frame that is sent on in place of `frame`."""
    payload = bytes(frame.payload)
    if frame.type == REQUEST:
        request = decode_request(payload)
        if (request.service, request.method) == ("grpc.AgentService", "CreateContainer"):
            container = pb.CreateContainerRequest.FromString(request.payload)
            edit_container(container)
            request.payload = container.SerializeToString()
            payload = request.SerializeToString()
    return HEADER.pack(len(payload), frame.stream_id, frame.type, frame.flags) + payload
