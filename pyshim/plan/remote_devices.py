"""Devices of a pod whose VM is elsewhere: no device of this host, but a claim on what the instance must have. Pure.

What device plugins, DRA claims and annotations gave the pod becomes the number of GPUs and the list of claims that the
instance is chosen by, and for each container names of the remote guest's own CDI specs: its share instead of all.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyshim.model.devices import DeviceRequest, PodDevices
from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.plan.devices import CDI_PREFIX

PREFIX = "io.katacontainers.config.hypervisor."
CLAIMS_KEY = "io.pyshim.device-claims"
"""JSON: [{"container", "device", "origin"}, ...], in the order of their indices."""
GPU_KINDS = ("nvidia.com/gpu", "amd.com/gpu", "intel.com/gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDevices:
    annotations: Mapping[str, str]
    """What CreateVM is told beside the rest: default_gpus, default_gpu_model and the claims."""
    inner: Mapping[str, Mapping[str, str]]
    """CDI annotations of each container, by its name in the pod; under the empty name those of a container alone."""


def remote_devices(found: PodDevices, kinds: Sequence[str], *, gpus: int = 0, gpu_model: str = "") -> RemoteDevices:
    """The remote side of `found`. `kinds` is `vfio_device_kinds`; `gpus` and `gpu_model` are what the pod's annotations
    ask for, and hold for what no device says.

    A device that two containers have (a shared claim) is one. Raises Unimplemented naming every device that no remote
    guest can have, InvalidArgument when the annotations ask for fewer GPUs than the pod was given.
    """
    requests = [device.request for device in found.devices]
    by_kind = [(_guest_kind(request, kinds), request) for request in requests]
    foreign = [f"'{request.name}' by {request.origin}" for kind, request in by_kind if kind not in GPU_KINDS]
    if foreign:
        raise Unimplemented(f"give devices to a remote vm: {', '.join(foreign)}: only GPUs can be asked for there")
    index: dict[str, str] = {}
    counts: dict[str, int] = {}
    for kind, request in by_kind:
        if request.name not in index:
            index[request.name] = f"{kind}={counts.get(kind, 0)}"
            counts[kind] = counts.get(kind, 0) + 1
    given = sum(counts.values())
    if gpus and gpus < given:
        raise InvalidArgument(f"read annotation '{PREFIX}default_gpus': {gpus}, and the pod was given {given} GPUs")
    return RemoteDevices(
        annotations={
            f"{PREFIX}default_gpus": str(max(gpus, given)),
            f"{PREFIX}default_gpu_model": gpu_model,
            CLAIMS_KEY: json.dumps([_claim(request) for request in requests]) if requests else "",
        },
        inner=_inner(requests, index),
    )


def _guest_kind(request: DeviceRequest, kinds: Sequence[str]) -> str:
    host_kind = request.name.partition("=")[0]
    rows = (row.partition("=") for row in kinds)
    return next((kind for match, _, kind in rows if match == host_kind), host_kind)


def _claim(request: DeviceRequest) -> dict[str, str]:
    return {"container": request.container, "device": request.name, "origin": request.origin}


def _inner(requests: Sequence[DeviceRequest], index: Mapping[str, str]) -> dict[str, dict[str, str]]:
    inner: dict[str, dict[str, str]] = {}
    for request in requests:
        name = index[request.name]
        number = list(index).index(request.name)
        inner.setdefault(request.container, {})[f"{CDI_PREFIX}device{number}"] = name
    return inner
