"""One VM that a service makes elsewhere, from `create` to `stop`.

Theory of operation:

    NEW --create: CreateVM--> CREATED --start: StartVM--> RUNNING --stop: StopVM--> ENDED

Nobody tells when such a VM ends by itself: the protocol has no call for it. The agent, reached through the service, is
the one sign of life, and the sandbox watches it (`tells_end`); `wait` here answers once the VM was stopped.

The VM costs money where it runs, so it is in the ledger before CreateVM is sent, and stays there until StopVM was
answered. A call that its caller gives up goes on: a service whose CreateVM or StartVM is cut off may forget what it has
begun, so `stop` first waits for the one under way, which has its own deadline. StopVM is given up last of all.
"""

import asyncio
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from typing import Any

from hypervisors.base import Capabilities, Device, GuestLocation, VmConfig, VmExit, VmExitKind
from hypervisors.remote.service import RemoteService, ReplyLost, ServiceRefused, ServiceUnreachable
from pyshim.model.agent_address import AgentAddress, UnixAddress
from pyshim.model.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ShimError,
    Unavailable,
    Unimplemented,
)
from pyshim.model.ledger import Ledger, LedgerEntry
from pyshim.model.remote_vms import RemoteServiceConfig, RemoteVmState, remote_vm_entry
from pyshim.ttrpc import Code

log = logging.getLogger("hypervisors.remote")

