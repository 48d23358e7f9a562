"""The driver of a VM that a service makes outside this host.

Theory of operation:

    NEW --create: CreateVM--> CREATED --start: StartVM--> RUNNING --stop: StopVM--> ENDED

The protocol has no call that reports the end of a VM (`reports_end` is false): `wait` returns after `stop`. The sandbox
watches the agent instead, which it reaches through the service.

The VM costs money where it runs. So it is in the ledger before CreateVM is sent, and until StopVM is answered. A
service whose CreateVM or StartVM is cut off may forget the VM. So these calls go on when their caller is cancelled, and
`stop` waits for the end of such a call, which has a deadline, before it sends StopVM.
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

from hypervisors.remote.service import RemoteService, ReplyLost, ServiceRefused, ServiceUnreachable
from pyshim.concurrency.deadlines import MARGIN_S, given_s, within_s
from pyshim.concurrency.tasks import succeeded
from pyshim.model.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ShimError,
    Unavailable,
    Unimplemented,
)
from pyshim.model.guest import AgentAddress, UnixAddress
from pyshim.model.ledger import Ledger, LedgerEntry
from pyshim.model.observation import span
from pyshim.model.remote_vms import RemoteServiceConfig, RemoteVmState, remote_vm_entry
from pyshim.model.vm import Capabilities, Device, GuestLocation, RemoteVm, VmConfig, VmExit, VmExitKind
from pyshim.ttrpc import Code

log = logging.getLogger(__name__)

RETRY_S = 30.0
"""Seconds for which StopVM is repeated while the service restarts. After that the VM is left to `pyshim cleanup`."""
LATE_S = 30.0
"""Seconds to wait for the answer to CreateVM or StartVM after its deadline."""
SETTLE_S = 5.0
"""Seconds for which the service may still make the VM after the connection of CreateVM was lost."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0
"""Seconds before StopVM is repeated: the first time, and at most."""
_MAX_SOCKET_PATH_BYTES = 107
"""The size of sun_path in unix(7) without the final NUL."""


class Phase(StrEnum):
    NEW = "new"
    CREATED = "created"
    RUNNING = "running"
    ENDED = "ended"


