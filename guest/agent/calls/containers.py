"""Containers and the processes in them: creation, changes, removal; exec, signals, exit codes, stdio."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from protos.agent import agent_pb2 as pb
from protos.agent.oci_pb2 import Spec

from guest.agent import mounts
from guest.agent.children import Children
from guest.agent.container.cgroup import OomEvents
from guest.agent.container.container import CONTAINERS, Container, Containers
from guest.agent.container.crun import Crun, Process
from guest.agent.container.named_devices import NamedDevices
from guest.agent.container.sandbox import Sandbox, apply_sysctls
from guest.agent.container.spec import (
    GuestFacts,
    Node,
    apply_string_user,
    check_id,
    check_process,
    check_spec,
    guest_cgroup,
    oci_config,
    oci_resources,
    page_size_name,
)
from guest.agent.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound
from guest.agent.files import read_text, remove_tree, tail
from guest.agent.storage.copies import SHARED
from guest.agent.storage.devices import add_devices, nodes_of, rewrite_env
from guest.agent.storage.hotplug import Hotplug
from guest.agent.storage.table import StorageTable, huge_page_sizes
from guest.agent.streams import ReadEnd

log = logging.getLogger(__name__)

MAX_HOSTNAME_BYTES = 64  # of the kernel

_TERMINATION_MESSAGE_PATH = "io.kubernetes.container.terminationMessagePath"
_MAX_MESSAGE_BYTES = 4096  # of Kubernetes
_OF_CONTAINER = "container:"
"""A namespace path that begins so names the container whose pid namespace to join."""


class ContainerCalls:
    """CreateContainer and what changes a container as a whole."""

    def __init__(
        self,
        *,
        sandbox: Sandbox,
        containers: Containers,
        crun: Crun,
        storages: StorageTable,
        hotplug: Hotplug,
        named_devices: NamedDevices,
        oom_events: OomEvents,
        children: Children,
        left: set[str],
    ) -> None:
        """`left` gets the paths of the share that are mounted no more."""
        self._sandbox = sandbox
        self._containers = containers
        self._crun = crun
        self._storages = storages
        self._hotplug = hotplug
        self._named_devices = named_devices
        self._oom_events = oom_events
        self._children = children
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._left = left

    async def create(self, request: pb.CreateContainerRequest) -> None:
        """Devices and storages are in place and crun has created the container. A failure leaves nothing."""
        cid = check_id(request.container_id, "container id")
        if not request.HasField("OCI"):
            raise InvalidArgument(f"create container {cid!r}: request has no spec")
        check_spec(request.OCI, cid)
        with self._containers.reserved(cid):
            try:
                await self._create(cid, request)
            except BaseException:
                await self._clean(cid)
                raise

    async def _create(self, cid: str, request: pb.CreateContainerRequest) -> None:
        spec = request.OCI
        pci_addresses: dict[str, str] = {}
        if request.devices:
            pci_addresses = await add_devices(request.devices, spec, hotplug=self._hotplug, children=self._children)
        edits = None
        if self._named_devices.are_asked_for(spec):
            edits = await self._named_devices.wait_for_edits(cid, spec)
        spec.Process.Env[:] = rewrite_env(spec.Process.Env, pci_addresses)
        await self._storages.add(request.storages, cid)
        rootfs = _mounted_root(cid, spec)
        apply_string_user(spec.Process.User, request.string_user, rootfs)
        config = oci_config(
            spec,
            rootfs=rootfs,
            cgroup=guest_cgroup(spec.Linux.CgroupsPath, cid),
            pid_namespace=self._pid_namespace(spec) if request.sandbox_pidns else "",
            hooks=self._sandbox.hooks,
            guest=_guest_facts(),
            nodes=[Node(*numbers) for numbers in nodes_of(spec.Mounts)],
            limits_devices=self._crun.limits_devices,
        )
        if edits is not None:
            self._named_devices.apply(config, edits, cid, limits_devices=self._crun.limits_devices)
        apply_sysctls(spec.Linux.Sysctl)
        self._set_hostname(spec)
        container = await self._containers.create(cid, spec, config, pci_addresses=pci_addresses)
        log.info("container created", extra={"container": cid, "pid": container.init.pid})
        if request.shared_mounts:
            fields = {"container": cid, "count": len(request.shared_mounts)}
            log.warning("shared mounts are not supported", extra=fields)

    def _pid_namespace(self, spec: Spec) -> str:
        """The path of the pid namespace to join: that of the container which the spec names, or the sandbox's.

        "" while the sandbox has none.
        """
        for namespace in spec.Linux.Namespaces:
            if namespace.Type == "pid" and namespace.Path.startswith(_OF_CONTAINER):
                return _pid_namespace_of(self._containers.find(namespace.Path.removeprefix(_OF_CONTAINER)))
        if self._sandbox.pause is not None:
            return f"/proc/{self._sandbox.pause.pid}/ns/pid"
        # The sandbox has no pause process: its first container's namespace is the shared one, as in kata-agent.
        first = next(iter(self._containers), None)
        return "" if first is None else _pid_namespace_of(first)

    def _set_hostname(self, spec: Spec) -> None:
        """The guest's hostname, which all containers share, is the spec's, if the spec has one and a UTS namespace."""
        wanted = spec.Hostname
        if wanted and wanted != self._sandbox.hostname and any(one.Type == "uts" for one in spec.Linux.Namespaces):
            if len(wanted.encode()) > MAX_HOSTNAME_BYTES:
                raise InvalidArgument(
                    f"create container: hostname {wanted!r} is longer than {MAX_HOSTNAME_BYTES} bytes"
                )
            socket.sethostname(wanted)
            self._sandbox.hostname = wanted

    async def start(self, request: pb.StartContainerRequest) -> None:
        container = self._containers.find(request.container_id)
        await container.start()
        if container.cgroup:
            self._oom_events.watch(container.cid, container.cgroup, container.init.child)
        log.info("container started", extra={"container": container.cid})

    async def remove(self, request: pb.RemoveContainerRequest) -> None:
        """The container and its storages are gone. `timeout` (seconds, 0: none) limits the wait, not the removal."""
        container = self._containers.find(request.container_id)
        removal = self._removals.get(container.cid)
        if removal is None:
            removal = asyncio.create_task(self._remove(container), name=f"remove {container.cid}")
            self._removals[container.cid] = removal
            removal.add_done_callback(lambda _: self._removals.pop(container.cid))
        await asyncio.wait({removal}, timeout=request.timeout or None)
        if not removal.done():
            what = f"remove container {container.cid!r}"
            raise DeadlineExceeded(f"{what}: not yet done after {request.timeout} s")
        removal.result()

    async def _remove(self, container: Container) -> None:
        await container.remove()
        self._containers.forget(container)
        await self._clean(container.cid)
        log.info("container removed", extra={"container": container.cid})

    async def _clean(self, cid: str) -> None:
        bundle = f"{CONTAINERS}/{cid}"
        mounts.unmount(f"{bundle}/rootfs")
        await self._storages.release(cid)
        # The kernel mounts each file system of the share at its first use, and then the host keeps its files open.
        for point in mounts.mounted_below(f"{SHARED}/{cid}"):
            mounts.unmount(point)
            self._left.add(point)
        remove_tree(bundle)

    async def pause(self, request: pb.PauseContainerRequest) -> None:
        await self._containers.find(request.container_id).pause()

    async def resume(self, request: pb.ResumeContainerRequest) -> None:
        await self._containers.find(request.container_id).resume()

    async def update(self, request: pb.UpdateContainerRequest) -> None:
        container = self._containers.find(request.container_id)
        if request.HasField("resources"):
            await container.update(oci_resources(request.resources, _guest_facts()))

    async def diagnostic_data(self, request: pb.GetDiagnosticDataRequest) -> pb.GetDiagnosticDataResponse:
        """The end of the container's termination message, as much as a kubelet reads; empty if there is none.

        kata-agent answers with the beginning of a longer one.
        """
        container = self._containers.find(request.container_id)
        if request.log_type != "termination_log":
            raise InvalidArgument(f"get diagnostic data: log type {request.log_type[:80]!r} is not 'termination_log'")
        data = tail(_termination_message_file(container), _MAX_MESSAGE_BYTES)
        return pb.GetDiagnosticDataResponse(data=data.decode("utf-8", "replace"))


def _termination_message_file(container: Container) -> str:
    """The file of the guest that is mounted where the container's termination message is to be written."""
    point = container.spec.Annotations.get(_TERMINATION_MESSAGE_PATH, "")
    for mount in reversed(container.spec.Mounts):
        if point and os.path.normpath(mount.destination) == os.path.normpath(point):
            return mount.source
    raise NotFound(f"find termination message of container {container.cid!r}: nothing is mounted on {point!r}")


