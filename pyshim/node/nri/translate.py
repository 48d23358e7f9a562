"""Translates NRI's messages to the plugin's nouns and back. Protobuf ends here."""

from collections.abc import Mapping

from protos.nri import v1alpha1_pb2 as pb
from pyshim.model.host_facts import cpu_set, cpuset_text
from pyshim.model.sizing import PlacementRequest, whole_cpus
from pyshim.node.nri.pods import CpuSet, NriContainer, NriPod

EVENTS = (
    pb.RUN_POD_SANDBOX,
    pb.STOP_POD_SANDBOX,
    pb.REMOVE_POD_SANDBOX,
    pb.CREATE_CONTAINER,
    pb.POST_CREATE_CONTAINER,
    pb.UPDATE_CONTAINER,
    pb.STOP_CONTAINER,
    pb.REMOVE_CONTAINER,
)
"""The events to which the plugin subscribes. A runtime refuses a plugin that names an unknown event."""
_VERSION = "v0.12.0"
"""The release of NRI whose messages this file reads. Runtimes log it."""
OURS = "io.pyshim.nri/cpus"
"""Annotation of a container that was made while the plugin ran and had no CPUs of its own."""
_ALIVE = (pb.CONTAINER_CREATED, pb.CONTAINER_PAUSED, pb.CONTAINER_RUNNING)


def registration(name: str, index: str) -> bytes:
    return pb.RegisterPluginRequest(plugin_name=name, plugin_idx=index, NRI_version=_VERSION).SerializeToString()


def runtime(payload: bytes) -> dict[str, object]:
    """The runtime that sends this Configure request, as fields of a log line.

    It closes a plugin that has not answered within `request_timeout_s` seconds.
    """
    message = pb.ConfigureRequest.FromString(payload)
    return {
        "runtime": f"{message.runtime_name} {message.runtime_version}",
        "nri": message.NRI_version or "?",
        "request_timeout_s": message.request_timeout / 1000,
    }


def configured() -> bytes:
    return pb.ConfigureResponse(events=sum(1 << (event - 1) for event in EVENTS)).SerializeToString()


def inventory(payload: bytes) -> tuple[tuple[NriPod, ...], tuple[NriContainer, ...], bool]:
    """Pods and containers of a Synchronize request, and whether more of them follow. Raises InvalidArgument."""
    message = pb.SynchronizeRequest.FromString(payload)
    parents = {each.id: each.linux.cgroup_parent for each in message.pods}
    containers = tuple(
        _container(each, parents.get(each.pod_sandbox_id, "")) for each in message.containers if each.state in _ALIVE
    )
    return tuple(map(_pod, message.pods)), containers, message.more


def synchronized(more: bool) -> bytes:
    return pb.SynchronizeResponse(more=more).SerializeToString()


def pod_of(payload: bytes) -> NriPod:
    return _pod(pb.PodRequest.FromString(payload).pod)


def container_of(payload: bytes) -> tuple[NriPod, NriContainer]:
    """Raises InvalidArgument."""
    message = pb.ContainerRequest.FromString(payload)
    return _pod(message.pod), _container(message.container, message.pod.linux.cgroup_parent)


def wanted_update(payload: bytes) -> tuple[str, CpuSet]:
    """The container of an UpdateContainer request, and the CPUs in it. Raises InvalidArgument."""
    message = pb.UpdateContainerRequest.FromString(payload)
    return message.container.id, _cpu_set(message.linux_resources.cpu)


def state_change(payload: bytes) -> tuple[str, bytes]:
    """The method by which newer runtimes report the event (empty: unknown), and that method's request."""
    message = pb.StateChangeEvent.FromString(payload)
    method = _METHODS.get(message.event, "")
    request = pb.ContainerRequest(container=message.container)
    request.pod.CopyFrom(message.pod)
    return method, request.SerializeToString()


