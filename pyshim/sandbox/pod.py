"""All that one shim serves: a sandbox and its containers, by the calls of the Task API.

Work belongs to the pod, not to the call that asked for it: ttrpc has no cancel and callers repeat themselves, so
Create and Delete run as tasks of the pod and repeated calls join the one under way. State changes happen between
awaits; no lock spans the pod, so State answers while a VM boots.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pyshim.model.errors import AgentGone, AlreadyExists, FailedPrecondition, NotFound, Unavailable
from pyshim.model.events import TaskCreated, TaskDeleted, TaskOom
from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.oci import MAX_SPEC_BYTES, OciSpec, parse_spec
from pyshim.model.stats import ContainerStats
from pyshim.model.task import CreateTask, ExecTask, ExitStatus, Identity, ProcessInfo, ProcessState, Status
from pyshim.model.trace import Trace, step
from pyshim.plan.container import ContainerPlan, container_plan, without_image
from pyshim.plan.devices import sandbox_question
from pyshim.plan.kind import ContainerKind, Placement, placement
from pyshim.plan.sandbox import capacity_question, sandbox_plan
from pyshim.sandbox.container import Container
from pyshim.sandbox.deadlines import bounded
from pyshim.sandbox.environment import Environment
from pyshim.sandbox.killing import signal_init
from pyshim.sandbox.passed_devices import log_found
from pyshim.sandbox.pause import PauseAgent
from pyshim.sandbox.process import EXIT_KILLED, EXIT_SANDBOX_LOST
from pyshim.sandbox.sandbox import Sandbox
from pyshim.sandbox.seams import ContainerAgent
from pyshim.sandbox.snapshot import SavedState, sandbox_snapshot
from pyshim.sandbox.tasks import TaskOwner, joined, to_the_end
from pyshim.sandbox.volume_facts import volume_facts

log = logging.getLogger("pyshim.sandbox.pod")


class _Creation(NamedTuple):
    request: CreateTask
    task: asyncio.Task[int]


class Pod:
    def __init__(self, *, identity: Identity, environment: Environment) -> None:
        self._identity = identity
        self._env = bounded(environment)
        self._tasks = TaskOwner()
        self._sandbox: Sandbox | None = None
        self._saved: SavedState | None = None
        self._containers: dict[ContainerId, Container] = {}
        self._creating: dict[ContainerId, _Creation] = {}
        self._deleting: dict[ContainerId, asyncio.Task[tuple[int, ExitStatus]]] = {}
        self.was_used = False
        """containerd has asked for a container at least once."""
        self._closing = False
        self._trace = Trace(environment.clock_ns, on_mark=self._save)
        self._pause: PauseAgent | None = None
        self._owner: ContainerId | None = None
        """The container whose end is the sandbox's end: the pod sandbox's, or the single one."""

    # ---- Create

    async def create(self, request: CreateTask) -> int:
        """The pid containerd is told; a repeated call while the first still works gets the first one's answer."""
        container_id = request.container_id
        action = f"create container '{container_id}'"
        self.was_used = True
        if self._closing:
            raise Unavailable(f"{action}: the shim is ending")
        if container_id in self._containers:
            raise AlreadyExists(f"{action}: it already exists")
        creation = self._creating.get(container_id)
        if creation is None:
            if self._sandbox is None:
                self._env.expect_sandbox()
            task = self._tasks.spawn(
                f"create/{container_id}", self._trace.of(f"create {container_id}", self._create(request))
            )
            creation = self._creating[container_id] = _Creation(request, task)
            task.add_done_callback(lambda _: self._creation_ended(container_id))
        return await joined(creation.task, action)

    def _creation_ended(self, container_id: ContainerId) -> None:
        del self._creating[container_id]
        self._settle()

    async def _create(self, request: CreateTask) -> int:
        container_id = request.container_id
        where = f"{request.bundle}/config.json"
        spec = parse_spec(await self._env.host.read_bytes(where, MAX_SPEC_BYTES), where)
        place = placement(spec.annotations, container_id)
        if place.kind is ContainerKind.POD_CONTAINER:
            container = await self._create_container(request, spec, self._joined(place, container_id))
        else:
            container = await self._create_owner(request, spec, place)
        self._containers[container_id] = container
        self._env.publisher.publish(TaskCreated(container_id=container_id, request=request, pid=container.pid))
        return container.pid

    async def _create_owner(self, request: CreateTask, spec: OciSpec, place: Placement) -> Container:
        """The sandbox and the container it ends with; neither is left when this raises."""
        if self._owner is not None or self._sandbox is not None:
            other = self._sandbox.plan.sandbox_id if self._sandbox else self._owner
            raise FailedPrecondition(f"create sandbox '{place.sandbox_id}': this shim already runs '{other}'")
        self._owner = request.container_id
        try:
            return await self._create_container(request, spec, await self._start_sandbox(request, spec, place))
        except BaseException:
            self._owner = None
            await self._stop_sandbox()
            raise

    async def _start_sandbox(self, request: CreateTask, spec: OciSpec, place: Placement) -> Sandbox:
        config = await step("read configuration", self._env.load_config(request.options, spec.annotations))
        facts = await step("probe host", self._env.host_facts())
        devices = await step("find devices", self._env.find_devices(sandbox_question(place.kind, spec, config)))
        log_found(devices, place.sandbox_id)
        plan = sandbox_plan(
            sandbox_id=place.sandbox_id,
            kind=place.kind,
            uuid=self._env.new_uuid(),
            spec=spec,
            config=config,
            host=facts,
            capacity=await self._env.capacity(capacity_question(config, spec)),
            sources=await volume_facts(self._env.host, spec, config),
            devices=devices,
        )
        records = await self._env.open_records(place.sandbox_id)
        sandbox = Sandbox(
            plan=plan,
            host=self._env.host,
            hypervisor_factory=self._env.hypervisor_factory,
            connector=self._env.connector_factory(config),
            network_connector=self._env.network_connector,
            records=records,
            tasks=self._tasks,
            on_lost=self._lost,
            on_oom=self._oom,
            host_facts=facts,
            on_change=self._save,
            find_devices=self._env.find_devices,
            open_monitor=self._env.open_monitor,
        )
        self._sandbox = sandbox
        self._saved = SavedState(
            records, self._trace, lambda: sandbox_snapshot(sandbox, self._containers.values(), self._owner, self._trace)
        )
        self._saved.save()
        await sandbox.start()
        return sandbox

    def _joined(self, place: Placement, container_id: ContainerId) -> Sandbox:
        sandbox = self._sandbox
        if sandbox is None or sandbox.plan.sandbox_id != place.sandbox_id:
            raise NotFound(f"create container '{container_id}': no sandbox '{place.sandbox_id}' in this shim")
        return sandbox

    async def _create_container(self, request: CreateTask, spec: OciSpec, sandbox: Sandbox) -> Container:
        assert self._saved is not None, "a sandbox has its records"
        ledger = self._saved.records.ledger
        plan = await self._plan_container(request, spec, sandbox)
        agent: ContainerAgent = sandbox.agent
        resources = (spec.raw.get("linux") or {}).get("resources") or {}
        if request.container_id == self._owner and sandbox.plan.kind is ContainerKind.POD_SANDBOX:
            agent = self._pause = PauseAgent(
                plan=plan, agent=agent, host=self._env.host, ledger=ledger, tasks=self._tasks
            )
            plan, resources = without_image(plan), {}
        elif plan.guest.shared_pid_namespace and self._containers.keys() <= {self._owner}:
            await self._hold_pid_namespace(sandbox)
        container = Container(
            request=request,
            plan=plan,
            namespace=self._identity.namespace,
            pid=sandbox.pid,
            agent=agent,
            host=self._env.host,
            attachments=sandbox.attachments,
            devices=sandbox.devices,
            spec=spec,
            resizer=sandbox.resizer,
            resources=resources,
            ledger=ledger,
            publisher=self._env.publisher,
            tasks=self._tasks,
            clock_ns=self._env.clock_ns,
            on_exit=self._init_exited,
            on_change=self._save,
            on_start=self._saved.save_soon,
            on_exec_change=self._saved.save_execs,
        )
        try:
            await container.create(sandbox.plan.config.runtime.create_container_timeout_s)
        except AgentGone as exc:
            raise Unavailable(f"create container '{request.container_id}': {await sandbox.loss(str(exc))}") from exc
        sandbox.has_container(request.container_id)
        self._saved.save_soon()
        return container

    async def _hold_pid_namespace(self, sandbox: Sandbox) -> None:
        """The sandbox container is in the guest, so that the pid namespace the pod shares outlives each app container.

        To be asked before the first of those is made. With one already there (a debug container that joins another's
        processes) the agent shares the first one's namespace.
        """
        if self._pause is not None:
            await self._pause.enter_guest(sandbox.plan.config.runtime.create_container_timeout_s)

    async def _plan_container(self, request: CreateTask, spec: OciSpec, sandbox: Sandbox) -> ContainerPlan:
        return container_plan(
            container_id=request.container_id,
            bundle=request.bundle,
            rootfs=request.rootfs,
            spec=spec,
            config=sandbox.plan.config,
            share=sandbox.plan.share,
            sources=await volume_facts(self._env.host, spec, sandbox.plan.config),
            hostname=spec.hostname or sandbox.plan.guest.hostname,
            sysctls=sandbox.plan.sysctls,
            terminal=request.stdio.terminal,
            disk_rootfs=request.container_id != self._owner or sandbox.plan.kind is not ContainerKind.POD_SANDBOX,
        )

    # ---- calls on what exists

    async def start(self, container_id: ContainerId, exec_id: ExecId | None) -> int:
        name = "" if exec_id else f"start {container_id}"
        return await self._trace.of(name, self._find(container_id).start(exec_id))

    def state(self, container_id: ContainerId, exec_id: ExecId | None) -> ProcessState:
        """The process as it is; UNKNOWN while its container is being created."""
        creation = self._creating.get(container_id)
        if creation is not None and exec_id is None:
            return ProcessState.being_created(creation.request, self._sandbox.pid if self._sandbox else 0)
        container = self._find(container_id)
        state = container.process(exec_id).state()
        if exec_id is not None and state.status is Status.RUNNING and container.init.status is Status.PAUSED:
            return replace(state, status=Status.PAUSED)
        return state

    def pids(self, container_id: ContainerId) -> tuple[ProcessInfo, ...]:
        return self._find(container_id).processes()

    async def pause(self, container_id: ContainerId) -> None:
        await self._find(container_id).pause()

    async def resume(self, container_id: ContainerId) -> None:
        await self._find(container_id).resume()

    async def kill(self, container_id: ContainerId, exec_id: ExecId | None, signal: int, all_processes: bool) -> None:
        container, sandbox = self._find(container_id), self._sandbox
        if exec_id is not None or sandbox is None:
            await container.process(exec_id).kill(signal, all_processes=all_processes)
            return
        owner = container_id == self._owner
        await signal_init(container, sandbox, signal, all_processes=all_processes, owner=owner, tasks=self._tasks)

    async def exec(self, request: ExecTask) -> None:
        await self._find(request.container_id).add_exec(request)

    async def resize_pty(self, container_id: ContainerId, exec_id: ExecId | None, width: int, height: int) -> None:
        await self._find(container_id).process(exec_id).resize(width, height)

    async def close_io(self, container_id: ContainerId, exec_id: ExecId | None) -> None:
        self._find(container_id).process(exec_id).close_io()

    async def update(
        self, container_id: ContainerId, resources: Mapping[str, Any], annotations: Mapping[str, str]
    ) -> None:
        await self._find(container_id).update(resources)

    async def wait(self, container_id: ContainerId, exec_id: ExecId | None) -> ExitStatus:
        return await self._find(container_id).process(exec_id).wait()

    async def stats(self, container_id: ContainerId) -> ContainerStats:
        return await self._find(container_id).stats()

    def connect(self, container_id: ContainerId) -> int:
        container = self._containers.get(container_id)
        return container.pid if container else 0

    # ---- the end

    async def delete(self, container_id: ContainerId, exec_id: ExecId | None) -> tuple[int, ExitStatus]:
        """The process (and with the init, the container) is gone; repeated calls join the one under way."""
        if exec_id is not None:
            container = self._find(container_id)
            return container.pid, await container.delete_exec(exec_id)
        await self._abandon_creation(container_id)
        task = self._deleting.get(container_id)
        if task is None:
            task = self._tasks.spawn(f"delete/{container_id}", self._delete(self._find(container_id)))
            self._deleting[container_id] = task
            task.add_done_callback(lambda _: self._deleting.pop(container_id, None))
        return await joined(task, f"delete container '{container_id}'")

    async def _delete(self, container: Container) -> tuple[int, ExitStatus]:
        exit_status = await container.delete()
        if container.id == self._owner:
            self._owner = None
            await self._stop_sandbox()
        self._containers.pop(container.id, None)
        self._settle()
        self._save()
        self._env.publisher.publish(TaskDeleted(container_id=container.id, pid=container.pid, exit=exit_status))
        return container.pid, exit_status

    async def shutdown(self, now: bool) -> bool:
        """True when nothing is left to serve: the shim may end once its reply has left.

        containerd asks after every task it has deleted, while others of the pod may run or be under way.
        """
        if not now and (self._containers or self._creating or self._deleting):
            return False
        await self.close()
        return True

    async def close(self) -> None:
        """Everything is ended and gone, whatever state it was in, and nothing new begins. Idempotent."""
        self._closing = True
        await to_the_end(self._close())

    async def _close(self) -> None:
        for container in self._containers.values():
            container.end_all(EXIT_KILLED)
        await asyncio.gather(*(self._abandon_creation(container_id) for container_id in tuple(self._creating)))
        await self._stop_sandbox()
        self._owner = None
        if self._deleting:
            await asyncio.wait(self._deleting.values())
        await asyncio.gather(*(self._forget(container) for container in tuple(self._containers.values())))
        await self._tasks.close()
        self._settle()

    async def _forget(self, container: Container) -> None:
        try:
            await container.delete()
        except Exception as exc:  # whatever it meets, the shim ends
            log.warning("delete container at shutdown", extra={"container": container.id, "error": str(exc)})
        self._containers.pop(container.id, None)

    async def _abandon_creation(self, container_id: ContainerId) -> None:
        """A creation under way is undone: its caller gave up and asks for the end."""
        creation = self._creating.get(container_id)
        if creation is not None:
            creation.task.cancel()
            await asyncio.wait([creation.task])

    async def _stop_sandbox(self, agent_gone: bool = False) -> None:
        if self._sandbox is not None:
            await self._sandbox.stop(agent_gone)
            self._save()

    def _settle(self) -> None:
        """The state goes with the last container: until then its ledger names what somebody must undo."""
        if self._containers or self._creating or (self._sandbox is not None and not self._sandbox.is_stopped):
            return
        self._sandbox = None
        if self._saved is not None:
            saved, self._saved = self._saved, None
            saved.remove()

    # ---- what happens by itself

    def _init_exited(self, container: Container) -> None:
        """The sandbox ends with its owner: the VM goes as soon as the exit is told, not when Delete comes."""
        if container.id != self._owner or self._sandbox is None:
            return
        for other in self._containers.values():
            if other.id != container.id:
                other.end_all(EXIT_KILLED)
        self._tasks.supervise(f"stop/{container.id}", self._stop_sandbox(container.init.agent_gone))

    def _lost(self, reason: str) -> None:
        for container in self._containers.values():
            container.end_all(EXIT_SANDBOX_LOST)
        if self._sandbox is not None:
            self._save()
            self._tasks.supervise("stop/lost", self._stop_sandbox())

    def _oom(self, container_id: str) -> None:
        if (container := self._containers.get(ContainerId(container_id))) is not None:
            container.oom_kills += 1
            self._env.publisher.publish(TaskOom(container_id=container.id))

    def _find(self, container_id: ContainerId) -> Container:
        container = self._containers.get(container_id)
        if container is None:
            raise NotFound(f"find container '{container_id}': no such container in this shim")
        return container

    def _save(self) -> None:
        """The state on disk is this moment's."""
        if self._saved is not None:
            self._saved.save()
