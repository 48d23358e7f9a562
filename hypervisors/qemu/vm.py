"""One VM in QEMU, from `create` to `stop`.

Theory of operation:

    NEW --create--> CREATED --start--> RUNNING <--pause/resume--> PAUSED
                       |                  |                          |
                       +------------------+--- QEMU ends ------------+--> ENDED   (`wait` answers; `stop` cleans up)

`process.py` watches the QEMU process, whose exit is the end of the VM.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from enum import StrEnum

from hypervisors.qemu.cmdline import (
    AGENT_FD,
    CONSOLE_FD,
    MEMORY_FD,
    MONITOR_FD,
    QMP_FD,
    SERIAL_FD,
    check_config,
    extra_monitor_path,
    nic_fds,
    qemu_argv,
    qmp_path,
    socket_paths,
)
from hypervisors.qemu.console import Console
from hypervisors.qemu.devices import VSOCK_ID, bus_of, vsock_path
from hypervisors.qemu.guards import NO_ENCRYPTION, Encryption, attest, query_encryption
from hypervisors.qemu.hotplug import Hotplug, capabilities_of
from hypervisors.qemu.isolation import isolated_qemu, isolated_vsock_program, reserved_user
from hypervisors.qemu.process import QemuProcess, VmStartFailed
from hypervisors.qemu.qmp import Monitor, QmpError
from hypervisors.qemu.saved_machine import continue_machine, empty_memory, fill_memory, save_machine, saved_memory
from hypervisors.qemu.vsock import reserve_cid, start_program
from pyshim.concurrency.deadlines import CHANGE_S, MARGIN_S, VM_S, given_s, within_s
from pyshim.concurrency.tasks import succeeded, together
from pyshim.host.fds import OwnedFd, listening_socket
from pyshim.host.os_errors import describe_os_error, os_errors
from pyshim.host.processes.children import Child, Children
from pyshim.host.processes.launch import User
from pyshim.model.confidential import SevGuard, SnpGuard
from pyshim.model.errors import FailedPrecondition, Internal, InvalidArgument, ShimError, Unavailable
from pyshim.model.guest import AgentAddress, HvsockAddress, SerialAddress, VsockAddress
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.places import PROBE_NAME
from pyshim.model.vm import (
    Capabilities,
    Device,
    GuestLocation,
    LocalVm,
    SerialChannel,
    ShareDevice,
    VfioDevice,
    VhostUserVsockChannel,
    VmConfig,
    VmExit,
    VsockChannel,
)

log = logging.getLogger(__name__)

_VSOCK_PAUSE_S = 0.02
"""Seconds between two queries of the vsock's state. The guest boots in some hundred ms, or in seconds."""


class Phase(StrEnum):
    NEW = "new"
    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    ENDED = "ended"


def _plug_s(_vm: object, device: Device) -> float:
    # VFIO pins all of the guest's memory; the plug of a share waits for the guest's driver.
    return VM_S if isinstance(device, VfioDevice | ShareDevice) else CHANGE_S


