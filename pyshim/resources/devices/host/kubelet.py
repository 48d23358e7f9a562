"""Client of PodResources v1, over the kubelet's Unix socket.

`Get` needs kubelet 1.34, or a feature gate before; where it is missing, `List` is asked and searched. Devices are given
at admission, before the sandbox is created, so the answer is there when a sandbox asks.
"""

import os
import stat
from collections.abc import Callable
from typing import Any

import grpc

from protos.kubelet import podresources_v1_pb2 as pb
from protos.kubelet.podresources_v1_pb2_grpc import PodResourcesListerStub
from pyshim.host.os_errors import os_errors
from pyshim.model.devices import DeviceRequest, PodResources
from pyshim.model.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    NotFound,
    ResourceExhausted,
    ShimError,
    Unavailable,
)

MAX_REPLY_BYTES = 16 * 1024 * 1024
TIMEOUT_S = 10.0
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    # Names would be looked up and proxies asked for a path.
    ("grpc.enable_http_proxy", 0),
)


def pod_resources(socket_path: str, name: str, namespace: str, *, timeout_s: float = TIMEOUT_S) -> PodResources:
    """The resources of the pod. Raises a ShimError that names socket and pod: Unavailable, DeadlineExceeded, NotFound.

    Devices of device plugins are named `<resource>=<id>`, those of DRA claims as their drivers name them.
    """
    where = f"ask kubelet at '{socket_path}' for pod '{namespace}/{name}'"
    _check_socket(socket_path, where)
    with grpc.insecure_channel(f"unix://{socket_path}", options=_OPTIONS) as channel:
        stub: Any = PodResourcesListerStub(channel)
        try:
            pod = _call(
                where,
                lambda: stub.Get(pb.GetPodResourcesRequest(pod_name=name, pod_namespace=namespace), timeout=timeout_s),
            ).pod_resources
        except _NotServed:
            listed = _call(where, lambda: stub.List(pb.ListPodResourcesRequest(), timeout=timeout_s)).pod_resources
            found = [each for each in listed if (each.name, each.namespace) == (name, namespace)]
            if not found:
                raise NotFound(f"{where}: it lists {len(listed)} pods, and not this one") from None
            pod = found[0]
    if (pod.name, pod.namespace) != (name, namespace):
        raise Internal(f"{where}: it answers for '{pod.namespace[:100]}/{pod.name[:100]}'")
    return _read(pod)


class _NotServed(Exception):
    """The kubelet does not have the method."""


def _check_socket(path: str, where: str) -> None:
    with os_errors(where, Unavailable):
        mode = os.stat(path).st_mode
    if not stat.S_ISSOCK(mode):
        raise FailedPrecondition(f"{where}: it is not a socket")


def _call(where: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except grpc.RpcError as error:
        code = error.code()
        text = " ".join(str(error.details()).split())[:500]
        # A kubelet whose feature gate is off says so under an unknown code.
        if code is grpc.StatusCode.UNIMPLEMENTED or "disabled" in text.lower():
            raise _NotServed from error
        kinds: dict[grpc.StatusCode, type[ShimError]] = {
            grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
            grpc.StatusCode.NOT_FOUND: NotFound,
            grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
            grpc.StatusCode.UNAVAILABLE: Unavailable,
        }
        kind = NotFound if text.endswith("not found") else kinds.get(code, Internal)
        raise kind(f"{where}: {code.name.lower()}: {text}") from error


def _read(pod: Any) -> PodResources:
    requests: dict[tuple[str, str], DeviceRequest] = {}
    cpu_ids: dict[str, tuple[int, ...]] = {}
    memory: dict[str, dict[str, int]] = {}
    for container in pod.containers:
        for entry in container.devices:
            for device_id in entry.device_ids:
                name = f"{entry.resource_name}={device_id}"
                request = DeviceRequest(name=name, origin="device plugin", container=container.name)
                requests.setdefault((container.name, name), request)
        for claim in container.dynamic_resources:
            origin = f"claim {claim.claim_namespace}/{claim.claim_name}"
            for resource in claim.claim_resources:
                for device in resource.cdi_devices:
                    request = DeviceRequest(name=device.name, origin=origin, container=container.name)
                    # A driver may name the same device in a claim that was also given by a plugin.
                    requests.setdefault((container.name, device.name), request)
        if container.cpu_ids:
            cpu_ids[container.name] = tuple(sorted(container.cpu_ids))
        for block in container.memory:
            nodes = ",".join(str(node.ID) for node in sorted(block.topology.nodes, key=lambda node: int(node.ID)))
            sizes = memory.setdefault(container.name, {})
            sizes[nodes] = sizes.get(nodes, 0) + block.size
    return PodResources(requests=tuple(requests.values()), cpu_ids=cpu_ids, memory=memory)
