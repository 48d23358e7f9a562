"""The planning half of a Create: read what the host has, then plan the sandbox or the container.

Changes nothing, except that `sandbox_request` writes the files of a pod of the Sandbox API into its bundle.
"""

import logging
import posixpath
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument, NotFound, ShimError
from pyshim.model.host_facts import HostFacts
from pyshim.model.ids import ContainerId, HostPath
from pyshim.model.observation import step
from pyshim.model.oci import MAX_SPEC_BYTES, ContainerKind, OciSpec, membership, parse_spec
from pyshim.model.plans import ContainerPlan, SandboxPlan
from pyshim.model.sandbox import CreateSandbox, SandboxRequest
from pyshim.model.seams import Host
from pyshim.model.sizing import SavedPlacement
from pyshim.model.task import CreateTask, RuntimeOptions
from pyshim.model.volumes import Bind
from pyshim.pod.environment import Environment
from pyshim.pod.plan.container import container_plan, hosts_disks
from pyshim.pod.plan.guest_sandbox import dns_lines, resolv_conf
from pyshim.pod.plan.guest_spec import refuse_host_members
from pyshim.pod.plan.placement import placement_request, with_guest_nodes, with_placement
from pyshim.pod.plan.pod_spec import pod_files, pod_spec
from pyshim.pod.plan.sandbox import sandbox_plan
from pyshim.resources.devices.live import log_found
from pyshim.resources.devices.plan.devices import sandbox_question
from pyshim.resources.devices.plan.instances import MAX_BYTES, InstanceTable, read_instances
from pyshim.resources.sizing.plan.capacity import capacity_question
from pyshim.resources.volumes.live import at_present, look_at_layers, volume_facts

log = logging.getLogger(__name__)

HOST_RESOLV_CONF = "/etc/resolv.conf"
MAX_RESOLV_CONF_BYTES = 64 * 1024


async def plan_sandbox(env: Environment, request: SandboxRequest, config: Config) -> tuple[SandboxPlan, HostFacts]:
    """The plan of a new sandbox, and the host facts that it was made from. Raises what `sandbox_plan` raises."""
    spec = request.spec
    facts = await step("probe host", env.host_facts())
    devices = await step("find devices", env.find_devices(sandbox_question(request.kind, spec, config)))
    log_found(devices, request.sandbox_id)
    instances = await _instances(env.host, config)
    plan = sandbox_plan(
        sandbox_id=request.sandbox_id,
        kind=request.kind,
        uuid=env.new_uuid(),
        spec=spec,
        config=config,
        host=facts,
        capacity=await env.capacity(capacity_question(config, spec.cgroups_path)),
        sources=await volume_facts(env.host, spec, config),
        devices=devices,
        instances=instances,
        dns=await _dns(env.host, spec),
    )
    if not config.is_remote:
        await _check_boot_files(env.host, plan)
        plan = await _with_guest_nodes(env, await _place(env, plan, spec))
    return plan, facts


async def _check_boot_files(host: Host, plan: SandboxPlan) -> None:
    """Raises InvalidArgument for a kernel or an initrd of another processor than the VM's."""
    vm = plan.local_vm
    files = {"kernel": vm.boot.kernel, **({"initrd": vm.boot.initrd} if vm.boot.initrd else {})}
    found = await host.boot_architectures(files.values())
    wanted = vm.machine.architecture.name
    for key, path in files.items():
        if found.get(path, "") not in ("", wanted):
            raise InvalidArgument(
                f"start vm: {key} '{path}' in {plan.config.origin(key)} is for {found[path]}, and machine type"
                f" {vm.machine_type} is of {wanted}"
            )


async def _instances(host: Host, config: Config) -> InstanceTable | None:
    """The table that a remote VM's type is chosen from; None without one. Raises InvalidArgument, NotFound."""
    path = config.runtime.instance_types
    if not config.is_remote or not path:
        return None
    return read_instances(await host.read_bytes(path, MAX_BYTES + 1), path)


async def _place(env: Environment, plan: SandboxPlan, spec: OciSpec) -> SandboxPlan:
    """`plan`, with a placement on the host if the configuration names a plugin and the plugin answers."""
    path = plan.config.runtime.placement_socket
    if not path:
        return plan
    request = placement_request(plan, spec)
    try:
        placement = await step("ask for placement", env.ask_placement(path, request))
    except ShimError as error:
        level = logging.DEBUG if isinstance(error, NotFound) else logging.WARNING
        log.log(level, "vm is not placed", extra={"sandbox": plan.sandbox_id, "error": str(error)})
        return plan
    log.info("vm is placed", extra={"sandbox": plan.sandbox_id, "why": placement.why})
    return with_placement(plan, SavedPlacement(request=request, placement=placement))


