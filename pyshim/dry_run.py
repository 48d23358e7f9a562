"""The plan of a sandbox as a shim of this host would make it, without a caller and without touching anything.

`pyshim plan` shows it, and a template is made for the VM of an empty pod (`template_maker.py`).
"""

from collections.abc import Mapping

import msgspec

from pyshim.host.os_errors import os_errors
from pyshim.model.config import Config
from pyshim.model.devices import PodDevices
from pyshim.model.host_facts import CapacityFacts, HostFacts
from pyshim.model.ids import SandboxId
from pyshim.model.oci import ContainerKind, OciSpec, parse_spec
from pyshim.model.plans import SandboxPlan
from pyshim.model.volumes import SourceFacts
from pyshim.pod.plan.placement import with_guest_nodes
from pyshim.pod.plan.sandbox import sandbox_plan
from pyshim.resources.devices.plan.instances import MAX_BYTES, InstanceTable, read_instances
from pyshim.resources.machine import read_machine
from pyshim.resources.probe import probe_host
from pyshim.resources.sizing.host import probe_capacity
from pyshim.resources.sizing.plan.capacity import capacity_question
from pyshim.resources.volumes.host.sources import source_facts
from pyshim.resources.volumes.plan.volumes import vhost_user_store, volume_sources

_UUID = "00000000-0000-4000-8000-000000000000"
"""An example: each VM gets a random one."""
_NO_DEVICES = PodDevices()


def empty_pod(config: Config, host: tuple[HostFacts, CapacityFacts] | None = None) -> SandboxPlan:
    """The sandbox, on this host or `host`, of a pod without containers and annotations."""
    spec = pod_spec({}, "an empty pod", of_host=False)
    return planned_sandbox(SandboxId("pod"), ContainerKind.POD_SANDBOX, spec, config, host=host)


def pod_spec(annotations: Mapping[str, str], where: str, *, of_host: bool) -> OciSpec:
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


def planned_sandbox(
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
        sources=volume_facts(spec, config),
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
    with os_errors(f"read instance types '{path}'"), open(path, "rb") as file:
        return read_instances(file.read(MAX_BYTES + 1), path)


def volume_facts(spec: OciSpec, config: Config) -> Mapping[str, SourceFacts]:
    store = vhost_user_store(config.hypervisor)
    return {path: source_facts(path, store) for path in volume_sources(spec)}
