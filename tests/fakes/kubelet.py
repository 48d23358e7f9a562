"""A kubelet's PodResources service over its real protocol: gRPC on a Unix socket."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from protos.kubelet import podresources_v1_pb2 as pb
from protos.kubelet.podresources_v1_pb2_grpc import PodResourcesListerServicer, add_PodResourcesListerServicer_to_server

MAX_BYTES = 64 * 1024 * 1024


class FakeKubelet(PodResourcesListerServicer):
    """Answers for `pods`. `get` says what Get does first, and may abort; `calls` are the methods asked for."""

    def __init__(self, *pods: pb.PodResources, get: Callable[[Any], None] = lambda _context: None) -> None:
        self.pods = list(pods)
        self.calls: list[str] = []
        self._get = get

    def Get(self, request: Any, context: Any) -> Any:
        self.calls.append("Get")
        self._get(context)
        for pod in self.pods:
            if (pod.name, pod.namespace) == (request.pod_name, request.pod_namespace):
                return pb.GetPodResourcesResponse(pod_resources=pod)
        # As the kubelet does: an error without a code of its own.
        context.abort(grpc.StatusCode.UNKNOWN, f"pod {request.pod_name} in namespace {request.pod_namespace} not found")
        raise AssertionError("abort raises")

    def List(self, request: Any, context: Any) -> Any:
        self.calls.append("List")
        return pb.ListPodResourcesResponse(pod_resources=self.pods)


@contextmanager
def serving(kubelet: FakeKubelet, path: object) -> Iterator[FakeKubelet]:
    options = (("grpc.max_send_message_length", MAX_BYTES),)
    server = grpc.server(ThreadPoolExecutor(max_workers=2), options=options)
    add_PodResourcesListerServicer_to_server(kubelet, server)
    server.add_insecure_port(f"unix://{path}")
    server.start()
    try:
        yield kubelet
    finally:
        server.stop(None).wait()


def pod(name: str = "pod", namespace: str = "ns", *containers: pb.ContainerResources) -> pb.PodResources:
    return pb.PodResources(name=name, namespace=namespace, containers=containers)


def container(
    name: str,
    devices: dict[str, list[str]] | None = None,
    claims: dict[str, list[str]] | None = None,
    cpus: tuple[int, ...] = (),
    memory: tuple[tuple[int, tuple[int, ...]], ...] = (),
) -> pb.ContainerResources:
    """`devices`: ids by resource; `claims`: CDI names by claim; `memory`: (bytes, NUMA nodes)."""
    return pb.ContainerResources(
        name=name,
        devices=[
            pb.ContainerDevices(resource_name=resource, device_ids=ids) for resource, ids in (devices or {}).items()
        ],
        dynamic_resources=[
            pb.DynamicResource(
                claim_name=claim,
                claim_namespace="ns",
                claim_resources=[pb.ClaimResource(cdi_devices=[pb.CDIDevice(name=each) for each in names])],
            )
            for claim, names in (claims or {}).items()
        ],
        cpu_ids=cpus,
        memory=[
            pb.ContainerMemory(
                memory_type="memory",
                size=size,
                topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in nodes]),
            )
            for size, nodes in memory
        ],
    )