def _mounted_root(cid: str, spec: Spec) -> str:
    """The container's root in its bundle: mounted there by a storage, or a bind mount of the spec's path."""
    rootfs = f"{CONTAINERS}/{cid}/rootfs"
    if not os.path.isdir(rootfs):
        if not os.path.isdir(spec.Root.Path):
            raise InvalidArgument(f"create container {cid!r}: root {spec.Root.Path!r} is no directory in the guest")
        os.makedirs(rootfs)
        mounts.mount(spec.Root.Path, rootfs, "bind", ["rbind"])
    return rootfs


def _guest_facts() -> GuestFacts:
    sizes = {page_size_name(page_bytes) for page_bytes in huge_page_sizes()}
    return GuestFacts(read_text("/sys/devices/system/cpu/online").strip(), frozenset(sizes))


def _pid_namespace_of(container: Container) -> str:
    if container.init.has_exited:
        raise FailedPrecondition(f"join the pid namespace of container {container.cid!r}: it has exited")
    return f"/proc/{container.init.pid}/ns/pid"


# -- processes ---------------------------------------------------------------------------------------------------------

# A reply must fit a ttrpc message; a pipe rarely holds more anyway.
_MAX_READ_BYTES = 1 << 20


class ProcessCalls:
    """Calls about one process of a container: its init or an exec."""

    def __init__(self, *, containers: Containers) -> None:
        self._containers = containers

    def _process(self, container_id: str, exec_id: str) -> Process:
        return self._containers.find(container_id).process(exec_id)

    async def execute(self, request: pb.ExecProcessRequest) -> None:
        container = self._containers.find(request.container_id)
        exec_id = check_id(request.exec_id, "exec id")
        doing = f"exec {exec_id!r} in container {container.cid!r}"
        if not request.HasField("process"):
            raise InvalidArgument(f"{doing}: request has no process")
        process = request.process
        check_process(process, doing)
        apply_string_user(process.User, request.string_user, f"{CONTAINERS}/{container.cid}/rootfs")
        process.Env[:] = rewrite_env(process.Env, container.pci_addresses)
        await container.execute(exec_id, process)

    async def signal(self, request: pb.SignalProcessRequest) -> None:
        self._containers.find(request.container_id).signal(request.exec_id, request.signal)

    async def wait(self, request: pb.WaitProcessRequest) -> pb.WaitProcessResponse:
        """The exit code, once there is one. Every caller gets it, until the container is removed."""
        code = await self._process(request.container_id, request.exec_id).wait()
        return pb.WaitProcessResponse(status=code)

    async def write_stdin(self, request: pb.WriteStreamRequest) -> pb.WriteStreamResponse:
        """All bytes are in the pipe. Empty data closes it, as in kata-agent."""
        process = self._process(request.container_id, request.exec_id)
        if request.data:
            if process.stdin is None:
                raise FailedPrecondition(f"write stdin of {request.exec_id or 'init'!r}: it is /dev/null")
            await process.stdin.write(request.data)
        else:
            await _close_stdin(process)
        return pb.WriteStreamResponse(len=len(request.data))

    async def close_stdin(self, request: pb.CloseStdinRequest) -> None:
        await _close_stdin(self._process(request.container_id, request.exec_id))

    async def read_stdout(self, request: pb.ReadStreamRequest) -> pb.ReadStreamResponse:
        return await _read(self._process(request.container_id, request.exec_id).stdout, request.len)

    async def read_stderr(self, request: pb.ReadStreamRequest) -> pb.ReadStreamResponse:
        return await _read(self._process(request.container_id, request.exec_id).stderr, request.len)

    async def resize_terminal(self, request: pb.TtyWinResizeRequest) -> None:
        process = self._process(request.container_id, request.exec_id)
        if not process.has_terminal:
            raise FailedPrecondition(f"resize terminal of {request.exec_id or 'init'!r}: the process has none")
        if request.row > 0xFFFF or request.column > 0xFFFF:
            size = f"{request.row} rows, {request.column} columns"
            raise InvalidArgument(f"resize terminal: {size}: more than 65535")
        process.resize_terminal(request.row, request.column)


async def _close_stdin(process: Process) -> None:
    # A terminal has one file for both directions: closing it would hang up the session and lose output.
    if process.stdin is not None and not process.has_terminal:
        await process.stdin.finish()


async def _read(source: ReadEnd | None, size: int) -> pb.ReadStreamResponse:
    """A read of no bytes ends the stream: the caller does not want the rest (kata-agent refuses such a read)."""
    if source is None:
        return pb.ReadStreamResponse()
    if size == 0:
        source.close()
    return pb.ReadStreamResponse(data=await source.read(min(size, _MAX_READ_BYTES)))