class QemuVm:
    """The QEMU driver; an object has one VM. `Hypervisor` describes the calls."""

    def __init__(self, *, ledger: Ledger, children: Children) -> None:
        self._ledger = ledger
        self._children = children
        self._phase = Phase.NEW
        self._vm: LocalVm | None = None
        self._vsock_program: Child | None = None
        self._console: Console | None = None
        self._process: QemuProcess | None = None
        self._hotplug: Hotplug | None = None
        self._address: AgentAddress | None = None
        self._memory: OwnedFd | None = None
        self._entries: list[LedgerEntry] = []
        self._stopping: asyncio.Task[None] | None = None

    # State

    def capabilities(self) -> Capabilities:
        return capabilities_of(self._config("ask capabilities"))

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    @property
    def helper_pids(self) -> tuple[int, ...]:
        return (self._vsock_program.pid,) if self._vsock_program is not None else ()

    @property
    def agent_address(self) -> AgentAddress:
        if self._address is None:
            raise FailedPrecondition("ask agent address: the vm was not created")
        return self._address

    def console_tail(self) -> str:
        return "\n".join(self._console.lines()) if self._console is not None else ""

    def saved(self) -> Mapping[str, object]:
        config = self._config("save the vm")
        plugged = self._hotplug.saved() if self._hotplug is not None else {}
        return {"Type": "qemu", "UUID": config.uuid, "APISocket": qmp_path(config), "Pid": self.pid, **plugged}

    # From create to stop

    @within_s(lambda self, config: config.start_timeout_s + MARGIN_S, "create vm '{config.sandbox_id}'")
    async def create(self, config: VmConfig) -> None:
        with ExitStack() as fds:
            if self._phase is not Phase.NEW or self._vm is not None:
                raise FailedPrecondition(f"create vm {config.sandbox_id!r}: this driver object has made its vm already")
            if not isinstance(config, LocalVm):
                raise InvalidArgument(f"create vm {config.sandbox_id!r}: a service makes it, not QEMU")
            check_config(config)
            image_bytes = check_files(config)
            self._vm = config
            try:
                await self._create(config, image_bytes, fds)
            except BaseException as error:
                try:
                    await self.stop()
                except ShimError as undo_error:
                    log.warning("undo failed", extra={"sandbox": config.sandbox_id, "error": str(undo_error)})
                if isinstance(error, OSError):
                    where = f" {error.filename!r}" if error.filename else ""
                    cause = f"{describe_os_error(error)}{where}"
                    raise VmStartFailed(f"start vm {config.sandbox_id!r}: {cause}") from error
                raise
        self._phase = Phase.CREATED

    async def _create(self, config: LocalVm, image_bytes: int, fds: ExitStack) -> None:
        self._make_vm_dir(config)
        reserved = await reserved_user(config)
        self._console = Console(log_path=f"{config.vm_dir}/console.log", to_log=config.debug)
        qemu_fds = {QMP_FD: fds.enter_context(listening_socket(qmp_path(config))).fileno()}
        for number in (CONSOLE_FD, SERIAL_FD):
            ours, guests = socket.socketpair()
            self._console.attach(ours)
            qemu_fds[number] = fds.enter_context(guests).fileno()
        guest_cid = 0
        match config.agent_channel:
            case SerialChannel(socket_path=path):
                qemu_fds[AGENT_FD] = fds.enter_context(listening_socket(path)).fileno()
                self._address = SerialAddress(path)
            case VsockChannel(port=port):
                vsock, guest_cid = reserve_cid()
                qemu_fds[AGENT_FD] = fds.enter_context(vsock).fileno()
                self._address = VsockAddress(guest_cid, port)
            case VhostUserVsockChannel() as channel:
                device = await self._start_vsock_program(channel, config, reserved)
                qemu_fds[AGENT_FD] = fds.enter_context(device).fileno()
                self._address = HvsockAddress(channel.socket_path, channel.port)
        for nic, numbers in zip(config.nics, nic_fds(config), strict=True):
            qemu_fds |= zip(numbers.vhosts, nic.vhost_fds, strict=True)
            qemu_fds |= zip(numbers.taps, nic.tap_fds, strict=True)
        if config.extra_monitor:
            qemu_fds[MONITOR_FD] = fds.enter_context(listening_socket(extra_monitor_path(config))).fileno()
        self._memory = saved = saved_memory(config)
        if config.is_copyable:
            self._memory = saved or empty_memory(config)
            qemu_fds[MEMORY_FD] = self._memory.fileno()
        argv = qemu_argv(
            config,
            guest_cid=guest_cid,
            image_bytes=image_bytes,
            memory_is_saved=saved is not None,
            encryption=await self._encryption(config),
        )
        steps = [self._launch_qemu(config, argv, qemu_fds, fds, reserved)]
        if config.saved_machine and self._memory is not None and saved is None:
            steps.append(fill_memory(self._memory, config.saved_machine))
        await together(*steps)
        if config.saved_machine:
            await self._continue_machine(config)
        assert self._hotplug is not None
        await self._hotplug.check_locations()

    async def _launch_qemu(
        self,
        config: LocalVm,
        argv: tuple[str, ...],
        qemu_fds: Mapping[int, int],
        fds: ExitStack,
        reserved: User | None,
    ) -> None:
        """QEMU runs and QMP answers. `qemu_fds`: QEMU's numbers to the shim's descriptors, closed through `fds`."""
        assert self._console is not None
        isolation = await isolated_qemu(config, reserved, fds)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # Connected before the spawn: if QEMU exits early, its listener closes, and this end sees that at once.
            connection.connect(qmp_path(config))
            child = await self._children.spawn(
                argv,
                fds=qemu_fds,
                isolation=isolation,
                dumps_core=config.dumps_core,
                ledger=self._ledger,
                ledger_key=config.uuid,
            )
            self._process = QemuProcess(config, child, self._console, self._vsock_program)
            self._entries.append(LedgerEntry(kind=ResourceKind.PROCESS, key=config.uuid))
            fds.close()
        except BaseException:
            connection.close()
            raise
        await self._process.connect(connection)
        self._hotplug = Hotplug(config, self._process.monitor)

    async def _continue_machine(self, config: LocalVm) -> None:
        """The guest is in the state of the saved machine. Raises VmStartFailed with QEMU's last output."""
        assert self._process is not None
        assert self._hotplug is not None
        try:
            async with asyncio.timeout(config.start_timeout_s):
                await continue_machine(self._process.monitor, config.saved_machine)
                if isinstance(config.agent_channel, VhostUserVsockChannel):
                    await self._hotplug.plug_vsock()
        except (ShimError, OSError) as error:  # a TimeoutError is one
            await self._process.await_exit_after(error)
            cause = f"{str(error) or 'no end in time'}; {self._process.describe_exit()}"
            raise VmStartFailed(f"continue vm {config.sandbox_id!r} from {config.saved_machine!r}: {cause}") from error

    async def _start_vsock_program(
        self, channel: VhostUserVsockChannel, config: LocalVm, reserved: User | None
    ) -> socket.socket:
        """The program serves the guest's vsock. Returns QEMU's connection to it."""
        directory = os.path.dirname(channel.device_path)
        if directory != config.vm_dir:
            self._acquire(LedgerEntry(kind=ResourceKind.DIRECTORY, key=directory))
            os.makedirs(directory, mode=0o700, exist_ok=True)
        with ExitStack() as fds:
            self._vsock_program, device = await start_program(
                channel,
                self._children,
                self._ledger,
                isolation=await isolated_vsock_program(channel, config, reserved, fds),
                dumps_core=config.dumps_core,
                timeout_s=config.start_timeout_s,
            )
        self._entries.append(LedgerEntry(kind=ResourceKind.PROCESS, key=channel.device_path))
        return device

    async def _encryption(self, config: LocalVm) -> Encryption:
        if not isinstance(config.guard, SevGuard | SnpGuard):
            return NO_ENCRYPTION
        return await query_encryption(
            config.hypervisor_path,
            self._children,
            self._ledger,
            name=f"{PROBE_NAME}{config.sandbox_id}",
            timeout_s=config.start_timeout_s,
        )

    def _make_vm_dir(self, config: LocalVm) -> None:
        """The VM's directory exists. `stop` removes it only if it was made here: it may have sockets of others."""
        if os.path.isdir(config.vm_dir):
            return
        self._acquire(LedgerEntry(kind=ResourceKind.DIRECTORY, key=config.vm_dir))
        with os_errors(f"make directory {config.vm_dir!r}", Internal):
            os.makedirs(config.vm_dir, mode=0o700, exist_ok=True)

    def _acquire(self, entry: LedgerEntry) -> None:
        self._ledger.acquire(entry)
        self._entries.append(entry)

    @within_s(lambda self: given_s(self._vm and self._vm.start_timeout_s), "start vm")
    async def start(self) -> None:
        monitor = self._require("start", Phase.CREATED)
        config = self._config("start")
        if isinstance(config.guard, SevGuard):
            await attest(monitor, self._children, config.guard, config.sandbox_id)
        await monitor.cont()
        self._phase = Phase.RUNNING

    @within_s(lambda self, timeout_s: timeout_s, "wait until the guest uses the agent's device")
    async def await_agent_device(self, timeout_s: float) -> None:
        """Waits for the channels that an early connection breaks.

        - vhost-device-vsock: if it has a connection before it has the guest's rings, it stops for good.
        - A serial port of a VM with firmware: OVMF has a driver for it (edk2-stable202308 and later), which opens a
          port that has a host, and the first request is lost there. A port without a host it leaves alone.
        """
        config = self._config("await agent device")
        match config.agent_channel:
            case SerialChannel() if config.boot.firmware is not None and not config.saved_machine:
                assert self._process is not None
                await self._process.agent_port_opened.wait()
            case VhostUserVsockChannel():
                await self._await_vsock(config)

    async def _await_vsock(self, config: LocalVm) -> None:
        monitor = self._require("await agent device", Phase.RUNNING, Phase.PAUSED)
        path = vsock_path(bus_of(config))
        while await monitor.is_vhost_started(path) is False:  # noqa: ASYNC110 - QEMU has no event for it
            await asyncio.sleep(_VSOCK_PAUSE_S)
        # QEMU's last messages about the rings may not have reached the program yet.
        await asyncio.sleep(_VSOCK_PAUSE_S)

    @within_s(VM_S, "save machine in '{directory}'")
    async def save_machine(self, directory: str) -> None:
        """The running VM is paused and saved in `directory`. It cannot run again; new VMs continue from the files."""
        monitor, config = self._require("save machine", Phase.RUNNING), self._config("save machine")
        if self._memory is None or config.saved_machine:
            raise FailedPrecondition(f"save machine of vm {self._sandbox_id!r}: it is not made to be copied")
        if isinstance(config.agent_channel, VhostUserVsockChannel):
            await monitor.device_remove(VSOCK_ID)
        await self.pause()
        await save_machine(monitor, self._memory, directory)

    @within_s(CHANGE_S, "pause vm")
    async def pause(self) -> None:
        monitor = self._require("pause", Phase.RUNNING)
        await monitor.stop()
        self._phase = Phase.PAUSED

    @within_s(CHANGE_S, "resume vm")
    async def resume(self) -> None:
        monitor = self._require("resume", Phase.PAUSED)
        await monitor.cont()
        self._phase = Phase.RUNNING

    async def wait(self) -> VmExit:
        if self._process is None or (ended := await self._process.wait()) is None:
            raise FailedPrecondition("wait for vm: it was not created")
        return ended

    @within_s(lambda self: given_s(self._vm and self._vm.stop_timeout_s), "stop vm")
    async def stop(self) -> None:
        """As `Hypervisor.stop`, in a task that goes on if the caller is cancelled. A failed `stop` may be repeated."""
        if self._stopping is None or (self._stopping.done() and not succeeded(self._stopping)):
            if self._process is not None:
                self._process.request_stop()
            self._stopping = asyncio.create_task(self._stop(), name=f"stop/vm/{self._sandbox_id}")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._process is not None:
            await self._process.stop()
        if self._vsock_program is not None:
            await self._vsock_program.end()
        if self._console is not None:
            self._console.close()
        if self._memory is not None:
            self._memory.close()
        self._phase = Phase.ENDED
        if self._vm is not None:
            logs = (f"{self._vm.vm_dir}/{name}" for name in ("console.log", "console.log.1"))
            for path in (*socket_paths(self._vm), *logs):
                with suppress(FileNotFoundError, NotADirectoryError):
                    os.unlink(path)
        while self._entries:
            await self._ledger.release(self._entries[-1])
            self._entries.pop()

    # Changes of a running VM

    @within_s(_plug_s, "plug device '{device.id}'")
    async def plug(self, device: Device) -> GuestLocation:
        return await self._live_hotplug(f"plug {device.id!r}").plug(device)

    @within_s(CHANGE_S, "unplug device '{device_id}'")
    async def unplug(self, device_id: str) -> None:
        await self._live_hotplug(f"unplug {device_id!r}").unplug(device_id)

    @within_s(CHANGE_S, "resize disk '{device_id}' to {size_bytes} bytes")
    async def resize_disk(self, device_id: str, size_bytes: int) -> None:
        await self._live_hotplug(f"resize disk {device_id!r}").resize_disk(device_id, size_bytes)

    @within_s(VM_S, "resize vm to {vcpus} vCPUs")
    async def resize_vcpus(self, vcpus: int) -> int:
        return await self._live_hotplug("resize vCPUs").resize_vcpus(vcpus)

    @within_s(VM_S, "resize vm to {memory_mib} MiB")
    async def resize_memory(self, memory_mib: int) -> int:
        return await self._live_hotplug("resize memory").resize_memory(memory_mib)

    @within_s(CHANGE_S, "list vCPU threads of vm")
    async def vcpu_thread_ids(self) -> tuple[int, ...]:
        monitor = self._require("list vCPU threads", Phase.CREATED, Phase.RUNNING, Phase.PAUSED)
        threads = tuple(cpu.thread_id for cpu in await monitor.cpus())
        # Otherwise a QEMU under the guest's control could have the shim move and pin other processes of the host.
        if not _are_threads_of(self.pid, threads):
            raise QmpError(f"list vCPU threads of vm {self._sandbox_id!r}: qemu names a thread that is not its own")
        return threads

    @property
    def _sandbox_id(self) -> str:
        """Empty before `create`."""
        return self._vm.sandbox_id if self._vm is not None else ""

    def _config(self, doing: str) -> LocalVm:
        if self._vm is None:
            raise FailedPrecondition(f"{doing}: the vm was not created")
        return self._vm

    def _live_hotplug(self, doing: str) -> Hotplug:
        self._require(doing, Phase.CREATED, Phase.RUNNING, Phase.PAUSED)
        assert self._hotplug is not None
        return self._hotplug

    def _require(self, doing: str, *phases: Phase) -> Monitor:
        """The monitor of a VM in one of `phases`. Raises Unavailable once it has ended, else FailedPrecondition."""
        ended = self._process.exit if self._process is not None else None
        if self._phase is Phase.ENDED or self._stopping is not None or ended is not None:
            how = f": {ended.reason}" if ended is not None else ""
            raise Unavailable(f"{doing}: vm {self._sandbox_id!r} has ended{how}")
        if self._phase not in phases or self._process is None:
            raise FailedPrecondition(f"{doing}: vm {self._sandbox_id!r} is {self._phase}")
        return self._process.monitor


def check_files(config: LocalVm) -> int:
    """The root image's size in bytes, 0 without one. Raises FailedPrecondition with the first unreadable file."""
    boot = config.boot
    files = {
        "hypervisor": config.hypervisor_path,
        "kernel": boot.kernel,
        "initrd": boot.initrd,
        "image": boot.image,
        "firmware": boot.firmware,
    }
    if isinstance(config.agent_channel, VhostUserVsockChannel):
        files["vsock program"] = config.agent_channel.program
    image_bytes = 0
    for what, path in files.items():
        if path is None:
            continue
        try:
            with open(path, "rb") as file:
                if what == "image":
                    image_bytes = file.seek(0, os.SEEK_END)
        except OSError as error:
            cause = describe_os_error(error)
            raise FailedPrecondition(f"start vm {config.sandbox_id!r}: open {what} {path!r}: {cause}") from error
    if boot.image is not None and image_bytes == 0:
        raise InvalidArgument(f"start vm {config.sandbox_id!r}: image {boot.image!r} is empty")
    return image_bytes


def _are_threads_of(pid: int, threads: tuple[int, ...]) -> bool:
    return all(os.path.isdir(f"/proc/{pid}/task/{thread}") for thread in threads)