class RemoteHypervisor:
    """The remote driver; an object has one VM. `Hypervisor` describes the calls."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        on_lost: Callable[[str], None] = lambda vm_id: None,
        clock_s: Callable[[], float] = time.time,
        retry_s: float = RETRY_S,
        late_s: float = LATE_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        """`on_lost` is called with the VM's id when the service no longer has a VM that was started."""
        self._ledger = ledger
        self._on_lost = on_lost
        self._clock_s = clock_s
        self._retry_s = retry_s
        self._late_s = late_s
        self._settle_s = settle_s
        self._settled_at = 0.0
        self._phase = Phase.NEW
        self._vm: RemoteVm | None = None
        self._agent_path = ""
        self._asked_until_s = 0
        self._entry: LedgerEntry | None = None
        self._call: asyncio.Task[None] | None = None
        self._exit: asyncio.Future[VmExit] | None = None
        self._stopping: asyncio.Task[None] | None = None

    # State

    def capabilities(self) -> Capabilities:
        """No capability: a remote VM can only be stopped."""
        self._config("ask capabilities")
        return Capabilities(
            block_hotplug=False,
            network_hotplug=False,
            cpu_hotplug=False,
            memory_hotplug=False,
            pause=False,
            reports_end=False,
        )

    @property
    def pid(self) -> int:
        return 0

    @property
    def helper_pids(self) -> tuple[int, ...]:
        return ()

    @property
    def agent_address(self) -> AgentAddress:
        if not self._agent_path:
            raise FailedPrecondition("ask agent address: the remote vm was not created")
        return UnixAddress(self._agent_path)

    def console_tail(self) -> str:
        return ""

    def saved(self) -> Mapping[str, object]:
        config = self._config("save the remote vm")
        return {"Type": "remote", "UUID": config.uuid, "APISocket": self._remote.socket_path, "Pid": 0}

    # From create to stop

    async def await_agent_device(self, timeout_s: float) -> None:
        """Returns at once: the service's socket takes connections from the start."""

    @within_s(lambda self, config: config.start_timeout_s + MARGIN_S, "create vm '{config.sandbox_id}'")
    async def create(self, config: VmConfig) -> None:
        if self._phase is not Phase.NEW or self._vm is not None:
            raise FailedPrecondition(
                f"create remote vm {config.sandbox_id!r}: this driver object has made its vm already"
            )
        self._vm = config = _checked(config)
        self._exit = asyncio.get_running_loop().create_future()
        try:
            await self._create(config)
        except BaseException:
            try:
                await self.stop()
            except ShimError as undo_error:
                log.warning("undo failed", extra={"sandbox": config.sandbox_id, "error": str(undo_error)})
            raise
        self._set_phase(Phase.CREATED)

    async def _create(self, config: RemoteVm) -> None:
        remote = self._remote
        # Before the VM is in the ledger: a service that cannot be reached has made nothing.
        version = await self._version()
        self._require("create remote vm", Phase.NEW)  # a `stop` meanwhile found no VM
        self._record_call(RemoteVmState.ASKED)
        request = self._service.create_vm(
            config.sandbox_id, dict(remote.annotations), config.netns_path or "", remote.timeout_s, self._late_s
        )
        with span(f"ask CreateVM of {config.machine_type}" if config.machine_type else "ask CreateVM"):
            await self._run_call(
                "CreateVM", f"create remote vm {config.sandbox_id!r}", self._finish_create(config.sandbox_id, request)
            )
        log.info(
            "remote vm created", extra={"sandbox": config.sandbox_id, "service": remote.socket_path, "version": version}
        )

    async def _finish_create(self, vm_id: str, request: Coroutine[Any, Any, str]) -> None:
        """CreateVM is answered and the ledger has the answer. Runs on when the caller is cancelled."""
        try:
            self._agent_path = _checked_agent_path(vm_id, await request)
        except ServiceUnreachable:
            self._record(RemoteVmState.STOPPED)
            raise
        except ShimError as exc:
            if settle_s := self._settle_after_s(exc):
                self._settled_at = asyncio.get_running_loop().time() + settle_s
                self._asked_until_s = math.ceil(self._clock_s() + settle_s)
            self._record(RemoteVmState.ASKED if settle_s else RemoteVmState.KNOWN)
            raise
        self._record(RemoteVmState.KNOWN)

    def _settle_after_s(self, error: ShimError) -> float:
        """The seconds after this error of CreateVM for which the service may still make the VM."""
        if isinstance(error, ReplyLost):
            return self._settle_s
        # Some ttrpc servers send this status at the deadline while the call goes on.
        return self._late_s if isinstance(error, ServiceRefused) and error.status == Code.DEADLINE_EXCEEDED else 0

    async def _version(self) -> str:
        try:
            return await self._service.version()
        except ServiceRefused as exc:
            # Kata's runtimes never send Version, so a service may lack it.
            log.debug("version of remote hypervisor", extra={"error": str(exc)})
            return "unknown"

    @within_s(lambda self: given_s(self._vm and self._vm.start_timeout_s), "start vm")
    async def start(self) -> None:
        config = self._require("start", Phase.CREATED)
        self._record_call(RemoteVmState.STARTED)
        request = self._service.start_vm(config.sandbox_id, self._remote.timeout_s, self._late_s)
        with span("ask StartVM"):
            await self._run_call("StartVM", f"start remote vm {config.sandbox_id!r}", self._finish_start(request))
        _check_agent_socket(config.sandbox_id, self._agent_path)
        self._set_phase(Phase.RUNNING)
        log.info("remote vm started", extra={"sandbox": config.sandbox_id})

    async def _finish_start(self, request: Coroutine[Any, Any, None]) -> None:
        """StartVM is answered. Runs on when the caller is cancelled."""
        try:
            await request
        except ServiceUnreachable:
            self._record(RemoteVmState.KNOWN)
            raise

    async def wait(self) -> VmExit:
        if self._exit is None:
            raise FailedPrecondition("wait for remote vm: it was not created")
        return await asyncio.shield(self._exit)

    @within_s(lambda self: given_s(self._vm and self._vm.stop_timeout_s), "stop vm")
    async def stop(self) -> None:
        """As `Hypervisor.stop`, in a task that goes on if the caller is cancelled. Later calls wait for that task."""
        if self._stopping is None or (self._stopping.done() and not succeeded(self._stopping)):
            name = self._vm.sandbox_id if self._vm is not None else ""
            self._stopping = asyncio.create_task(self._stop(), name=f"stop/vm/{name}")
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        self._phase = Phase.ENDED
        if self._call is not None:
            await asyncio.wait([self._call])
        if self._entry is not None:
            if self._entry.detail["state"] not in (RemoteVmState.STOPPED, RemoteVmState.LOST):
                self._record(await self._end(self._config("stop").sandbox_id))
            await self._ledger.release(self._entry)
            self._entry = None
        if self._exit is not None and not self._exit.done():
            assert self._vm is not None
            reason = f"remote vm {self._vm.sandbox_id!r} was stopped"
            self._exit.set_result(VmExit(kind=VmExitKind.REQUESTED, reason=reason))

    async def _end(self, vm_id: str) -> RemoteVmState:
        """STOPPED after the service has answered StopVM or never had the VM; LOST when it no longer has a started VM.

        Raises ShimError if the service answers anything else, or does not answer.
        """
        remote = self._remote
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + self._retry_s, FIRST_PAUSE_S
        while True:
            try:
                await self._service.stop_vm(vm_id, remote.stop_timeout_s)
                return RemoteVmState.STOPPED
            except NotFound as exc:
                if self._entry is not None and self._entry.detail["state"] == RemoteVmState.STARTED:
                    log.warning(
                        "remote vm lost: its service no longer has it; it may run on and cost money",
                        extra={"sandbox": vm_id, "service": remote.socket_path, "error": str(exc)},
                    )
                    self._on_lost(vm_id)
                    return RemoteVmState.LOST
                if loop.time() >= self._settled_at:
                    log.info("remote vm already stopped", extra={"sandbox": vm_id, "error": str(exc)})
                    return RemoteVmState.STOPPED
            except (ServiceUnreachable, ReplyLost) as exc:
                if loop.time() + pause_s > until:
                    raise
                log.warning("stop remote vm again", extra={"sandbox": vm_id, "error": str(exc)})
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_PAUSE_S)

    async def _run_call(self, method: str, action: str, call: Coroutine[Any, Any, None]) -> None:
        """The call has ended. It goes on after its deadline or a cancellation; `stop` then waits for it."""
        remote = self._remote
        call_task = asyncio.create_task(call, name=f"{method}/{self._config(action).sandbox_id}")
        call_task.add_done_callback(_log_failure)
        self._call = call_task
        done, _ = await asyncio.wait([call_task], timeout=remote.timeout_s)
        if not done:
            raise DeadlineExceeded(f"{action}: '{remote.socket_path}' has not answered within {remote.timeout_s:g} s")
        call_task.result()

    def _record_call(self, state: RemoteVmState) -> None:
        """The ledger has the state and the time by which the call, sent next, has ended."""
        self._asked_until_s = math.ceil(self._clock_s() + self._remote.timeout_s + self._late_s)
        self._record(state)

    def _record(self, state: RemoteVmState) -> None:
        """The ledger has the VM in this state."""
        remote = self._remote
        entry = remote_vm_entry(
            self._config("record the remote vm").sandbox_id,
            socket_path=remote.socket_path,
            state=state,
            agent=self._agent_path,
            asked_until_s=self._asked_until_s,
            stop_timeout_s=math.ceil(remote.stop_timeout_s),
        )
        self._ledger.acquire(entry)
        self._entry = entry

    def _set_phase(self, phase: Phase) -> None:
        if self._phase is not Phase.ENDED:
            self._phase = phase

    # Calls that a remote VM refuses

    async def pause(self) -> None:
        raise self._refused("pause vm", Phase.RUNNING)

    async def resume(self) -> None:
        raise self._refused("resume vm", Phase.RUNNING)

    async def plug(self, device: Device) -> GuestLocation:
        raise self._refused(f"plug {device.id!r}", Phase.CREATED, Phase.RUNNING)

    async def unplug(self, device_id: str) -> None:
        self._require(f"unplug {device_id!r}", Phase.CREATED, Phase.RUNNING)
        raise NotFound(f"unplug {device_id!r}: a remote vm has no plugged devices")

    async def resize_disk(self, device_id: str, size_bytes: int) -> None:
        self._require(f"resize disk {device_id!r}", Phase.CREATED, Phase.RUNNING)
        raise NotFound(f"resize disk {device_id!r}: a remote vm has no plugged devices")

    async def resize_vcpus(self, vcpus: int) -> int:
        config = self._require("resize vCPUs", Phase.CREATED, Phase.RUNNING)
        if vcpus < 1:
            raise InvalidArgument(f"resize to {vcpus} vCPUs: at least 1")
        return config.cpu.boot_vcpus

    async def resize_memory(self, memory_mib: int) -> int:
        config = self._require("resize memory", Phase.CREATED, Phase.RUNNING)
        if memory_mib > config.memory.boot_mib:
            raise self._refused(f"resize to {memory_mib} MiB", Phase.CREATED, Phase.RUNNING)
        return config.memory.boot_mib

    async def vcpu_thread_ids(self) -> tuple[int, ...]:
        """None: the vCPUs are not on this host."""
        self._require("list vCPU threads", Phase.CREATED, Phase.RUNNING)
        return ()

    def _refused(self, doing: str, *phases: Phase) -> ShimError:
        config = self._require(doing, *phases)
        return Unimplemented(
            f"{doing}: vm {config.sandbox_id!r} is remote: its service can start and stop it, and nothing else"
        )

    # Checks

    def _config(self, doing: str) -> RemoteVm:
        if self._vm is None:
            raise FailedPrecondition(f"{doing}: the remote vm was not created")
        return self._vm

    @property
    def _remote(self) -> RemoteServiceConfig:
        return self._config("reach service").service

    @property
    def _service(self) -> RemoteService:
        return RemoteService(self._remote.socket_path)

    def _require(self, doing: str, *phases: Phase) -> RemoteVm:
        if self._phase is Phase.ENDED:
            raise Unavailable(f"{doing}: the remote vm has ended")
        if self._phase not in phases:
            raise FailedPrecondition(f"{doing}: the remote vm is {self._phase}")
        return self._config(doing)


def _checked(config: VmConfig) -> RemoteVm:
    """`config`. Raises InvalidArgument or FailedPrecondition for a VM that no service can make."""
    action = f"create remote vm {config.sandbox_id!r}"
    if not isinstance(config, RemoteVm):
        raise InvalidArgument(f"{action}: no service was named")
    if config.netns_path and not os.path.exists(config.netns_path):
        raise FailedPrecondition(f"{action}: network namespace '{config.netns_path}' does not exist")
    return config


def _checked_agent_path(vm_id: str, path: str) -> str:
    """`path`. Raises FailedPrecondition when it cannot be the path of a socket."""
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
    """Raises FailedPrecondition when `path` is no socket. It need not exist yet: the agent's connector waits for it."""
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise FailedPrecondition(f"start remote vm {vm_id!r}: look at '{path}': {exc.strerror}") from exc
    if not is_socket:
        raise FailedPrecondition(f"start remote vm {vm_id!r}: its agent's '{path}' is not a socket")


def _log_failure(task: asyncio.Task[None]) -> None:
    """Logs the failure of a call whose caller was cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.debug("call of remote hypervisor failed", extra={"task": task.get_name(), "error": str(error)})
