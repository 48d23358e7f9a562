"""The sandbox, and the guest as a machine: health, details, CPUs and memory, clock, randomness, swap."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterable
from fcntl import ioctl
from struct import pack, unpack_from

from protos.agent import agent_pb2 as pb
from protos.agent import health_pb2
from protos.agent.oci_pb2 import Hook

from guest.agent import mounts, syscalls
from guest.agent.calls.containers import MAX_HOSTNAME_BYTES
from guest.agent.children import Children
from guest.agent.container.cgroup import OomEvents
from guest.agent.container.container import Containers
from guest.agent.container.sandbox import Sandbox, start_pause
from guest.agent.container.spec import cpu_set
from guest.agent.errors import DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument, Unimplemented, os_cause
from guest.agent.files import names_in, read_text, write_text
from guest.agent.storage.devices import DEVICE_TYPES, find_block_device
from guest.agent.storage.hotplug import Hotplug
from guest.agent.storage.table import DRIVERS, SANDBOX, StorageTable

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


# -- the guest ---------------------------------------------------------------------------------------------------------

VERSION = "0.3.0.dev0"
API_VERSION = "0.0.1"
EXTRA_FEATURES = ("output-after-wait", "join-pid-namespace-by-name", "unified-resources", "stats-of-all-containers")
"""Output stays readable after the answer to WaitProcess, until a read of no bytes; a spec may name the container whose
pid namespace to join, and cgroup files; StatsContainers. `pyshim/agent/client.py` has the shim's names.
"""
_MEMORY = "/sys/devices/system/memory"
_CPUS = "/sys/devices/system/cpu"
# Seconds for CPUs that were just plugged to appear, and between two looks.
_ONLINE_TIMEOUT_S = 30.0
_ONLINE_AGAIN_S = 0.05
# Source: linux/random.h.
_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207
_MAX_SEED_BYTES = 4096
_MAX_PCI_SLOT = 0x1F
_MOST_SECONDS = (1 << 63) // 10**9
"""The kernel counts a clock's nanoseconds in 63 bits."""


class GuestCalls:
    def __init__(self, *, hotplug: Hotplug) -> None:
        self._hotplug = hotplug

    async def check(self, request: health_pb2.CheckRequest) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def version(self, request: health_pb2.CheckRequest) -> health_pb2.VersionCheckResponse:
        return health_pb2.VersionCheckResponse(grpc_version=API_VERSION, agent_version=VERSION)

    async def details(self, request: pb.GuestDetailsRequest) -> pb.GuestDetailsResponse:
        details = pb.AgentDetails(
            version=VERSION,
            init_daemon=os.getpid() == 1,
            device_handlers=DEVICE_TYPES,
            storage_handlers=DRIVERS,
            supports_seccomp=True,
            extra_features=EXTRA_FEATURES,
        )
        reply = pb.GuestDetailsResponse(agent_details=details)
        if request.mem_block_size:
            reply.mem_block_size_bytes = memory_block_bytes(_MEMORY)
        return reply

    async def online_cpu_mem(self, request: pb.OnlineCPUMemRequest) -> None:
        """At least `nb_cpus` CPUs are online (0: leave them), and unless `cpu_only` every memory block.

        CPUs that were just plugged have 30 s to appear. DeadlineExceeded says how many are online, FailedPrecondition
        how many this kernel takes at all.
        """
        if request.nb_cpus:
            room = len(cpu_set(read_text(f"{_CPUS}/possible")))
            if request.nb_cpus > room:
                takes = f"the guest's kernel takes {room} on this machine"
                raise FailedPrecondition(f"online {request.nb_cpus} cpus: {takes}")
            try:
                async with asyncio.timeout(_ONLINE_TIMEOUT_S):
                    while (present := _online_cpus()) < request.nb_cpus:
                        _online(_CPUS, "cpu", request.nb_cpus - present)
                        if _online_cpus() < request.nb_cpus:
                            await asyncio.sleep(_ONLINE_AGAIN_S)
            except TimeoutError:
                raise DeadlineExceeded(f"online {request.nb_cpus} cpus: {_online_cpus()} are online") from None
        if not request.cpu_only:
            _online(_MEMORY, "memory", -1)

    async def set_time(self, request: pb.SetGuestDateTimeRequest) -> None:
        if not (0 <= request.Usec < 1_000_000 and 0 <= request.Sec < _MOST_SECONDS):
            raise InvalidArgument(f"set time: {request.Sec} s {request.Usec} us is no time")
        time.clock_settime_ns(time.CLOCK_REALTIME, request.Sec * 10**9 + request.Usec * 1000)

    async def reseed_random(self, request: pb.ReseedRandomDevRequest) -> None:
        """The kernel's generator has `data` mixed in and credited, and is reseeded at once."""
        if not request.data:
            raise InvalidArgument("reseed random: no data")
        data = request.data[:_MAX_SEED_BYTES]
        with open("/dev/random", "r+b", buffering=0) as device:
            try:
                ioctl(device, _RNDADDENTROPY, pack("ii", len(data) * 8, len(data)) + data)
                ioctl(device, _RNDRESEEDCRNG)
            except OSError as error:
                raise Internal(f"reseed random: {os_cause(error)}") from error

    async def add_swap(self, request: pb.AddSwapRequest) -> None:
        """The virtio disk at the PCI path (slot numbers from the root) is used for swapping."""
        if not request.PCIPath or any(slot > _MAX_PCI_SLOT for slot in request.PCIPath):
            raise InvalidArgument(f"add swap: PCI path {list(request.PCIPath)} is not a list of slots")
        path = "/".join(f"{slot:02x}" for slot in request.PCIPath)
        syscalls.swap_on(await find_block_device(self._hotplug, "blk", path))

    async def set_policy(self, request: pb.SetPolicyRequest) -> None:
        raise Unimplemented("set policy: this agent has no policy engine and enforces none")


def memory_block_bytes(folder: str) -> int:
    """The size of one hotpluggable block; 0 if the kernel has no memory hotplug. The file is hexadecimal."""
    try:
        return int(read_text(f"{folder}/block_size_bytes").strip(), 16)
    except FileNotFoundError:
        return 0


def _online_cpus() -> int:
    return len(cpu_set(read_text(f"{_CPUS}/online")))


def _online(folder: str, prefix: str, count: int) -> None:
    """Up to `count` (-1: all) offline objects of `folder` are asked to go online, the lowest number first."""
    suffixes = [name[len(prefix) :] for name in names_in(folder) if name.startswith(prefix)]
    for number in sorted(int(suffix) for suffix in suffixes if suffix.isdigit()):
        if count == 0:
            return
        path = f"{folder}/{prefix}{number}/online"
        try:
            if read_text(path).strip() == "0":
                write_text(path, "1")
                count -= 1
        except OSError as error:
            log.debug("not onlined", extra={"path": path, "error": error})
