"""One container: its host mounts, its init and exec processes, its end.

The init's exit is published after that of every exec: they are in its pid namespace, so they have ended with it. After
the init's exit only the deletion is published.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from msgspec.structs import replace

from pyshim.concurrency.undo import Undo
from pyshim.model.errors import (
    AgentGone,
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    ShimError,
    Unavailable,
    Unimplemented,
)
from pyshim.model.guest import ContainerStats
from pyshim.model.ids import ExecId
from pyshim.model.observation import span
from pyshim.model.oci import Caller, OciSpec, caller_of
from pyshim.model.plans import ContainerPlan
from pyshim.model.seams import Agent, ContainerAgent, ProcessStreams
from pyshim.model.task import (
    EXIT_KILLED,
    EXIT_SANDBOX_LOST,
    CreateTask,
    ExecAdded,
    ExecStarted,
    ExecTask,
    ExitStatus,
    ProcessInfo,
    Status,
    Stdio,
    TaskExited,
    TaskOom,
    TaskPaused,
    TaskResumed,
    TaskStarted,
)
from pyshim.pod.environment import Environment
from pyshim.pod.hooks import ContainerHooks
from pyshim.pod.plan.guest_spec import guest_process, guest_resources, refused_program
from pyshim.pod.process import SIGKILL, Process
from pyshim.pod.sandbox import PodListener, Sandbox
from pyshim.resources.sizing.memory_volumes import resize_memory_volumes
from pyshim.resources.volumes.live import make_mounts

log = logging.getLogger(__name__)

# The kubelet gives Delete ten seconds. The next three and CLOSE_DRAIN_S of `process.py` share them.
KILL_CREATED_WAIT_S = 2.0
REMOVE_TIMEOUT_S = 3
EXEC_EXIT_WAIT_S = 5.0
EXIT_START_FAILED = 128
"""containerd's StartError status."""
LATE_S = (0.0, 1.0, 5.0, 20.0, 60.0)
"""Pauses, in seconds, between the attempts to undo what the guest may have done after its call was given up."""


