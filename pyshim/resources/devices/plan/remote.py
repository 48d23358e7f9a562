"""Devices of a pod whose VM is remote: requirements on the instance instead of devices of this host. Pure.

What device plugins, DRA claims and annotations gave the pod becomes the number of GPUs and the list of claims that the
instance is chosen by, and for each container names of the remote guest's own CDI specs: its share instead of all.
"""

import json
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from pyshim.model.config import HYPERVISOR_PREFIX
from pyshim.model.devices import PodDevices
from pyshim.model.errors import FailedPrecondition, InvalidArgument, Unimplemented
from pyshim.model.guest import GuestContainer
from pyshim.resources.devices.plan.devices import CDI_PREFIX, named_kind

GPUS_KEY = f"{HYPERVISOR_PREFIX}default_gpus"
CLAIMS_KEY = "io.pyshim.device-claims"
"""JSON: [{"container", "device", "origin"}, ...], in the order of their indices."""
_ALL = "=all"
GPU_KINDS = ("nvidia.com/gpu", "amd.com/gpu", "intel.com/gpu")


class RemoteDevices(msgspec.Struct, frozen=True, kw_only=True):
    annotations: Mapping[str, str]
    """Those of CreateVM that describe devices: default_gpus, default_gpu_model and the claims."""
    names: Mapping[str, str]
    """The guest's name of each device of the pod: `<kind>=<index>`, by the name it has here."""


def remote_devices(found: PodDevices, kinds: Sequence[str], *, gpus: int = 0, gpu_model: str = "") -> RemoteDevices:
    """The remote side of `found`. `kinds` is `vfio_device_kinds`; `gpus` and `gpu_model` are what the pod's annotations
    ask for, and hold for what no device says: `all` devices of a kind say nothing of their number, and the model is
    what `kinds` has for the kind of a device, if anything.

    A device that two containers have (a shared claim) is one. Raises Unimplemented naming every device that no remote
    guest can have, InvalidArgument for GPUs that no single instance has, and when fewer are asked for than were given.
    """
    requests = [device.request for device in found.devices]
    rows = [named_kind(request.name.partition("=")[0], kinds) for request in requests]
    by_kind = [(kind, request) for (kind, _), request in zip(rows, requests, strict=True)]
    foreign = [f"'{request.name}' by {request.origin}" for kind, request in by_kind if kind not in GPU_KINDS]
    if foreign:
        raise Unimplemented(f"give devices to a remote vm: {', '.join(foreign)}: only GPUs can be asked for there")
    if len({kind for kind, _ in by_kind}) > 1:
        named = ", ".join(sorted({kind for kind, _ in by_kind}))
        raise InvalidArgument(f"give devices to a remote vm: {named}: an instance has GPUs of one vendor")
    names: dict[str, str] = {}
    given = 0
    for kind, request in by_kind:
        if request.name.endswith(_ALL):
            names[request.name] = f"{kind}{_ALL}"
        elif request.name not in names:
            names[request.name] = f"{kind}={given}"
            given += 1
    if gpus and gpus < given:
        raise InvalidArgument(f"read annotation '{GPUS_KEY}': {gpus}, and the pod was given {given} GPUs")
    claims = [{"container": each.container, "device": each.name, "origin": each.origin} for each in requests]
    return RemoteDevices(
        annotations={
            GPUS_KEY: str(max(gpus, given)),
            f"{HYPERVISOR_PREFIX}default_gpu_model": gpu_model or _model({model for _, model in rows if model}),
            CLAIMS_KEY: json.dumps(claims) if claims else "",
        },
        names=names,
    )


def _model(models: set[str]) -> str:
    if len(models) > 1:
        named = ", ".join(sorted(models))
        raise InvalidArgument(f"give devices to a remote vm: {named}: an instance has GPUs of one model")
    return "".join(models)


def own_names(known: PodDevices, names: Mapping[str, str], container: str, asked: PodDevices) -> tuple[str, ...]:
    """The guest's names of one container's devices: those given to it by its name in the pod, and `asked`, which
    its own annotations name.

    Raises FailedPrecondition naming what the VM was not made with.
    """
    given = [each.request.name for each in known.devices if container and each.request.container == container]
    wanted = [each.request.name for each in asked.devices]
    unknown = [f"'{name}'" for name in wanted if name not in names]
    if unknown:
        raise FailedPrecondition(
            f"give devices to a remote vm: {', '.join(unknown)}: the vm was made without (hint: the pod's own"
            " annotations name what its vm has)"
        )
    return tuple(names[name] for name in dict.fromkeys((*given, *wanted)))


def with_names(guest: GuestContainer, inner: Sequence[str]) -> GuestContainer:
    """`guest`, to be given devices by the guest's own specs."""
    annotations = {f"{CDI_PREFIX}device{number}": name for number, name in enumerate(inner)}
    if not annotations:
        return guest
    return replace(guest, spec={**guest.spec, "annotations": {**(guest.spec.get("annotations") or {}), **annotations}})


def without_gpu_count(guest: GuestContainer, known: PodDevices) -> GuestContainer:
    """`guest` without the annotation `default_gpus`, if that would give it GPUs of other containers.

    The cloud adaptor's proxy adds `cdi.k8s.io/peer-pods: nvidia.com/gpu=all` to every container that has the annotation
    with any value, "0" included. The annotation stays if it is the only source of the pod's number of GPUs: the
    container of each GPU is then unknown.
    """
    annotations = dict(guest.spec.get("annotations") or {})
    count = annotations.pop(GPUS_KEY, None)
    if count is None or not (known.devices or _is_zero(count)):
        return guest
    return replace(guest, spec={**guest.spec, "annotations": annotations})


def _is_zero(count: str) -> bool:
    return not count.strip().strip("+-0")