_METHODS = {
    pb.RUN_POD_SANDBOX: "RunPodSandbox",
    pb.STOP_POD_SANDBOX: "StopPodSandbox",
    pb.REMOVE_POD_SANDBOX: "RemovePodSandbox",
    pb.POST_CREATE_CONTAINER: "PostCreateContainer",
    pb.REMOVE_CONTAINER: "RemoveContainer",
}


def adjusted(wanted: CpuSet | None, mark: bool, rdt_class: str = "") -> bytes:
    """The reply to CreateContainer. An empty class leaves the container's as it is."""
    reply = pb.CreateContainerResponse()
    if wanted is not None:
        reply.adjust.linux.resources.cpu.CopyFrom(_linux_cpu(wanted))
    if mark:
        reply.adjust.annotations[OURS] = "shared"
    if rdt_class:
        reply.adjust.linux.resources.rdt_class.value = rdt_class
    return reply.SerializeToString()


def updated(container_id: str, wanted: CpuSet | None) -> bytes:
    """The reply to UpdateContainer: the last of its updates is the container's own."""
    updates = [] if wanted is None else [_update(container_id, wanted)]
    return pb.UpdateContainerResponse(update=updates).SerializeToString()


def updates(wanted: Mapping[str, CpuSet]) -> bytes:
    """The request of UpdateContainers."""
    return pb.UpdateContainersRequest(update=[_update(*each) for each in wanted.items()]).SerializeToString()


def failed(payload: bytes) -> tuple[str, ...]:
    """The containers that UpdateContainers could not change."""
    return tuple(each.container_id for each in pb.UpdateContainersResponse.FromString(payload).failed)


def _pod(message: pb.PodSandbox) -> NriPod:
    name = f"{message.namespace}/{message.name}"
    resources, overhead = message.linux.pod_resources, message.linux.pod_overhead
    whole = _whole_cpus(resources.cpu, message.linux.cgroup_parent)
    quota, period = resources.cpu.quota.value, resources.cpu.period.value
    need = PlacementRequest(
        sandbox_id=message.id,
        name=name,
        vcpus=max(1, -(-quota // period)) if quota > 0 and period > 0 else 1,
        memory_bytes=max(0, resources.memory.limit.value) + max(0, overhead.memory.limit.value),
        exclusive=whole > 0,
    )
    return NriPod(id=message.id, name=name, handler=message.runtime_handler, need=need)


def _container(message: pb.Container, cgroup_parent: str) -> NriContainer:
    resources = message.linux.resources
    return NriContainer(
        id=message.id,
        pod_id=message.pod_sandbox_id,
        name=message.name,
        memory_bytes=max(0, resources.memory.limit.value),
        reported=_cpu_set(resources.cpu),
        is_ours=OURS in message.annotations,
        whole_cpus=_whole_cpus(resources.cpu, cgroup_parent),
        rdt_class=message.linux.rdt.clos_id.value or resources.rdt_class.value,
    )


def _whole_cpus(cpu: pb.LinuxCPU, cgroup_parent: str) -> int:
    return whole_cpus(
        shares=cpu.shares.value, quota=cpu.quota.value, period=cpu.period.value, cgroup_parent=cgroup_parent
    )


def _cpu_set(cpu: pb.LinuxCPU) -> CpuSet:
    cpus, nodes = cpu_set(cpu.cpus, "cpuset.cpus of a container"), cpu_set(cpu.mems, "cpuset.mems of a container")
    return CpuSet(cpus=tuple(sorted(cpus)), nodes=tuple(sorted(nodes)))


def _update(container_id: str, wanted: CpuSet) -> pb.ContainerUpdate:
    message = pb.ContainerUpdate(container_id=container_id)
    message.linux.resources.cpu.CopyFrom(_linux_cpu(wanted))
    return message


def _linux_cpu(wanted: CpuSet) -> pb.LinuxCPU:
    return pb.LinuxCPU(cpus=cpuset_text(wanted.cpus), mems=cpuset_text(wanted.nodes))
