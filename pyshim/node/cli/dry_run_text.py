"""The plans of `pyshim plan` as text and as JSON."""

import shlex
from collections.abc import Iterator
from typing import Any

import msgspec

from pyshim.model.plans import ContainerPlan, SandboxPlan
from pyshim.model.volumes import HostMount
from pyshim.node.cli.planned import Plan
from pyshim.node.cli.sizing_text import record_lines
from pyshim.resources.sizing.plan.numa import node_text


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
    yield f"vm             {vm.machine_type}, {vm.cpu.accelerator}, cpu {vm.cpu.model}"
    yield f"vCPUs          {vm.cpu.boot_vcpus}, up to {vm.cpu.max_vcpus}"
    yield f"memory         {vm.memory.boot_mib} MiB, up to {vm.memory.max_mib} MiB, {vm.memory.backing}"
    if plan.numa_why:
        yield f"NUMA           {plan.numa_why}"
    for number, node in enumerate(vm.numa):
        yield f"  node {number:<9}{node_text(node)}"
    yield f"agent          {type(vm.agent_channel).__name__}"
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
    yield from _mount_lines((*plan.rootfs_mounts, *plan.share_mounts))
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
