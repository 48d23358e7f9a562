"""CreateSandbox and DestroySandbox."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterable
from fcntl import ioctl
from struct import pack, unpack_from

from protos.agent import agent_pb2 as pb
from protos.agent.oci_pb2 import Hook

from guest.agent import mounts, syscalls
from guest.agent.calls.containers import MAX_HOSTNAME_BYTES
from guest.agent.children import Children
from guest.agent.container.container import Containers
from guest.agent.container.oom import OomEvents
from guest.agent.container.pause import start_pause
from guest.agent.errors import FailedPrecondition, InvalidArgument
from guest.agent.sandbox import Sandbox
from guest.agent.storage.table import SANDBOX, StorageTable

log = logging.getLogger(__name__)

_RESOLV_CONF = "/run/kata-containers/sandbox/resolv.conf"
_GUEST_RESOLV_CONF = "/etc/resolv.conf"
_MODPROBE_TIMEOUT_S = 30.0
_HOOK_KINDS = ("prestart", "poststart", "poststop")
# Source: linux/sockios.h, linux/if.h.
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


class SandboxCalls:
    def __init__(
        self,
        *,
        sandbox: Sandbox,
        containers: Containers,
        storages: StorageTable,
        oom_events: OomEvents,
        children: Children,
        on_destroyed: Callable[[], None],
    ) -> None:
        """`on_destroyed` is called at the end of DestroySandbox, before it is answered."""
        self._sandbox = sandbox
        self._containers = containers
        self._storages = storages
        self._oom_events = oom_events
        self._children = children
        self._on_destroyed = on_destroyed

    async def create(self, request: pb.CreateSandboxRequest) -> None:
        """Modules are loaded, the sandbox has its hostname, storages, hooks and DNS, and loopback is up."""
        sandbox = self._sandbox
        if sandbox.is_created:
            raise FailedPrecondition(f"create sandbox {request.sandbox_id!r}: {sandbox.id!r} was created before")
        if len(request.hostname.encode()) > MAX_HOSTNAME_BYTES:
            limit = f"longer than {MAX_HOSTNAME_BYTES} bytes"
            raise InvalidArgument(f"create sandbox: hostname {request.hostname!r} is {limit}")
        sandbox.is_created = True
        try:
            await self._create(request)
        except BaseException:
            sandbox.is_created = False  # the same request may come again: each step can be repeated
            raise
        log.info("sandbox created", extra={"sandbox": sandbox.id, "hostname": sandbox.hostname})

    async def _create(self, request: pb.CreateSandboxRequest) -> None:
        sandbox = self._sandbox
        sandbox.id = request.sandbox_id
        sandbox.hostname = request.hostname
        os.makedirs("/run/kata-containers", exist_ok=True)
        for module in request.kernel_modules:
            await self._load_module(module)
        self._make_namespaces()
        if request.sandbox_pidns and sandbox.pause is None:
            sandbox.pause = start_pause(self._children)
        await self._storages.add(request.storages, SANDBOX)
        if request.guest_hook_path:
            sandbox.hooks = find_hooks(request.guest_hook_path)
        _set_dns(request.dns)
        _loopback_up()

    async def _load_module(self, module: pb.KernelModule) -> None:
        doing = f"load kernel module {module.name!r}"
        if not module.name or module.name.startswith("-"):
            raise InvalidArgument(f"{doing}: no module name")
        words = ("--", module.name, *module.parameters)
        await self._children.call("modprobe", *words, doing=doing, timeout_s=_MODPROBE_TIMEOUT_S)

    def _make_namespaces(self) -> None:
        """Containers share this process's UTS and IPC namespaces, in which no other process of a guest is.

        The agent does not depend on them, so further ones would only cost time: the guest is the pod's.
        """
        if os.getpid() != 1:
            syscalls.unshare(syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWIPC)
        if self._sandbox.hostname:
            socket.sethostname(self._sandbox.hostname)

    async def destroy(self, request: pb.DestroySandboxRequest) -> None:
        """Every container is gone and the agent ends once this is answered."""
        for container in self._containers:
            await container.remove()
            self._containers.forget(container)
        if self._sandbox.pause is not None:
            self._sandbox.pause.send_signal(signal.SIGKILL)
        self._oom_events.end()
        os.sync()
        self._on_destroyed()


def find_hooks(folder: str) -> dict[str, list[Hook]]:
    """Executable regular files in `folder`/prestart, poststart and poststop, as hooks, in order of their names."""
    hooks: dict[str, list[Hook]] = {}
    for kind in _HOOK_KINDS:
        try:
            names = sorted(os.listdir(f"{folder}/{kind}"))
        except OSError:
            continue
        for name in names:
            path = f"{folder}/{kind}/{name}"
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode) and mode & 0o111:
                hooks.setdefault(kind, []).append(Hook(Path=path, Args=[name, kind]))
    return hooks


def _set_dns(lines: Iterable[str]) -> None:
    """The guest's resolv.conf has these lines. Containers get theirs by mounts."""
    text = "".join(f"{line.strip()}\n" for line in lines)
    if not text or not os.path.isfile(_GUEST_RESOLV_CONF):
        return
    os.makedirs(os.path.dirname(_RESOLV_CONF), exist_ok=True)
    with open(_RESOLV_CONF, "w", encoding="utf-8") as file:
        file.write(text)
    mounts.mount(_RESOLV_CONF, os.path.realpath(_GUEST_RESOLV_CONF), "bind", [])


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (flags,) = unpack_from("H", ioctl(probe, _SIOCGIFFLAGS, pack("16sH22x", b"lo", 0)), 16)
        if not flags & _IFF_UP:
            ioctl(probe, _SIOCSIFFLAGS, pack("16sH22x", b"lo", flags | _IFF_UP))