class Container:
    def __init__(
        self,
        *,
        request: CreateTask,
        plan: ContainerPlan,
        spec: OciSpec,
        resources: Mapping[str, Any],
        agent: ContainerAgent,
        hooks: ContainerHooks,
        sandbox: Sandbox,
        environment: Environment,
        namespace: str,
        listener: PodListener,
    ) -> None:
        """`resources` are the limits that the size of the VM is computed from; `namespace` is containerd's."""
        self.id = request.container_id
        self.request = request
        self.pid = sandbox.pid
        self.hooks = hooks
        self.plan = plan
        self._spec = spec
        self._resources = resources
        self._agent = agent
        self._sandbox = sandbox
        self._env = environment
        self._namespace = namespace
        self._tasks = sandbox.services.tasks
        self._listener = listener
        self._init: Process | None = None
        self._execs: dict[ExecId, Process] = {}
        self._exec_specs: dict[ExecId, Mapping[str, Any]] = {}
        self._undo = Undo(f"container '{self.id}'")
        self._bytes_of_gone_execs = Counter[str]()
        """Bytes by stream of the execs that are deleted."""
        self.oom_kills = 0
        self.has_kill_deadline = False
        """A task waits for the init's exit after a KILL (`killing.py`)."""

    @property
    def caller(self) -> Caller:
        return caller_of(self._spec.annotations)

    @property
    def bytes_by_stream(self) -> Counter[str]:
        """Bytes by stream that have reached their reader, of all processes so far."""
        return sum(
            (each.pumps.bytes_by_stream for each in self._execs.values()),
            self._bytes_of_gone_execs + self.init.pumps.bytes_by_stream,
        )

    @property
    def init(self) -> Process:
        assert self._init is not None, "create() makes the init process"
        return self._init

    def process(self, exec_id: ExecId | None) -> Process:
        if exec_id is None:
            return self.init
        process = self._execs.get(exec_id)
        if process is None:
            raise NotFound(f"find exec '{exec_id}' of container '{self.id}': no such exec")
        return process

    def processes(self) -> tuple[ProcessInfo, ...]:
        """The init and the execs that run. The init is there after its end, too: a restarted containerd removes a task
        without processes.
        """
        running = [exec_id for exec_id, process in self._execs.items() if process.status is Status.RUNNING]
        return (
            ProcessInfo(pid=self.pid, exec_id=None),
            *(ProcessInfo(pid=self.pid, exec_id=exec_id) for exec_id in running),
        )

    async def create(self, timeout_s: float) -> None:
        """The container is created in the guest. When this raises, nothing of it is left."""
        try:
            self._init = await self._make(timeout_s)
        except BaseException:
            await self._undo.run()
            raise
        self._tasks.supervise(f"wait/{self.id}", self._watch_init())

    async def _make(self, timeout_s: float) -> Process:
        sandbox, vm = self._sandbox, self._sandbox.vm
        vm.note_groups(self.id, self._spec.group_ids)
        if self.plan.share_mounts or self.plan.binds:
            self._undo.push(self._free_share, sandbox.agent)
        await make_mounts(self.plan, host=self._env.host, ledger=sandbox.services.ledger, undo=self._undo)
        with span("open streams"):
            streams = await self._open_streams(self.request.stdio, self.id)
        self._undo.push(streams.close)
        self._undo.push(vm.container_devices.detach, self.id)
        guest = await vm.container_devices.attach(await vm.attachments.attach(self.plan, self._undo), self._spec)
        self._undo.push(vm.resizer.leave, self.id)
        await vm.resizer.join(self.id, self._resources)
        self._undo.push(vm.swap.leave, self.id)
        await vm.swap.join(self.id, self._resources)
        await vm.attachments.copies.attach(self.plan, self._agent, self._undo)
        # Pushed before the call, since the guest may carry out a call that was cancelled here.
        self._undo.push(remove_from_guest, self._agent, self.id)
        program = guest.spec.get("process") or {}
        with span("create container in guest"), naming_program(f"create container '{self.id}'", program):
            await self._agent.create_container(guest, timeout_s)
        return self._new_process(None, self.request.stdio, streams)

    async def _free_share(self, agent: Agent) -> None:
        """The agent lets go of what the container had in the share, while the caller of Delete has its answer.

        Otherwise what the container has written stays on the host's disk, though removed, until the pod ends:
        virtiofsd holds the files. Kata asks at the same place.
        """
        self._tasks.supervise(f"free share/{self.id}", free_share(agent, self.id))

    async def _open_streams(self, stdio: Stdio, process_id: str) -> ProcessStreams:
        return await self._env.host.open_streams(stdio, namespace=self._namespace, process_id=process_id)

    def _new_process(self, exec_id: ExecId | None, stdio: Stdio, streams: ProcessStreams | None) -> Process:
        return Process(
            container=self.request,
            exec_id=exec_id,
            pid=self.pid,
            stdio=stdio,
            streams=streams,
            agent=self._agent,
            tasks=self._tasks,
            clock_ns=self._env.clock_ns,
        )

    async def start(self, exec_id: ExecId | None) -> int:
        """The process runs. When this raises, its exit is latched, so that an earlier Wait returns."""
        process = self.process(exec_id)
        async with process.lock:
            process.require(Status.CREATED, verb="start")
            if exec_id is None:
                await self._start_init(process)
            else:
                await self._start_exec(process, exec_id)
        if exec_id is None and process.status is Status.RUNNING:
            self._listener.init_started()
            await self.hooks.after_start(self.pid)
        elif exec_id is None:
            self._listener.changed()
        return process.pid

    async def _start_init(self, process: Process) -> None:
        try:
            await self._sandbox.vm.network.before_start()
            await self._agent.start_container(self.id)
        except ShimError as exc:
            await self._fail_start(process, exc)
            raise
        process.become(Status.RUNNING)
        process.start_pumps()
        self._env.publisher.publish(TaskStarted(container_id=self.id, pid=process.pid))

    async def _start_exec(self, process: Process, exec_id: ExecId) -> None:
        try:
            self._require_running(f"start exec '{exec_id}'")
            process.pumps.attach(await self._open_streams(process.stdio, exec_id))
            self._require_running(f"start exec '{exec_id}'")  # again: starting a log program may take long
            spec = self._exec_specs.pop(exec_id)
            with naming_program(f"run exec '{exec_id}' in container '{self.id}'", spec):
                await self._agent.exec_process(self.id, exec_id, spec)
            if self.init.exit is not None:  # it ended meanwhile, and nothing may be published after its exit
                self._require_running(f"start exec '{exec_id}'")
        except ShimError as exc:
            await self._fail_start(process, exc)
            raise
        process.become(Status.RUNNING)
        process.start_pumps()
        self._env.publisher.publish(ExecStarted(container_id=self.id, exec_id=exec_id, pid=process.pid))
        self._tasks.supervise(f"wait/{process.label}", self._watch_exec(process))

    def _require_running(self, action: str) -> None:
        if self.init.status is not Status.RUNNING:
            raise FailedPrecondition(f"{action}: container '{self.id}' is {self.init.status.name.lower()}")

    async def _fail_start(self, process: Process, cause: ShimError) -> None:
        """The exit is latched and the streams are closed. A client waits for both before it reports `cause`."""
        if isinstance(cause, DeadlineExceeded):
            self._tasks.supervise(f"late/{process.label}", self._end_late(process))
        self._report_ended(process, EXIT_SANDBOX_LOST if isinstance(cause, AgentGone) else EXIT_START_FAILED)
        await self._close_streams(process)

    async def _close_streams(self, process: Process) -> None:
        """The process's streams are closed. A failure is logged: a caller must see the process's end, or its error."""
        try:
            await process.close_streams()
        except ShimError as exc:
            log.warning("close streams", extra={"of": process.label, "error": str(exc)})

    async def _end_late(self, process: Process) -> None:
        """The guest does not run the process, whose start was given up; it may have begun after the deadline."""
        for pause_s in LATE_S:
            await asyncio.sleep(pause_s)
            try:
                await self._agent.signal_process(self.id, process.guest_id, SIGKILL)
                if process.exec_id is not None:  # kata-agent keeps an ended process until it is waited for
                    await self._agent.wait_process(self.id, process.guest_id, EXEC_EXIT_WAIT_S)
                return
            except AgentGone:
                return
            except ShimError as exc:
                log.debug("end what was started late", extra={"of": process.label, "error": str(exc)})

    def add_exec(self, request: ExecTask) -> None:
        """The exec exists. `start` opens its streams and runs it, as with runc's shim.

        ctr copies its input as soon as the FIFO has a reader, but sends CloseIO only after the reply to Exec. If the
        streams were open earlier, the end of a short input would be lost.
        """
        exec_id = request.exec_id
        self._require_running(f"add exec '{exec_id}'")
        if exec_id in self._execs:
            raise AlreadyExists(f"add exec '{exec_id}': container '{self.id}' already has it")
        self._exec_specs[exec_id] = guest_process(
            request.process, terminal=request.stdio.terminal, stdin=bool(request.stdio.stdin)
        )
        self._execs[exec_id] = self._new_process(exec_id, request.stdio, None)
        self._env.publisher.publish(ExecAdded(container_id=self.id, exec_id=exec_id))

    async def delete_exec(self, exec_id: ExecId) -> ExitStatus:
        process = self.process(exec_id)
        async with process.lock:
            process.require(Status.CREATED, Status.STOPPED, verb="delete")
            self._report_ended(process, 0)
            await process.close_streams()
            if self._execs.get(exec_id) is process:  # else another Delete was faster; the id may have been reused
                del self._execs[exec_id]
                self._exec_specs.pop(exec_id, None)
                self._bytes_of_gone_execs += process.pumps.bytes_by_stream
        return await process.wait()

    async def delete(self) -> ExitStatus:
        """Nothing of the container is left on the host, and the agent was asked to remove it.

        Raises FailedPrecondition while it runs, and the error of an undo; then the call can be repeated.
        """
        process = self.init
        if process.status is Status.CREATED:
            await self._kill_created(process)  # outside the lock: the exit's watcher needs it
        async with process.lock:
            process.require(Status.STOPPED, verb="delete")
            execs = tuple(self._execs.values())
            self._execs.clear()
            for each in execs:
                self._report_ended(each, EXIT_KILLED)  # also one that was never started, since a Wait may be open
            closing = (each.close_streams() for each in (*execs, process))
            for failure in await asyncio.gather(*closing, return_exceptions=True):
                if failure is not None:  # logged only: the undo must run, and closes the init's streams once more
                    log.warning("close streams", extra={"container": self.id, "error": str(failure)})
            if error := await self._undo.run():
                raise error
        return await process.wait()

    async def _kill_created(self, process: Process) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_CREATED_WAIT_S):
                try:
                    await process.kill(SIGKILL, all_processes=False)
                except ShimError as exc:
                    log.debug("kill before delete", extra={"container": self.id, "error": str(exc)})
                await process.wait()
        self._report_ended(process, EXIT_KILLED)

    async def pause(self) -> None:
        """The container's processes are frozen. Raises FailedPrecondition unless it runs.

        After a pause whose outcome is not known, the container is PAUSING until the guest has let it run on.
        """
        async with self.init.lock:
            self.init.become(Status.PAUSING)
            try:
                await self._agent.pause_container(self.id)
            except ShimError as exc:
                if isinstance(exc, DeadlineExceeded):
                    self._tasks.supervise(f"late/{self.id}", self._undo_late_pause())
                elif self.init.status is Status.PAUSING:
                    self.init.become(Status.RUNNING)
                raise
            self.init.become(Status.PAUSED)  # raises when the sandbox was lost meanwhile
            self._env.publisher.publish(TaskPaused(container_id=self.id))
        self._listener.changed()

    async def _undo_late_pause(self) -> None:
        """The container runs on, once the guest has taken a resume. An exit does not wait for that."""
        for pause_s in itertools.chain(LATE_S, itertools.repeat(LATE_S[-1])):
            await asyncio.sleep(pause_s)
            if self.init.status is not Status.PAUSING:
                return
            try:
                await self._agent.resume_container(self.id)
            except ShimError as exc:
                log.warning("undo pause", extra={"container": self.id, "error": str(exc)})
            else:
                if self.init.status is Status.PAUSING:
                    self.init.become(Status.RUNNING)
                    self._listener.changed()

    async def resume(self) -> None:
        """The container's processes run on. Raises FailedPrecondition unless it is paused, or may be."""
        async with self.init.lock:
            self.init.require(Status.PAUSED, Status.PAUSING, verb="resume")
            was_paused = self.init.status is Status.PAUSED
            await self._agent.resume_container(self.id)
            self.init.become(Status.RUNNING)
            if was_paused:
                self._env.publisher.publish(TaskResumed(container_id=self.id))
        self._listener.changed()

    async def update(self, resources: Mapping[str, Any]) -> None:
        self.init.require(Status.CREATED, Status.RUNNING, Status.PAUSED, verb="update")

        async def apply(after: Mapping[str, Any]) -> None:
            await self._agent.update_container(self.id, guest_resources(after, self._sandbox.plan.numa))

        await self._sandbox.vm.resizer.update(self.id, resources, apply)
        await resize_memory_volumes(self.plan.memory_volumes, host=self._env.host, agent=self._agent)

    def met_oom(self) -> None:
        """An OOM kill in the container is published; the first is marked in the bundle, too."""
        self.oom_kills += 1
        self._env.publisher.publish(TaskOom(container_id=self.id))
        if self.oom_kills == 1:
            self._tasks.spawn(f"oom/{self.id}", self._mark_oom())

    async def _mark_oom(self) -> None:
        """The bundle has the file `oom`: CRI-O reads it, since it takes no events."""
        try:
            await self._env.host.write_bytes(f"{self.request.bundle}/oom", b"", 0o600)
        except ShimError as exc:
            log.warning("oom not marked in the bundle", extra={"container": self.id, "error": str(exc)})

    async def stats(self) -> ContainerStats:
        """The container's use of resources. Works after its end, too, when containerd looks for OOM kills."""
        stats = await self._agent.stats_container(self.id)
        return replace(stats, oom_kills=self.oom_kills)

    def report_all_ended(self, status: int) -> None:
        """Every process that had not ended is reported as ended with `status`, the init last."""
        for process in (*self._execs.values(), self.init):
            self._report_ended(process, status)

    def report_killed(self) -> None:
        """Every process is reported as ended by KILL, which the guest did not carry out."""
        self.report_all_ended(EXIT_KILLED)
        self._listener.init_exited(self.id, agent_gone=self.init.agent_gone)

    def report_exec_killed(self, process: Process) -> None:
        """The exec is reported as ended by KILL, which the guest did not carry out."""
        self._report_ended(process, EXIT_KILLED)

    async def _watch_init(self) -> None:
        process = self.init
        status = await process.watch_exit()
        async with process.lock:  # a start under way publishes its event first
            await self._wait_for_execs()
            if not process.pumps.have_started:  # killed before its start: readers of its output must see the end
                await self._close_streams(process)
            await self._sandbox.vm.resizer.leave(self.id)
            await self._save_termination_message()  # the kubelet reads it when it sees the exit
            self._report_ended(process, status)
        self._listener.init_exited(self.id, agent_gone=self.init.agent_gone)

    async def _save_termination_message(self) -> None:
        """The kubelet's file has what the container wrote to the guest's copy of it. A failure is logged."""
        file = self.plan.termination_message
        if not file:
            return
        try:
            if message := await self._sandbox.agent.termination_message(self.id):
                await self._env.host.write_bytes(file, message.encode(), 0o644)
        except ShimError as exc:
            level = logging.DEBUG if isinstance(exc, AgentGone | Unavailable) else logging.WARNING
            log.log(level, "termination message not saved", extra={"container": self.id, "error": str(exc)})

    async def _wait_for_execs(self) -> None:
        """No exec runs. One whose exit the guest does not report has ended with the pid namespace."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EXEC_EXIT_WAIT_S):
                while running := self._running_execs():
                    await running[0].wait()
        for process in self._running_execs():
            self._report_ended(process, EXIT_KILLED)

    def _running_execs(self) -> list[Process]:
        return [process for process in self._execs.values() if process.status is Status.RUNNING]

    async def _watch_exec(self, process: Process) -> None:
        status = await process.watch_exit()
        async with process.lock:
            self._report_ended(process, status)

    def _report_ended(self, process: Process, status: int) -> None:
        ended_before_start = process.status is Status.CREATED and process.exec_id is not None
        exit_status = process.latch_exit(status)
        if exit_status is None or ended_before_start:
            return
        self._env.publisher.publish(
            TaskExited(container_id=self.id, process_id=process.guest_id, pid=process.pid, exit=exit_status)
        )
        if process.exec_id is None:
            self._listener.changed()


@contextmanager
def naming_program(action: str, process: Mapping[str, Any]) -> Iterator[None]:
    """If `process` has no program that can be executed, the agent's error becomes one in the words of runc's shim."""
    try:
        yield
    except ShimError as exc:
        refused = refused_program(str(exc), process.get("args"))
        if not refused:
            raise
        raise FailedPrecondition(f"{action}: {refused}; the guest's agent: {exc}") from exc


async def remove_from_guest(agent: ContainerAgent, container_id: str) -> None:
    """The agent was asked to remove the container. A failure is logged: the container must go from the host anyway."""
    try:
        await agent.remove_container(container_id, REMOVE_TIMEOUT_S)
    except ShimError as exc:
        level = logging.DEBUG if isinstance(exc, AgentGone | NotFound) else logging.WARNING
        log.log(level, "remove from guest", extra={"container": container_id, "error": str(exc)})


async def free_share(agent: Agent, container_id: str) -> None:
    """The guest holds nothing of the share that the host has removed. A failure is logged."""
    try:
        await agent.free_share()
    except ShimError as exc:
        level = logging.DEBUG if isinstance(exc, AgentGone | Unimplemented) else logging.WARNING
        log.log(level, "free share in guest", extra={"container": container_id, "error": str(exc)})
