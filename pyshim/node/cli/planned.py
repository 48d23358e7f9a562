"""Plans of sandboxes and containers for a dry run.

The plans are those that a shim carries out, made by the same functions from the same facts of this host. Facts
that only a running containerd, kubelet or CNI has are left out and named.
"""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from hypervisors.qemu.cmdline import check_config, qemu_argv
from hypervisors.qemu.devices import is_image_pmem
from pyshim.config.load import load_config
from pyshim.host.os_errors import os_errors
from pyshim.model.confidential import Tee, TeeFacts
from pyshim.model.config import Config
from pyshim.model.devices import PodDevices
from pyshim.model.host_facts import UNBOUNDED_CPUS, CapacityFacts, CgroupLimits, CgroupMode, HostFacts
from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.oci import MAX_SPEC_BYTES, ContainerKind, OciSpec, membership, parse_spec
from pyshim.model.places import VM_ROOT
from pyshim.model.plans import ContainerPlan, SandboxPlan
from pyshim.model.task import RuntimeOptions
from pyshim.model.volumes import SourceFacts
from pyshim.node.cli.inputs import read_limited
from pyshim.node.kubernetes.manifest import PodManifest, overhead_of, pod_sizing, pods_in, read_documents
from pyshim.node.kubernetes.pod_config import PASSED_ON
from pyshim.pod.plan.container import container_plan
from pyshim.pod.plan.placed import with_guest_nodes
from pyshim.pod.plan.sandbox import sandbox_plan
from pyshim.resources.devices.plan.instances import MAX_BYTES, InstanceTable, read_instances
from pyshim.resources.machine import read_machine
from pyshim.resources.probe import probe_host
from pyshim.resources.sizing.host import probe_capacity
from pyshim.resources.sizing.plan.capacity import capacity_question
from pyshim.resources.volumes.host.sources import source_facts
from pyshim.resources.volumes.plan.share import share_plan
from pyshim.resources.volumes.plan.volumes import vhost_user_store, volume_sources