REACH_S = 30.0
"""A service that is just being restarted is tried again for so long, before a VM is given up to whoever cleans up."""
LATE_S = 30.0
"""A service whose deadline has passed may still come to its end, and its answer says what there is to stop."""
DOUBT_S = 5.0
"""After a CreateVM whose connection was lost: a service that has not died may yet make the VM it does not know."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0
_MAX_SOCKET_PATH_BYTES = 107
"""sun_path of unix(7), less its final NUL."""


class Phase(StrEnum):
    NEW = "new"
    CREATED = "created"
    RUNNING = "running"
    ENDED = "ended"


class RemoteVm:
    """The remote driver: one object, one VM. See `Hypervisor` for what each call promises."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        clock_s: Callable[[], float] = time.time,
        reach_s: float = REACH_S,
        late_s: float = LATE_S,
        doubt_s: float = DOUBT_S,
    ) -> None:
        self._ledger = ledger
        self._clock_s = clock_s
        self._reach_s = reach_s
        self._late_s = late_s
        self._doubt_s = doubt_s
        self._doubt_until = 0.0
        self._phase = Phase.NEW
        self._vm: VmConfig | None = None
        self._agent_path = ""
        self._asked_until_s = 0
        self._entry: LedgerEntry | None = None
        self._asking: asyncio.Task[None] | None = None
        self._exit: asyncio.Future[VmExit] | None = None
        self._stopping: asyncio.Task[None] | None = None

    # What is known

    def capabilities(self) -> Capabilities:
        """Nothing can be done to such a VM but to end it."""
        self._config("ask capabilities")
        return Capabilities(
            share_fs=False,
            block_hotplug=False,
            network_hotplug=False,
            cpu_hotplug=False,
            memory_hotplug=False,
            pause=False,
            tells_end=False,
        )

    @property
    def pid(self) -> int:
        return 0

    @property
    def agent_address(self) -> AgentAddress:
        if not self._agent_path:
            raise FailedPrecondition("ask agent address: the remote vm was not created")
        return UnixAddress(self._agent_path)

    def console_tail(self) -> str:
        return ""

    def saved(self) -> Mapping[str, object]:
        config, remote = self._config("save the remote vm"), self._service_config("save the remote vm")
        return {"Type": "remote", "UUID": config.uuid, "APISocket": remote.socket_path, "Pid": 0}

    # Life

    async def create(self, config: VmConfig) -> None:
        if self._phase is not Phase.NEW or self._vm is not None:
            raise FailedPrecondition(f"create remote vm {config.sandbox_id!r}: this driver object has had its vm")
        _check_config(config)
        self._vm = config
        self._exit = asyncio.get_running_loop().create_future()
        try:
            await self._create(config, self._service_config("create"))
        except BaseException:
            try:
                await self.stop()
            except ShimError as undo_error:
                log.warning("undo failed", extra={"sandbox": config.sandbox_id, "error": str(undo_error)})
            raise
        self._become(Phase.CREATED)

    async def _create(self, config: VmConfig, remote: RemoteServiceConfig) -> None:
        service = self._service()
        # Before anything is on record: a service that is not there has made nothing.
        version = await self._version(service)
        self._live("create remote vm", Phase.NEW)  # a `stop` meanwhile found nothing to end, and will not come again
        self._note_asked(remote, RemoteVmState.ASKED)
        request = service.create_vm(
            config.sandbox_id, dict(remote.annotations), config.netns_path or "", remote.timeout_s, self._late_s
        )
        await self._ask(
            "CreateVM", f"create remote vm {config.sandbox_id!r}", self._created(config.sandbox_id, request)
        )
        log.info(
            "remote vm created",
            extra={"sandbox": config.sandbox_id, "service": remote.socket_path, "version": version},
        )

    async def _created(self, vm_id: str, request: Coroutine[Any, Any, str]) -> None:
        """CreateVM has been answered. That it has ended is on record even when nobody waits for it any more."""
        try:
            self._agent_path = _checked_agent_path(vm_id, await request)
        except ServiceUnreachable:
            self._note(RemoteVmState.STOPPED)
            raise
        except ShimError as exc:
            if doubt_s := self._doubt_after_s(exc):
                self._doubt_until = asyncio.get_running_loop().time() + doubt_s
                self._asked_until_s = math.ceil(self._clock_s() + doubt_s)
            self._note(RemoteVmState.ASKED if doubt_s else RemoteVmState.KNOWN)
            raise
        self._note(RemoteVmState.KNOWN)

    def _doubt_after_s(self, error: ShimError) -> float:
        """How long after this failure of CreateVM the service may yet make the VM it does not know."""
        if isinstance(error, ReplyLost):
            return self._doubt_s
        # Some servers answer so by themselves at the deadline, while the call goes on.
        return self._late_s if isinstance(error, ServiceRefused) and error.status == Code.DEADLINE_EXCEEDED else 0

    async def _version(self, service: RemoteService) -> str:
        try:
            return await service.version()
        except ServiceRefused as exc:
            # Kata's runtimes never ask, so a service may not have the call.
            log.debug("version of remote hypervisor", extra={"error": str(exc)})
            return "unknown"

    async def start(self) -> None:
        config = self._live("start", Phase.CREATED)
        remote = self._service_config("start")
        self._note_asked(remote, RemoteVmState.KNOWN)
        request = self._service().start_vm(config.sandbox_id, remote.timeout_s, self._late_s)
        await self._ask("StartVM", f"start remote vm {config.sandbox_id!r}", request)
        _check_agent_socket(config.sandbox_id, self._agent_path)
        self._become(Phase.RUNNING)
        log.info("remote vm started", extra={"sandbox": config.sandbox_id})

    async def wait(self) -> VmExit:
        if self._exit is None:
            raise FailedPrecondition("wait for remote vm: it was not created")
        return await asyncio.shield(self._exit)

    async def stop(self) -> None:
        """As `Hypervisor.stop`; runs on in its own task when the caller gives up, and may be asked for again."""
        if self._stopping is None or (self._stopping.done() and not _succeeded(self._stopping)):
            name = self._vm.sandbox_id if self._vm is not None else ""
            self._stopping = asyncio.create_task(self._stop(), name=f"stop/vm/{name}")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self._phase = Phase.ENDED
        if self._asking is not None:
            await asyncio.wait([self._asking])
        if self._entry is not None:
            if self._entry.detail["state"] != RemoteVmState.STOPPED:
                await self._end(self._service_config("stop"))
                self._note(RemoteVmState.STOPPED)
            await self._ledger.release(self._entry)
            self._entry = None
        if self._exit is not None and not self._exit.done():
            assert self._vm is not None
            reason = f"remote vm {self._vm.sandbox_id!r} was stopped"
            self._exit.set_result(VmExit(kind=VmExitKind.REQUESTED, reason=reason))

    async def _end(self, remote: RemoteServiceConfig) -> None:
        """The service has answered StopVM, or knows no such VM. Raises ShimError when neither can be had of it."""
        vm_id = self._config("stop").sandbox_id
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + self._reach_s, FIRST_PAUSE_S
        while True:
            try:
                await self._service().stop_vm(vm_id, remote.stop_timeout_s)
                return
            except NotFound as exc:
                if loop.time() >= self._doubt_until:
                    log.info("remote vm was gone already", extra={"sandbox": vm_id, "error": str(exc)})
                    return
            except (ServiceUnreachable, ReplyLost) as exc:
                if loop.time() + pause_s > until:
                    raise
                log.warning("stop remote vm again", extra={"sandbox": vm_id, "error": str(exc)})
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_PAUSE_S)

    async def _ask(self, method: str, action: str, call: Coroutine[Any, Any, None]) -> None:
        """The call has ended. When the caller gives up, or its time is over, it goes on, and `stop` waits for it."""
        remote = self._service_config(action)
        asking = asyncio.create_task(call, name=f"{method}/{self._config(action).sandbox_id}")
        asking.add_done_callback(_retrieved)
        self._asking = asking
        done, _ = await asyncio.wait([asking], timeout=remote.timeout_s)
        if not done:
            raise DeadlineExceeded(f"{action}: '{remote.socket_path}' has not answered within {remote.timeout_s:g} s")
        asking.result()

    def _note_asked(self, remote: RemoteServiceConfig, state: RemoteVmState) -> None:
        """The ledger says until when the call that is about to be sent may take."""
        self._asked_until_s = math.ceil(self._clock_s() + remote.timeout_s + self._late_s)
        self._note(state)

    def _note(self, state: RemoteVmState) -> None:
        """The ledger has the VM in this state."""
        config, remote = self._config("note"), self._service_config("note")
        entry = remote_vm_entry(
            config.sandbox_id,
            socket_path=remote.socket_path,
            state=state,
            agent=self._agent_path,
            asked_until_s=self._asked_until_s,
            stop_timeout_s=math.ceil(remote.stop_timeout_s),
        )
        self._ledger.acquire(entry)
        self._entry = entry

    def _become(self, phase: Phase) -> None:
        if self._phase is not Phase.ENDED:
            self._phase = phase

    # What cannot be done

    async def pause(self) -> None:
        raise self._refused("pause vm", Phase.RUNNING)

    async def resume(self) -> None:
        raise self._refused("resume vm", Phase.RUNNING)

    async def plug(self, device: Device) -> GuestLocation:
        raise self._refused(f"plug {device.id!r}", Phase.CREATED, Phase.RUNNING)

    async def unplug(self, device_id: str) -> None:
        self._live(f"unplug {device_id!r}", Phase.CREATED, Phase.RUNNING)
        raise NotFound(f"unplug {device_id!r}: a remote vm has no plugged devices")

    async def resize_disk(self, device_id: str, size_bytes: int) -> None:
        self._live(f"resize disk {device_id!r}", Phase.CREATED, Phase.RUNNING)
        raise NotFound(f"resize disk {device_id!r}: a remote vm has no plugged devices")

    async def resize_vcpus(self, vcpus: int) -> int:
        config = self._live("resize vCPUs", Phase.CREATED, Phase.RUNNING)
        if vcpus < 1:
            raise InvalidArgument(f"resize to {vcpus} vCPUs: at least 1")
        return config.cpu.boot_vcpus

    async def resize_memory(self, memory_mib: int) -> int:
        config = self._live("resize memory", Phase.CREATED, Phase.RUNNING)
        if memory_mib > config.memory.boot_mib:
            raise self._refused(f"resize to {memory_mib} MiB", Phase.CREATED, Phase.RUNNING)
        return config.memory.boot_mib

    async def vcpu_thread_ids(self) -> tuple[int, ...]:
        """None are on this host."""
        self._live("list vCPU threads", Phase.CREATED, Phase.RUNNING)
        return ()

    def _refused(self, doing: str, *phases: Phase) -> ShimError:
        config = self._live(doing, *phases)
        return Unimplemented(
            f"{doing}: vm {config.sandbox_id!r} is remote: its service can start and stop it, and nothing else"
        )

    # Pieces

    def _config(self, doing: str) -> VmConfig:
        if self._vm is None:
            raise FailedPrecondition(f"{doing}: the remote vm was not created")
        return self._vm

    def _service_config(self, doing: str) -> RemoteServiceConfig:
        remote = self._config(doing).remote
        assert remote is not None, "_check_config has seen to it"
        return remote

    def _service(self) -> RemoteService:
        return RemoteService(self._service_config("reach service").socket_path)

    def _live(self, doing: str, *phases: Phase) -> VmConfig:
        if self._phase is Phase.ENDED:
            raise Unavailable(f"{doing}: the remote vm has ended")
        if self._phase not in phases:
            raise FailedPrecondition(f"{doing}: the remote vm is {self._phase}")
        return self._config(doing)


