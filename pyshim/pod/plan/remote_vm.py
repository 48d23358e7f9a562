"""The request to the service that makes a remote VM. Pure.

The protocol describes a VM by annotations only. Their keys are Kata's. A cloud adaptor chooses the instance by
`machine_type` if it is set, else by GPUs, vCPUs and memory, else by its own default.
"""

from collections.abc import Mapping

from pyshim.model.confidential import Initdata
from pyshim.model.config import HYPERVISOR_PREFIX, Config
from pyshim.model.devices import PodDevices
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.ids import SandboxId
from pyshim.model.oci import ANNOTATION_KEYS, Caller, OciSpec, pod_of
from pyshim.model.remote_vms import RemoteServiceConfig
from pyshim.model.sizing import SizingRecord
from pyshim.model.vm import MemorySize, RemoteVm, VcpuCount
from pyshim.resources.devices.plan.devices import check_kind_table
from pyshim.resources.devices.plan.remote import remote_devices

NO_NETNS = "/proc/0/ns/net"
"""A path that means a new namespace."""
_NO_POD_NAMESPACE = "default"
LEAST_STOP_TIMEOUT_S = 600.0
"""A short `remote_hypervisor_timeout` is meant for the start. Deleting an instance may take longer."""
_MARGIN_S = 90.0
"""Added to the driver's deadlines: an answer may be late, and the service may restart."""


def remote_netns_path(spec: OciSpec) -> str | None:
    """The pod's network namespace, which the service connects to the VM; None if the service makes a new one.

    Raises FailedPrecondition for a pod in the host's network.
    """
    path = spec.namespace_path("network")
    if path is None:
        raise FailedPrecondition("start remote vm: a remote vm cannot join the host's network")
    return None if path in ("", NO_NETNS) else path


def remote_vm(
    *,
    sandbox_id: SandboxId,
    uuid: str,
    vm_dir: str,
    spec: OciSpec,
    config: Config,
    sizing: SizingRecord,
    netns_path: str | None,
    initdata: Initdata | None,
    devices: PodDevices,
) -> RemoteVm:
    """The VM. Raises InvalidArgument naming key and file; Unimplemented for devices that remote guests cannot have."""
    service = _service(
        config, {**_annotations(sandbox_id, spec, config, sizing, initdata), **_device_annotations(config, devices)}
    )
    most_s = service.timeout_s + service.stop_timeout_s + _MARGIN_S
    vcpus, memory_mib = sizing.vcpus.granted, sizing.memory_mib.granted
    return RemoteVm(
        sandbox_id=sandbox_id,
        uuid=uuid,
        vm_dir=vm_dir,
        machine_type=config.hypervisor.machine_type,
        cpu=VcpuCount(boot_vcpus=vcpus, max_vcpus=vcpus),
        memory=MemorySize(boot_mib=memory_mib, max_mib=memory_mib),
        netns_path=netns_path,
        service=service,
        # The driver has a deadline for each call, and acts after one that has passed.
        start_timeout_s=most_s,
        stop_timeout_s=most_s,
    )


def _service(config: Config, annotations: Mapping[str, str]) -> RemoteServiceConfig:
    hypervisor = config.hypervisor
    path, timeout_s = hypervisor.remote_hypervisor_socket, hypervisor.remote_hypervisor_timeout_s
    if not path.startswith("/"):
        raise InvalidArgument(f"read remote_hypervisor_socket in '{config.source}': {path!r} is not an absolute path")
    return RemoteServiceConfig(
        socket_path=path,
        annotations=annotations,
        timeout_s=timeout_s,
        stop_timeout_s=max(timeout_s, LEAST_STOP_TIMEOUT_S),
    )


def _annotations(
    sandbox_id: SandboxId, spec: OciSpec, config: Config, sizing: SizingRecord, initdata: Initdata | None
) -> dict[str, str]:
    """The annotations that are not about devices. As with Kata, every key is present, some with an empty value."""
    hypervisor, keys = config.hypervisor, ANNOTATION_KEYS[Caller.CONTAINERD]
    pod = pod_of(spec.annotations)
    # A container without a pod gets names, too: cloud adaptors refuse a VM without.
    annotations = {
        keys.pod_name: pod.name or sandbox_id,
        keys.pod_namespace: pod.namespace or _NO_POD_NAMESPACE,
        f"{HYPERVISOR_PREFIX}machine_type": hypervisor.machine_type,
        f"{HYPERVISOR_PREFIX}image": hypervisor.image,
        # A whole number, since cloud adaptors ignore "1.5".
        f"{HYPERVISOR_PREFIX}default_vcpus": str(sizing.vcpus.granted),
        f"{HYPERVISOR_PREFIX}default_memory": str(sizing.memory_mib.granted),
        f"{HYPERVISOR_PREFIX}cc_init_data": initdata.document.decode() if initdata else "",
    }
    return {**annotations, keys.pod_uid: pod.uid} if pod.uid else annotations


def _device_annotations(config: Config, devices: PodDevices) -> Mapping[str, str]:
    """Number and model of GPUs, and the container of each. Empty values only under Kata's own keys."""
    hypervisor = config.hypervisor
    check_kind_table(config.runtime.vfio_device_kinds, config.source)
    found = remote_devices(
        devices, config.runtime.vfio_device_kinds, gpus=hypervisor.default_gpus, gpu_model=hypervisor.default_gpu_model
    )
    return {key: value for key, value in found.annotations.items() if value or key.startswith(HYPERVISOR_PREFIX)}