_UUID = "00000000-0000-4000-8000-000000000000"
"""An example: each VM gets a random one."""
_FIRST_GUEST_CID = 3
"""An example: the shim chooses a free one. Smaller ones mean the host. Source: vsock(7)."""
_LEFT_OUT = (
    "network cards: they come from the pod's network namespace",
    "devices of the kubelet's PodResources and of CDI: the kubelet is not asked",
)
_CLAIMS = "devices of the pod's claims, and the type of its VM: the scheduler chooses them (hint: --claimed)"
_NO_DEVICES = PodDevices()
_ABLE_HOST = HostFacts(
    cpu_count=UNBOUNDED_CPUS,
    memory_mib=0,
    kvm_usable=True,
    kvm_reason="",
    vhost_vsock=True,
    vhost_net=True,
    nested=False,
    cgroup_mode=CgroupMode.V2,
    systemd=True,
    tee=TeeFacts(available=frozenset(Tee), probed=(), quote_socket=""),
)
_ROOM = CapacityFacts(
    available_mib=None,
    swap_free_mib=0,
    backing=None,
    cgroup=CgroupLimits(memory_bytes=None, memory_path="", cpu_quota=None, cpu_path=""),
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plans for a pod, a container, or both."""

    title: str
    config: Config
    sandbox: SandboxPlan | None = None
    argv: tuple[str, ...] = ()
    """Empty for a remote VM."""
    container: ContainerPlan | None = None
    left_out: tuple[str, ...] = _LEFT_OUT


def of_bundle(bundle: str, options: RuntimeOptions | None, devices: PodDevices) -> Plan:
    """The plan that Create of this bundle makes, without the root file system, which containerd names in its call."""
    bundle = os.path.realpath(bundle)
    where = f"{bundle}/config.json"
    spec = parse_spec(read_limited(where, MAX_SPEC_BYTES), where)
    container_id = ContainerId(os.path.basename(bundle))
    member = membership(spec.annotations, container_id)
    config = load_config(options, spec.annotations, dict(os.environ))
    has_vm = member.kind is not ContainerKind.POD_CONTAINER
    sandbox = _sandbox(member.sandbox_id, member.kind, spec, config, devices) if has_vm else None
    container = None
    if member.kind is not ContainerKind.POD_SANDBOX:
        vm_dir = f"{VM_ROOT}/{member.sandbox_id}"
        container = container_plan(
            container_id=container_id,
            bundle=HostPath(bundle),
            rootfs=(),
            spec=spec,
            config=config,
            share=sandbox.share if sandbox else share_plan(member.sandbox_id, config, vm_dir=vm_dir),
            sources=_volume_facts(spec, config),
            hostname=spec.hostname,
            sysctls=sandbox.sysctls if sandbox else {},
            terminal=spec.terminal,
        )
    return Plan(
        title=f"{member.kind.value} '{container_id}'",
        config=config,
        sandbox=sandbox,
        argv=_argv(sandbox) if sandbox else (),
        container=container,
        left_out=(*_LEFT_OUT, "the root file system's mounts: they come with the Create call"),
    )


def of_manifest(path: str, options: RuntimeOptions | None, devices: PodDevices) -> list[Plan]:
    """The sandbox of each pod. Its containers' mounts are left out: the kubelet makes them."""
    documents = read_documents(path)
    return [_of_pod(manifest, path, documents, options, devices) for manifest in pods_in(documents, path)]


def _of_pod(
    manifest: PodManifest,
    path: str,
    documents: list[Mapping[str, Any]],
    options: RuntimeOptions | None,
    devices: PodDevices,
) -> Plan:
    sizing = pod_sizing(manifest, path, overhead_of(documents, manifest.runtime_class, path))
    annotations = {
        **{name: text for name, text in manifest.annotations.items() if name.startswith(PASSED_ON)},
        **sizing.sandbox_annotations(),
        "io.kubernetes.cri.container-type": "sandbox",
    }
    spec = _pod_spec(annotations, path, of_host=str(manifest.spec.get("hostNetwork")).lower() == "true")
    config = load_config(options, annotations, dict(os.environ))
    sandbox = _sandbox(SandboxId("pod"), ContainerKind.POD_SANDBOX, spec, config, devices)
    of_claims = (_CLAIMS,) if manifest.spec.get("resourceClaims") and not devices.devices else ()
    return Plan(
        title=manifest.title,
        config=config,
        sandbox=sandbox,
        argv=_argv(sandbox),
        left_out=(*_LEFT_OUT, *of_claims, "containers and their volumes: the kubelet makes them; plan their bundles"),
    )


def plan_empty_pod(config: Config, *, on_another_host: bool) -> None:
    """A pod without containers can be planned with `config`. Raises the ShimError of a refusal.

    With `on_another_host`, the host has every feature and enough memory.
    """
    _argv(empty_pod(config, (_ABLE_HOST, _ROOM) if on_another_host else None))


def empty_pod(config: Config, host: tuple[HostFacts, CapacityFacts] | None = None) -> SandboxPlan:
    """The sandbox, on this host or `host`, of a pod without containers and annotations."""
    spec = _pod_spec({}, "an empty pod", of_host=False)
    return _sandbox(SandboxId("pod"), ContainerKind.POD_SANDBOX, spec, config, host=host)


def _pod_spec(annotations: Mapping[str, str], where: str, *, of_host: bool) -> OciSpec:
    """The spec of a sandbox as a container runtime writes it, `of_host` with the host's network."""
    network = [] if of_host else [{"type": "network"}]
    document = {
        "ociVersion": "1.1.0",
        "process": {"args": ["/pause"], "cwd": "/"},
        "root": {"path": "rootfs"},
        "annotations": annotations,
        "linux": {"namespaces": [{"type": "mount"}, *network]},
    }
    return parse_spec(msgspec.json.encode(document), where)


def _sandbox(
    sandbox_id: SandboxId,
    kind: ContainerKind,
    spec: OciSpec,
    config: Config,
    devices: PodDevices = _NO_DEVICES,
    host: tuple[HostFacts, CapacityFacts] | None = None,
) -> SandboxPlan:
    """The plan for `host`; without it for this host, with its NUMA nodes and instance types."""
    facts, capacity = host or _this_host(spec, config)
    plan = sandbox_plan(
        sandbox_id=sandbox_id,
        kind=kind,
        uuid=_UUID,
        spec=spec,
        config=config,
        host=facts,
        capacity=capacity,
        sources=_volume_facts(spec, config),
        devices=devices,
        instances=None if host else _instances(config),
    )
    has_nodes = config.hypervisor.enable_numa and not config.is_remote and not host
    return with_guest_nodes(plan, read_machine()) if has_nodes else plan


def _this_host(spec: OciSpec, config: Config) -> tuple[HostFacts, CapacityFacts]:
    facts = probe_host()
    return facts, probe_capacity(capacity_question(config, spec.cgroups_path), cgroup_mode=facts.cgroup_mode)


def _instances(config: Config) -> InstanceTable | None:
    path = config.runtime.instance_types
    if not config.is_remote or not path:
        return None
    with os_errors(f"read instance types '{path}'"):
        return read_instances(read_limited(path, MAX_BYTES), path)


def _volume_facts(spec: OciSpec, config: Config) -> Mapping[str, SourceFacts]:
    store = vhost_user_store(config.hypervisor)
    return {path: source_facts(path, store) for path in volume_sources(spec)}


def _argv(plan: SandboxPlan) -> tuple[str, ...]:
    """QEMU's command line. Descriptors, the CID and the size of a missing image are examples: only a running shim has
    the real ones."""
    if plan.config.is_remote:
        return ()
    check_config(plan.vm)
    image_bytes = 0
    if is_image_pmem(plan.vm) and plan.vm.boot.image and os.path.exists(plan.vm.boot.image):
        image_bytes = os.path.getsize(plan.vm.boot.image)
    return qemu_argv(plan.vm, guest_cid=_FIRST_GUEST_CID, image_bytes=image_bytes)