def _check_config(config: VmConfig) -> None:
    """Raises InvalidArgument or FailedPrecondition for what no service could make anything of."""
    action = f"create remote vm {config.sandbox_id!r}"
    if config.remote is None:
        raise InvalidArgument(f"{action}: no service was named")
    if config.nics or config.vhost_user_nics:
        raise InvalidArgument(f"{action}: its service connects the network; no device of this host can reach it")
    if config.netns_path and not os.path.exists(config.netns_path):
        raise FailedPrecondition(f"{action}: network namespace '{config.netns_path}' does not exist")


def _checked_agent_path(vm_id: str, path: str) -> str:
    """Raises FailedPrecondition for what can be no socket of this host."""
    problem = ""
    if not path:
        problem = "no path"
    elif not path.startswith("/") or not path.isprintable():
        problem = f"{path[:200]!r}, no absolute path"
    elif len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        problem = f"a path of {len(path)} characters, too long for a socket"
    if problem:
        raise FailedPrecondition(f"create remote vm {vm_id!r}: the service gave {problem} for its agent's socket")
    return path


def _check_agent_socket(vm_id: str, path: str) -> None:
    """What is at `path` can be connected to. It may still be missing: the agent's connector waits for it."""
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise FailedPrecondition(f"start remote vm {vm_id!r}: look at '{path}': {exc.strerror}") from exc
    if not is_socket:
        raise FailedPrecondition(f"start remote vm {vm_id!r}: '{path}', which its agent should answer at, is no socket")


def _succeeded(task: "asyncio.Task[None]") -> bool:
    return not task.cancelled() and task.exception() is None


def _retrieved(task: "asyncio.Task[None]") -> None:
    """A failure nobody waits for any more is said in the log."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("call of remote hypervisor failed", extra={"task": task.get_name(), "error": str(error)})
