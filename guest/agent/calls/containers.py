"""CreateContainer and what changes a container as a whole."""

from __future__ import annotations

import os

from guest.agent import log
from guest.agent.container.container import CONTAINERS, Container
from guest.agent.container.device_names import asks_for_devices
from guest.agent.container.spec import check_id, check_spec, guest_cgroup, oci_config, oci_resources
from guest.agent.container.users import apply_string_user
from guest.agent.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from guest.agent.storage import mounts
from guest.agent.text_files import read_text
from guest.agent.wire.codec import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent


def find(agent: Agent, cid: str) -> Container:
    """The container of that id. NotFound names it."""
    container = agent.sandbox.containers.get(cid)
    if container is None:
        raise NotFound(f"container {cid[:80]!r}: no such container")
    return container


async def create(agent: Agent, request: Message) -> None:
    """Devices and storages are in place and crun has created the container; on failure nothing of it is left."""
    cid = check_id(request.container_id, "container id")
    if not request.has("OCI"):
        raise InvalidArgument(f"create container {cid!r}: request has no spec")
    check_spec(request.OCI, cid)
    sandbox = agent.sandbox
    if cid in sandbox.containers or cid in sandbox.in_creation:
        raise AlreadyExists(f"create container {cid!r}: it exists")
    sandbox.in_creation.add(cid)
    try:
        container = Container(agent, agent.crun, cid, request.OCI)
        try:
            await _create(agent, container, request)
        except BaseException:
            await _clean(agent, cid)
            raise
        sandbox.containers[cid] = container
    finally:
        sandbox.in_creation.discard(cid)
    log.info("container created", container=cid, pid=container.init.pid)


async def _create(agent: Agent, container: Container, request: Message) -> None:
    spec: Message = request.OCI
    if request.devices:
        from guest.agent.storage.devices import add_devices

        container.pci_addresses = await add_devices(agent, request.devices, spec)
    edits = None
    if asks_for_devices(agent, spec):
        from guest.agent.container.cdi import wait_for_edits

        edits = await wait_for_edits(agent, container.cid, spec)
    container.rewrite_env(spec.Process)
    await agent.storages.add(request.storages, container.cid)
    rootfs = f"{container.bundle}/rootfs"
    if not os.path.isdir(rootfs):
        if not os.path.isdir(spec.Root.Path):
            raise InvalidArgument(
                f"create container {container.cid!r}: root {spec.Root.Path!r} is no directory in the guest"
            )
        os.makedirs(rootfs)
        mounts.mount(spec.Root.Path, rootfs, "bind", ["rbind"])
    set_user(spec.Process, request.string_user, rootfs)
    config = oci_config(
        spec,
        rootfs=rootfs,
        cgroup=guest_cgroup(spec.Linux.CgroupsPath, container.cid),
        pid_namespace=_pid_namespace(agent, request.sandbox_pidns),
        hooks=agent.sandbox.hooks,
        online_cpus=_online_cpus() if spec.Linux.Resources.CPU.Cpus else "",
        limits_devices=agent.crun.limits_devices,
        sets_personality=agent.crun.fixed_addresses,
    )
    if edits is not None:
        from guest.agent.container.cdi import apply

        apply(config, edits, container.cid, limits_devices=agent.crun.limits_devices)
    if spec.Linux.Sysctl:
        from guest.agent.container.sysctls import apply_sysctls

        apply_sysctls(spec.Linux.Sysctl)
    _set_hostname(agent, spec)
    await container.create(config)
    if request.shared_mounts:
        log.warning("shared mounts are not supported", container=container.cid, count=len(request.shared_mounts))


def set_user(process: Message, wanted: Message, rootfs: str) -> None:
    """The process's user is the one that the request names, if it names one."""
    if not process.has("User"):
        process._values["User"] = Message("User")
    apply_string_user(process.User, wanted, rootfs)


def _pid_namespace(agent: Agent, shares_pids: bool) -> str:
    """The path of the pid namespace to join, "" for a new one."""
    if not shares_pids or agent.sandbox.pid_namespace or not agent.sandbox.containers:
        return agent.sandbox.pid_namespace if shares_pids else ""
    # No pause process was asked for with the sandbox: its first container's namespace is the shared one,
    # as in kata-agent.
    first = next(iter(agent.sandbox.containers.values()))
    if first.init.exited.done:
        raise FailedPrecondition("share the sandbox's pid namespace: its first container has exited")
    return f"/proc/{first.init.pid}/ns/pid"


def _set_hostname(agent: Agent, spec: Message) -> None:
    """The hostname is the spec's, if it has one and no wish to keep the guest's: all containers share one."""
    wanted = spec.Hostname
    if wanted and wanted != agent.sandbox.hostname and any(one.Type == "uts" for one in spec.Linux.Namespaces):
        import _socket

        if len(wanted.encode()) > 64:
            raise InvalidArgument(f"create container: hostname {wanted!r} is longer than 64 bytes")
        _socket.sethostname(wanted)
        agent.sandbox.hostname = wanted


def _online_cpus() -> str:
    return read_text("/sys/devices/system/cpu/online").strip()


async def start(agent: Agent, request: Message) -> None:
    container = find(agent, request.container_id)
    await container.start()
    if container.cid != agent.sandbox.id and container.cgroup:
        from guest.agent.container.oom import watch_oom

        watch_oom(agent, container)
    log.info("container started", container=container.cid)


async def remove(agent: Agent, request: Message) -> None:
    """The container and all its storages are gone. `timeout` (seconds, 0: none) bounds the wait for its processes."""
    container = find(agent, request.container_id)
    if request.timeout:
        await agent.loop.within(request.timeout, container.remove(), f"remove container {container.cid!r}")
    else:
        await container.remove()
    agent.sandbox.containers.pop(container.cid, None)
    await _clean(agent, container.cid)
    log.info("container removed", container=container.cid)


async def _clean(agent: Agent, cid: str) -> None:
    bundle = f"{CONTAINERS}/{cid}"
    mounts.unmount(f"{bundle}/rootfs")
    await agent.storages.release(cid)
    from guest.agent.storage.files import remove_tree

    remove_tree(bundle)


async def pause(agent: Agent, request: Message) -> None:
    await find(agent, request.container_id).pause()


async def resume(agent: Agent, request: Message) -> None:
    await find(agent, request.container_id).resume()


async def update(agent: Agent, request: Message) -> None:
    container = find(agent, request.container_id)
    if request.has("resources"):
        await container.update(oci_resources(request.resources, _online_cpus()))
