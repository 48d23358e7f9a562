"""The guest as a machine: details, CPUs and memory, clock, randomness, swap."""

from __future__ import annotations

import os

from guest.agent import log
from guest.agent.agent import VERSION
from guest.agent.errors import DeadlineExceeded, Internal, InvalidArgument, Unimplemented, os_cause
from guest.agent.text_files import read_text
from guest.agent.wire.codec import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent

_MEMORY = "/sys/devices/system/memory"
_CPUS = "/sys/devices/system/cpu"
_ONLINE_TIMEOUT_S = 5.0
_ONLINE_AGAIN_S = 0.05
_RNDRESEEDCRNG = 0x5207
_ENTROPY_BITS_PER_BYTE = 8
_RNDADDENTROPY = 0x40085203


async def details(agent: Agent, request: Message) -> Message:
    from guest.agent.storage.devices import DEVICE_TYPES
    from guest.agent.storage.table import DRIVERS

    reply = Message(
        "GuestDetailsResponse",
        agent_details=Message(
            "AgentDetails",
            version=VERSION,
            init_daemon=os.getpid() == 1,
            device_handlers=list(DEVICE_TYPES),
            storage_handlers=list(DRIVERS),
            supports_seccomp=True,
        ),
    )
    if request.mem_block_size:
        reply._values["mem_block_size_bytes"] = memory_block_bytes(_MEMORY)
    if request.mem_hotplug_probe:
        reply._values["support_mem_hotplug_probe"] = os.path.exists(f"{_MEMORY}/probe")
    return reply


def memory_block_bytes(folder: str) -> int:
    """The size of one hotpluggable block, 0 when the kernel has no memory hotplug. The file is hexadecimal."""
    try:
        return int(read_text(f"{folder}/block_size_bytes").strip(), 16)
    except FileNotFoundError:
        return 0


async def online_cpu_mem(agent: Agent, request: Message) -> None:
    """At least `nb_cpus` CPUs are online (0: leave them), and unless `cpu_only` every memory block.

    Just plugged CPUs take a while to appear: they are waited for up to 5 s. DeadlineExceeded says how many there are.
    """
    if request.nb_cpus:
        waited_s = 0.0
        while True:
            _online(_CPUS, "cpu", request.nb_cpus - _online_cpus())
            if _online_cpus() >= request.nb_cpus:
                break
            if waited_s >= _ONLINE_TIMEOUT_S:
                raise DeadlineExceeded(f"online {request.nb_cpus} cpus: {_online_cpus()} are online")
            await agent.loop.sleep(_ONLINE_AGAIN_S)
            waited_s += _ONLINE_AGAIN_S
    if not request.cpu_only:
        _online(_MEMORY, "memory", -1)


def _online_cpus() -> int:
    from guest.agent.container.spec import cpu_set

    return len(cpu_set(read_text(f"{_CPUS}/online")))


def _online(folder: str, prefix: str, count: int) -> None:
    """Up to `count` (-1: all) offline objects of `folder` are asked to go online."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    numbers = sorted(
        int(name[len(prefix) :]) for name in names if name.startswith(prefix) and name[len(prefix) :].isdigit()
    )
    for index in numbers:
        if count == 0:
            return
        path = f"{folder}/{prefix}{index}/online"
        try:
            with open(path, "r+", encoding="ascii") as file:
                if file.read().strip() != "0":
                    continue
                file.seek(0)
                file.write("1")
        except OSError as error:
            log.debug("not onlined", path=path, error=error)
            continue
        count -= 1


async def probe_memory(agent: Agent, request: Message) -> None:
    """The kernel looks for memory at each address."""
    for address in request.memHotplugProbeAddr:
        try:
            with open(f"{_MEMORY}/probe", "w", encoding="ascii") as file:
                file.write(f"{address:#x}")
        except OSError as error:
            raise Internal(f"probe memory at {address:#x}: {os_cause(error)}") from error


async def set_time(agent: Agent, request: Message) -> None:
    if not 0 <= request.Usec < 1_000_000 or request.Sec < 0:
        raise InvalidArgument(f"set time: {request.Sec} s {request.Usec} us is no time")
    from guest.agent.storage.syscalls import set_clock

    set_clock(request.Sec, request.Usec)


async def reseed_random(agent: Agent, request: Message) -> None:
    """The kernel's generator has `data` mixed in and credited, and is reseeded at once."""
    if not request.data:
        raise InvalidArgument("reseed random: no data")
    from fcntl import ioctl
    from struct import pack

    data = request.data[:4096]
    fd = os.open("/dev/random", os.O_RDWR | os.O_CLOEXEC)
    try:
        ioctl(fd, _RNDADDENTROPY, pack("ii", len(data) * _ENTROPY_BITS_PER_BYTE, len(data)) + data)
        ioctl(fd, _RNDRESEEDCRNG)
    except OSError as error:
        raise Internal(f"reseed random: {os_cause(error)}") from error
    finally:
        os.close(fd)


async def add_swap(agent: Agent, request: Message) -> None:
    """The virtio disk at the PCI path (slot numbers from the root) is used for swapping."""
    from guest.agent.storage.block import find_block_device
    from guest.agent.storage.syscalls import swap_on

    if not request.PCIPath or any(slot > 0x1F for slot in request.PCIPath):
        raise InvalidArgument(f"add swap: PCI path {request.PCIPath} is not a list of slots")
    swap_on(await find_block_device(agent, "blk", "/".join(f"{slot:02x}" for slot in request.PCIPath)))


async def add_swap_path(agent: Agent, request: Message) -> None:
    from guest.agent.storage.syscalls import swap_on

    swap_on(request.path)


async def set_policy(agent: Agent, request: Message) -> None:
    raise Unimplemented("set policy: this agent has no policy engine and enforces none")


async def memory_agent(agent: Agent, request: Message) -> None:
    raise Unimplemented("set memory agent: this agent has none")
