"""The answer to a DeviceQuestion."""

from collections.abc import Callable

from pyshim.cdi import Cache, CdiError, ContainerEdits, InvalidName, UnresolvedDevices, parse_annotations
from pyshim.model.devices import (
    VFIO_DIR,
    DeviceQuestion,
    DeviceRequest,
    FoundDevice,
    PodDevices,
    PodResources,
    VfioNode,
    is_vfio_node,
)
from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound
from pyshim.resources.devices.host.vfio import vfio_node

Ask = Callable[[str, str, str], PodResources]
"""Asks the kubelet at a socket for the pod of this name and namespace."""


def find_devices(
    question: DeviceQuestion,
    *,
    cache: Cache | None = None,
    look_at: Callable[[str], VfioNode] = vfio_node,
    ask: Ask,
) -> PodDevices:
    """Every device of the question. Raises a ShimError; names without a spec are all named by one NotFound."""
    asked = PodResources()
    if question.kubelet_socket:
        asked = ask(question.kubelet_socket, question.pod_name, question.pod_namespace)
    requests = merged((*asked.requests, *_annotated(question)))
    if question.names_only:
        found = [FoundDevice(request=request, nodes=()) for request in requests]
    else:
        found = _resolved(requests, cache or Cache(), look_at)
        known = {node.path for device in found for node in device.nodes}
        from_spec = DeviceRequest(name="", origin="spec")
        found += [
            FoundDevice(request=from_spec, nodes=(look_at(path),)) for path in question.nodes if path not in known
        ]
    return PodDevices(devices=tuple(found), cpu_ids=asked.cpu_ids, memory=asked.memory)


def _annotated(question: DeviceQuestion) -> tuple[DeviceRequest, ...]:
    try:
        names = parse_annotations(question.annotations)[1]
    except InvalidName as error:
        raise InvalidArgument(str(error)) from error
    return tuple(DeviceRequest(name=name, origin="annotation") for name in names)


def merged(requests: tuple[DeviceRequest, ...]) -> tuple[DeviceRequest, ...]:
    """Each device of each container once, the first origin counting; one that a container has is not the pod's, too."""
    by_key: dict[tuple[str, str], DeviceRequest] = {}
    for request in requests:
        by_key.setdefault((request.container, request.name), request)
    owned = {name for container, name in by_key if container}
    return tuple(each for each in by_key.values() if each.container or each.name not in owned)


def _resolved(
    requests: tuple[DeviceRequest, ...], cache: Cache, look_at: Callable[[str], VfioNode]
) -> list[FoundDevice]:
    try:
        cache.find(request.name for request in requests)
        all_edits = [(request, cache.edits([request.name])) for request in requests]
    except UnresolvedDevices as error:
        origins = {request.name: request.origin for request in requests}
        asked = ", ".join(f"'{name}' by {origins[name]}" for name in error.devices)
        raise NotFound(f"{error} (asked for: {asked})") from error
    except CdiError as error:
        raise FailedPrecondition(str(error)) from error
    looked: dict[str, VfioNode] = {}
    found = []
    for request, edits in all_edits:
        paths = [node.host_path or node.path for node in edits.device_nodes]
        for path in filter(is_vfio_node, paths):
            if path not in looked:
                looked[path] = look_at(path)
        nodes = tuple(looked[path] for path in dict.fromkeys(paths) if path in looked)
        found.append(FoundDevice(request=request, nodes=nodes, env=edits.env, left_out=_left_out(edits)))
    return found


def _left_out(edits: ContainerEdits) -> tuple[str, ...]:
    """The edits beside VFIO nodes and variables: libraries, hooks and nodes of a driver of this host."""
    paths = [node.host_path or node.path for node in edits.device_nodes]
    return (
        *(f"node {path}" for path in paths if not path.startswith(VFIO_DIR)),
        *(f"mount {mount.container_path}" for mount in edits.mounts),
        *(f"hook {hook.hook_name} {hook.path}" for hook in edits.hooks),
        *(f"network device {device.host_interface_name}" for device in edits.net_devices),
        *(f"group {gid}" for gid in edits.additional_gids),
        *(["intelRdt"] if edits.intel_rdt else []),
    )