async def _with_guest_nodes(env: Environment, plan: SandboxPlan) -> SandboxPlan:
    if not plan.config.hypervisor.enable_numa:
        return plan
    try:
        machine = await step("read machine", env.read_machine())
    except ShimError as error:
        log.warning("guest has one NUMA node", extra={"sandbox": plan.sandbox_id, "error": str(error)})
        return plan
    plan = with_guest_nodes(plan, machine)
    log.info("NUMA nodes of guest", extra={"sandbox": plan.sandbox_id, "why": plan.numa_why})
    return plan


async def read_spec(host: Host, bundle: str) -> OciSpec:
    """The bundle's spec. Raises InvalidArgument, NotFound, and Unimplemented for what no guest can have."""
    where = f"{bundle}/config.json"
    spec = parse_spec(await host.read_bytes(where, MAX_SPEC_BYTES), where)
    refuse_host_members(spec, where)
    return spec


async def _dns(host: Host, spec: OciSpec) -> tuple[str, ...]:
    """The lines of the pod's resolv.conf, which the guest itself needs to pull images."""
    path = resolv_conf(spec)
    try:
        return dns_lines(await host.read_bytes(path, MAX_RESOLV_CONF_BYTES)) if path else ()
    except ShimError as error:
        log.warning("no dns for the guest", extra={"error": str(error)})
        return ()


async def plan_container(
    host: Host,
    request: CreateTask,
    spec: OciSpec,
    sandbox: SandboxPlan,
    binds: Sequence[Bind],
    network_sysctls: Mapping[str, str],
) -> ContainerPlan:
    """The plan of a container of `sandbox`, whose containers have `binds`; its network has `network_sysctls`.

    Raises what `look_at_layers` and `container_plan` raise.
    """
    sources = await volume_facts(host, spec, sandbox.config)
    if not sandbox.config.hypervisor.privileged_host_disks and (kept := hosts_disks(spec, sources)):
        paths = [device.path for device in kept]
        log.info("disks of the host stay there", extra={"container": request.container_id, "disks": paths})
    return container_plan(
        container_id=request.container_id,
        bundle=request.bundle,
        rootfs=await look_at_layers(host, request.rootfs),
        spec=spec,
        config=sandbox.config,
        share=sandbox.share,
        sources=sources,
        hostname=spec.hostname or sandbox.guest.hostname,
        sysctls={**network_sysctls, **sandbox.sysctls},
        terminal=request.stdio.terminal,
        stdin=bool(request.stdio.stdin),
        nodes=sandbox.numa,
        bound=await at_present(host, binds),
    )


async def sandbox_request(env: Environment, request: CreateSandbox, options: RuntimeOptions | None) -> SandboxRequest:
    """A pod of the Sandbox API as a spec, which `plan_sandbox` takes; its files are in the bundle.

    Raises InvalidArgument.
    """
    if posixpath.basename(request.bundle) != request.sandbox_id:  # files are written there
        raise InvalidArgument(f"create sandbox '{request.sandbox_id}': bundle '{request.bundle}' has another name")
    pod = request.pod
    if pod is None:
        return await _request_of_bundle(env.host, request, options)
    if not pod.hostname and "network" in pod.host_namespaces:
        pod = replace(pod, hostname=(await env.host_facts()).hostname)
    contents = pod_files(request.sandbox_id, pod, b"" if pod.dns else await _hosts_resolv_conf(env.host))
    files = {path: HostPath(f"{request.bundle}/{posixpath.basename(path)}") for path in contents}
    for path, content in contents.items():
        await env.host.write_bytes(files[path], content, 0o644)
    return SandboxRequest(
        sandbox_id=request.sandbox_id,
        kind=ContainerKind.POD_SANDBOX,
        spec=pod_spec(request, pod, files),
        options=options,
        files=files,
    )


async def _hosts_resolv_conf(host: Host) -> bytes:
    try:
        return await host.read_bytes(HOST_RESOLV_CONF, MAX_RESOLV_CONF_BYTES)
    except NotFound:
        return b""


async def _request_of_bundle(host: Host, request: CreateSandbox, options: RuntimeOptions | None) -> SandboxRequest:
    """The sandbox of a bundle's spec, from `ctr sandboxes run`."""
    action, where = f"create sandbox '{request.sandbox_id}'", f"{request.bundle}/config.json"
    try:
        spec = await read_spec(host, request.bundle)
    except NotFound as exc:
        problem = f"neither options of type 'runtime.v1.PodSandboxConfig' nor '{where}'"
        raise InvalidArgument(f"{action}: {problem}") from exc
    kind = membership(spec.annotations, ContainerId(request.sandbox_id)).kind
    if kind is ContainerKind.POD_CONTAINER:
        raise InvalidArgument(f"{action}: '{where}' is of a container in a pod")
    return SandboxRequest(sandbox_id=request.sandbox_id, kind=kind, spec=spec, options=options)
