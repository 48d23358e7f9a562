"""`pyshim plan BUNDLE|POD.yaml`: what the shim would do for a pod, without touching anything.

The plans are those that a shim carries out, made by the same functions from the same facts of this host. Facts that
only a running containerd, kubelet or CNI has are left out and named.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import click
import msgspec

from hypervisors.qemu.cmdline import check_config, qemu_argv
from hypervisors.qemu.devices import is_image_pmem
from pyshim.config.load import load_config
from pyshim.config.sources import named_file
from pyshim.dry_run import empty_pod, planned_sandbox, pod_spec, volume_facts
from pyshim.model.confidential import Tee, TeeFacts
from pyshim.model.config import Config
from pyshim.model.devices import DeviceRequest, FoundDevice, PodDevices
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import UNBOUNDED_CPUS, CapacityFacts, CgroupLimits, CgroupMode, HostFacts
from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.oci import MAX_SPEC_BYTES, ContainerKind, membership, parse_spec
from pyshim.model.places import VM_ROOT
from pyshim.model.plans import ContainerPlan, SandboxPlan
from pyshim.model.task import RuntimeOptions
from pyshim.model.vm import LocalVm, RemoteVm
from pyshim.model.volumes import HostMount
from pyshim.node.cli.options import read_limited
from pyshim.node.cli.output import config_option, examples, json_option, print_json
from pyshim.node.cli.sizing_text import record_lines
from pyshim.node.kubernetes.manifest import PodManifest, overhead_of, pod_sizing, pods_in, read_documents
from pyshim.node.kubernetes.pod_vm import PASSED_ON
from pyshim.pod.plan.container import container_plan
from pyshim.resources.devices.plan.instances import MOST_OFFERED, VENDOR
from pyshim.resources.sizing.plan.numa import node_text
from pyshim.resources.volumes.plan.share import share_plan

_FIRST_GUEST_CID = 3
"""An example: the shim chooses a free one. Smaller ones mean the host. Source: vsock(7)."""
_LEFT_OUT = (
    "network cards: they come from the pod's network namespace",
    "devices of the kubelet's PodResources and of CDI: the kubelet is not asked",
)
_CLAIMS = "devices of the pod's claims, and the type of its VM: the scheduler chooses them (hint: --claimed)"
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


@click.command(
    epilog=examples(
        "pyshim plan pod.yaml",
        "pyshim plan /run/containerd/io.containerd.runtime.v2.task/k8s.io/1a2b",
        "pyshim plan pod.yaml --json | jq -r '.[0].argv[]'",
    )
)
@click.argument("source", metavar="BUNDLE|POD.yaml")
@config_option
@click.option(
    "--claimed",
    multiple=True,
    metavar="PRODUCT=NUMBER",
    help="Devices that the scheduler gives to the pod's claims: a remote VM's instance type follows from them.",
)
@json_option
def command(source: str, config_path: str | None, claimed: tuple[str, ...], as_json: bool) -> int:
    """Show the VM, QEMU's command line, mounts, devices and sizes of a pod, without touching anything.

    BUNDLE is a directory with config.json; POD.yaml holds pods, or anything with a pod template.
    """
    options = named_file(config_path)
    devices = _claimed(claimed)
    plans = [of_bundle(source, options, devices)] if os.path.isdir(source) else of_manifest(source, options, devices)
    if as_json:
        print_json([as_document(plan) for plan in plans])
    else:
        print("\n\n".join("\n".join(lines(plan)) for plan in plans))
    return 0


def _claimed(words: tuple[str, ...]) -> PodDevices:
    """The devices that `pyshim dra run` gives to a pod with such claims. Raises InvalidArgument naming the word."""
    names = []
    for word in words:
        product, _, number = word.partition("=")
        if not product or not number.isdecimal() or not 1 <= int(number) <= MOST_OFFERED:
            raise InvalidArgument(f"plan with claimed devices {word!r}: expected PRODUCT=NUMBER, 1 to {MOST_OFFERED}")
        names += [f"{VENDOR}/{product}=planned-{each}" for each in range(int(number))]
    requests = (DeviceRequest(name=name, origin="--claimed") for name in names)
    return PodDevices(devices=tuple(FoundDevice(request=request, nodes=()) for request in requests))


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
    sandbox = planned_sandbox(member.sandbox_id, member.kind, spec, config, devices) if has_vm else None
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
            sources=volume_facts(spec, config),
            hostname=spec.hostname,
            sysctls=sandbox.sysctls if sandbox else {},
            terminal=spec.terminal,
            stdin=False,
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
    spec = pod_spec(annotations, path, of_host=str(manifest.spec.get("hostNetwork")).lower() == "true")
    config = load_config(options, annotations, dict(os.environ))
    sandbox = planned_sandbox(SandboxId("pod"), ContainerKind.POD_SANDBOX, spec, config, devices)
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


def _argv(plan: SandboxPlan) -> tuple[str, ...]:
    """QEMU's command line. Descriptors, the CID and the size of a missing image are examples: only a running shim has
    the real ones."""
    vm = plan.vm
    if isinstance(vm, RemoteVm):
        return ()
    check_config(vm)
    image_bytes = 0
    if is_image_pmem(vm) and vm.boot.image and os.path.exists(vm.boot.image):
        image_bytes = os.path.getsize(vm.boot.image)
    return qemu_argv(vm, guest_cid=_FIRST_GUEST_CID, image_bytes=image_bytes)


def lines(plan: Plan) -> Iterator[str]:
    """The plan as text."""
    yield plan.title
    yield f"configuration  {plan.config.source}"
    if plan.sandbox is not None:
        yield from _sandbox_lines(plan.sandbox)
    if plan.container is not None:
        yield from _container_lines(plan.container)
    if plan.argv:
        yield ""
        yield "command line"
        yield from (f"  {line}" for line in _argv_lines(plan.argv))
    yield ""
    yield "not planned"
    yield from (f"  {each}" for each in plan.left_out)


def _sandbox_lines(plan: SandboxPlan) -> Iterator[str]:
    vm = plan.vm
    local = vm if isinstance(vm, LocalVm) else None
    described = f", {local.cpu.accelerator}, cpu {local.cpu.model}" if local is not None else ", by a service"
    backing = f", {local.memory.backing}" if local is not None else ""
    yield f"vm             {vm.machine_type or 'remote'}{described}"
    yield f"vCPUs          {vm.cpu.boot_vcpus}, up to {vm.cpu.max_vcpus}"
    yield f"memory         {vm.memory.boot_mib} MiB, up to {vm.memory.max_mib} MiB{backing}"
    if plan.numa_why:
        yield f"NUMA           {plan.numa_why}"
    for number, node in enumerate(plan.numa):
        yield f"  node {number:<9}{node_text(node)}"
    yield f"agent          {type(local.agent_channel).__name__ if local is not None else 'named by the service'}"
    yield f"network        {plan.netns_path or 'an empty namespace'}"
    for group in plan.cgroups.groups:
        yield f"cgroup         {group.role} {group.path}"
    yield ""
    yield "size"
    yield from (f"  {line}" for line in record_lines(plan.sizing))
    if plan.share.mounts or plan.share.bind_mounts:
        yield ""
        yield "mounts of the sandbox"
        yield from _mount_lines((*plan.share.mounts, *plan.share.bind_mounts))


def _container_lines(plan: ContainerPlan) -> Iterator[str]:
    yield ""
    yield "mounts of the container"
    yield from _mount_lines((*plan.rootfs_mounts, *plan.share_mounts, *(bind.mount for bind in plan.binds)))
    if plan.guest.storages:
        yield ""
        yield "mounted in the guest"
        yield from (
            f"  {each.driver or each.fs_type} {each.source} on {each.mount_point}" for each in plan.guest.storages
        )
    if plan.disks or plan.guest.devices:
        yield ""
        yield "devices"
        yield from (f"  disk {each.disk.path} as {each.container_path or 'a file system'}" for each in plan.disks)
        yield from (f"  {each.type} {each.container_path}" for each in plan.guest.devices)
    if plan.copies:
        yield ""
        yield "copied into the guest"
        yield from (f"  {each.source}" for each in plan.copies)


def _mount_lines(mounts: tuple[HostMount, ...]) -> Iterator[str]:
    for mount in mounts:
        yield f"  {mount.type} {mount.source} on {mount.target} ({','.join(mount.options)})"


def _argv_lines(argv: tuple[str, ...]) -> Iterator[str]:
    """One option per line, in a shell's syntax."""
    line = shlex.quote(argv[0])
    for word in argv[1:]:
        if word.startswith("-"):
            yield f"{line} \\"
            line = f"  {shlex.quote(word)}"
        else:
            line += f" {shlex.quote(word)}"
    yield line


def as_document(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON object, without values of environment variables."""
    found: dict[str, Any] = msgspec.to_builtins(plan, enc_hook=str, str_keys=True)
    if plan.sandbox is not None:
        found["sandbox"].pop("config")  # the plan has it already
    if plan.container is not None:
        process = found["container"]["guest"]["spec"].get("process") or {}
        process["env"] = [str(each).partition("=")[0] for each in process.get("env") or ()]
    return found
