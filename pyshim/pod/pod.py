"""What one shim serves: a sandbox and its containers, by the calls of the Task API.

Create and Delete run as tasks of the pod, not of the call, because ttrpc has no cancel and callers repeat calls. A
repeated call joins the task under way. The state changes between awaits and there is no lock for the whole pod, so that
State answers while a VM boots.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from pyshim.concurrency.tasks import TaskOwner, joined, to_the_end
from pyshim.model.errors import AgentGone, AlreadyExists, FailedPrecondition, NotFound, ShimError, Unavailable
from pyshim.model.guest import ContainerStats
from pyshim.model.ids import ContainerId, ExecId, HostPath, SandboxId
from pyshim.model.observation import Trace, step
from pyshim.model.oci import Caller, ContainerKind, Membership, OciSpec, membership, pod_of
from pyshim.model.sandbox import SandboxRequest
from pyshim.model.seams import ContainerAgent
from pyshim.model.task import (
    CreateTask,
    ExecTask,
    ExitStatus,
    Identity,
    ProcessInfo,
    ProcessState,
    Status,
    TaskCreated,
    TaskDeleted,
    TaskOom,
)
from pyshim.pod.container import Container
from pyshim.pod.creation import plan_container, plan_sandbox, read_spec
from pyshim.pod.environment import Environment
from pyshim.pod.hooks import ContainerHooks
from pyshim.pod.killing import signal_exec, signal_init
from pyshim.pod.monitor import PodMonitor
from pyshim.pod.pause import PauseAgent
from pyshim.pod.pid_namespace import PodPidNamespace
from pyshim.pod.plan.container import without_image
from pyshim.pod.plan.pod_spec import with_files
from pyshim.pod.process import EXIT_KILLED, EXIT_SANDBOX_LOST
from pyshim.pod.sandbox import Sandbox
from pyshim.pod.snapshot import SavedState, sandbox_snapshot
from pyshim.resources.sizing.plan.swap import with_swap

log = logging.getLogger(__name__)


class _Creation(NamedTuple):
    request: CreateTask
    task: asyncio.Task[int]


class Pod:
    def __init__(self, *, identity: Identity, environment: Environment) -> None:
        self._identity = identity
        self._env = environment
        self._tasks = TaskOwner()
        self._sandbox: Sandbox | None = None
        self._saved: SavedState | None = None
        self._containers: dict[ContainerId, Container] = {}
        self._creating: dict[ContainerId, _Creation] = {}
        self._deleting: dict[ContainerId, asyncio.Task[tuple[int, ExitStatus]]] = {}
        self._closing = False
        self._trace = Trace(environment.clock_ns, on_mark=self.changed)
        self._pid_namespace: PodPidNamespace | None = None
        self._owner: ContainerId | None = None
        """The container whose end is the sandbox's end: the sandbox container, or the single one."""
        self._on_end: Callable[[int], None] | None = None
        """Set for a sandbox of the Sandbox API; called with its exit status when it ends."""
        self._opening: asyncio.Task[Sandbox] | None = None
        """The start of such a sandbox; stays after its success."""
        self._files: Mapping[str, HostPath] = {}
        """The files of such a sandbox for its containers, by their paths there."""

    # ---- Create

    async def create(self, request: CreateTask) -> int:
        """The pid for containerd. A repeated call during the first gets the first one's answer."""
        container_id = request.container_id
        action = f"create container '{container_id}'"
        if self._closing:
            raise Unavailable(f"{action}: the shim is ending")
        if container_id in self._containers:
            raise AlreadyExists(f"{action}: it already exists")
        creation = self._creating.get(container_id)
        if creation is None:
            task = self._tasks.spawn(f"create/{container_id}", self._create(request))
            creation = self._creating[container_id] = _Creation(request, task)
            task.add_done_callback(lambda _: self._creation_ended(container_id))
        return await joined(creation.task, action)

    def _creation_ended(self, container_id: ContainerId) -> None:
        del self._creating[container_id]
        self._drop_ended_sandbox()

    async def _create(self, request: CreateTask) -> int:
        with self._trace.of(f"create {request.container_id}"):
            container = await self._create_by_kind(request)
        self._containers[container.id] = container
        self._env.publisher.publish(TaskCreated(container_id=container.id, request=request, pid=container.pid))
        return container.pid

    async def _create_by_kind(self, request: CreateTask) -> Container:
        container_id = request.container_id
        spec = await read_spec(self._env.host, request.bundle)
        member = self._membership(spec, container_id)
        hooks = ContainerHooks(self._env.host, spec, name=container_id, bundle=request.bundle)
        try:
            if member.kind is ContainerKind.POD_CONTAINER:
                sandbox = self._sandbox_of(member, container_id)
                spec = with_files(spec, self._files)
                await hooks.before_create(sandbox.pid)
                return await self._create_container(request, spec, sandbox, hooks)
            return await self._create_owner(request, spec, member, hooks)
        except BaseException:
            await to_the_end(hooks.after_delete())
            raise

    def _membership(self, spec: OciSpec, container_id: ContainerId) -> Membership:
        """As the annotations say; without them (`ctr run --sandbox`), a container of the served sandbox."""
        member = membership(spec.annotations, container_id)
        if self._sandbox is None or self._on_end is None or member.kind is not ContainerKind.SINGLE_CONTAINER:
            return member
        return Membership(kind=ContainerKind.POD_CONTAINER, sandbox_id=self._sandbox.plan.sandbox_id)

    async def _create_owner(
        self, request: CreateTask, spec: OciSpec, member: Membership, hooks: ContainerHooks
    ) -> Container:
        """The sandbox and the container that owns it. When this raises, neither is left."""
        wanted = SandboxRequest(sandbox_id=member.sandbox_id, kind=member.kind, spec=spec, options=request.options)
        self._refuse_second(wanted.sandbox_id)
        self._owner = request.container_id
        try:
            sandbox = await self._open(wanted, hooks)
            return await self._create_container(request, spec, sandbox, hooks)
        except BaseException:
            self._owner = None
            await self._end_sandbox()
            raise

    # ---- the sandbox

    def _refuse_second(self, sandbox_id: SandboxId) -> None:
        other = self._sandbox.plan.sandbox_id if self._sandbox is not None else self._owner
        if other is not None or self._on_end is not None:
            raise FailedPrecondition(f"create sandbox '{sandbox_id}': this shim already runs '{other or 'another'}'")

    def serve_sandbox(self, sandbox_id: SandboxId, on_end: Callable[[int], None]) -> None:
        """From now on, the pod's sandbox starts and ends by calls of the Sandbox API. `on_end` gets its exit status."""
        if self._closing:
            raise Unavailable(f"create sandbox '{sandbox_id}': the shim is ending")
        self._refuse_second(sandbox_id)
        self._on_end = on_end

    def drop_sandbox(self) -> None:
        """Undoes `serve_sandbox`."""
        self._on_end = None

    @property
    def is_served(self) -> bool:
        """`serve_sandbox` was called: the sandbox starts and ends by the Sandbox API."""
        return self._on_end is not None

    async def open_sandbox(self, request: SandboxRequest, hooks: ContainerHooks) -> Sandbox:
        """The VM of the served sandbox runs. A repeated call gets the first one's answer."""
        action = f"start sandbox '{request.sandbox_id}'"
        if self._closing:
            raise Unavailable(f"{action}: the shim is ending")
        if self._opening is None:
            self._opening = self._tasks.spawn(f"start/{request.sandbox_id}", self._open_served(request, hooks))
            self._opening.add_done_callback(self._opening_ended)
        return await joined(self._opening, action)

    def _opening_ended(self, opening: asyncio.Task[Sandbox]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            self._opening = None
            self._drop_ended_sandbox()

    async def _open_served(self, request: SandboxRequest, hooks: ContainerHooks) -> Sandbox:
        self._files = request.files
        try:
            with self._trace.of(f"start {request.sandbox_id}"):
                return await self._open(request, hooks)
        except BaseException:
            await self._end_sandbox()
            await to_the_end(hooks.after_delete())
            raise

    async def stop_sandbox(self) -> None:
        """The served sandbox and its containers have ended. The containers stay until their Delete. Idempotent."""
        await self._abandon_opening()
        for container in self._containers.values():
            container.end_all(EXIT_KILLED)
        lost = self._sandbox is not None and self._sandbox.failure
        await self._end_sandbox()
        self._report_end(EXIT_SANDBOX_LOST if lost else 0)

    async def _abandon_opening(self) -> None:
        if self._is_opening and self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])

    @property
    def _is_opening(self) -> bool:
        return self._opening is not None and not self._opening.done()

    def _report_end(self, status: int) -> None:
        if self._on_end is not None:
            self._on_end(status)

    async def _open(self, request: SandboxRequest, hooks: ContainerHooks) -> Sandbox:
        """The VM runs, without a container. After an error, call `_end_sandbox`."""
        spec = request.spec
        name = pod_of(spec.annotations)
        cgroups = self._env.host.cgroups((await self._env.host_facts()).cgroup_mode)
        # The kernel delays the first of several moves between cgroups. The delay begins now, during the planning.
        self._tasks.supervise(f"cgroups/{request.sandbox_id}", cgroups.hasten_moves())
        await asyncio.sleep(0)  # that task starts before the configuration is read, which keeps the interpreter busy
        config = await step("read configuration", self._env.load_config(request.options, spec.annotations))
        if config.runtime.enable_tracing:
            self._env.export_trace(self._trace, config.runtime.otlp_endpoint, request.sandbox_id, spec.annotations)
        plan, facts = await plan_sandbox(self._env, request, config)
        records = await self._env.open_records(request.sandbox_id)
        sandbox = Sandbox(
            plan=plan, host_facts=facts, environment=self._env, records=records, tasks=self._tasks, listener=self
        )
        self._sandbox = sandbox
        self._pid_namespace = PodPidNamespace(
            sandbox,
            host=self._env.host,
            containers=self._containers,
            is_pod=self.is_served or plan.kind is ContainerKind.POD_SANDBOX,
        )
        self._saved = SavedState(
            records, lambda: sandbox_snapshot(sandbox, self._containers.values(), self._owner, name, self._trace)
        )
        self._saved.save()
        await sandbox.start(
            PodMonitor(sandbox, name=name, containers=self._containers.values(), records=records, trace=self._trace),
            hooks,
        )
        return sandbox

    def _sandbox_of(self, member: Membership, container_id: ContainerId) -> Sandbox:
        """The container's sandbox. Raises NotFound if it is not this shim's."""
        sandbox = self._sandbox
        if sandbox is None or sandbox.plan.sandbox_id != member.sandbox_id:
            raise NotFound(f"create container '{container_id}': no sandbox '{member.sandbox_id}' in this shim")
        return sandbox

    async def _create_container(
        self, request: CreateTask, spec: OciSpec, sandbox: Sandbox, hooks: ContainerHooks
    ) -> Container:
        assert self._saved is not None, "_open has made it"
        assert self._pid_namespace is not None, "_open has made it"
        is_pause = request.container_id == self._owner and sandbox.plan.kind is ContainerKind.POD_SANDBOX
        plan = await plan_container(self._env.host, request, spec, sandbox.plan)
        agent: ContainerAgent = sandbox.agent
        resources = with_swap((spec.raw.get("linux") or {}).get("resources") or {}, spec.annotations)
        if is_pause:
            agent = self._pid_namespace.pause = PauseAgent(plan, sandbox)
            plan, resources = without_image(plan), {}
        else:
            plan = replace(plan, guest=await self._pid_namespace.join(plan.guest))
        container = Container(
            request=request,
            plan=plan,
            spec=spec,
            resources=resources,
            agent=agent,
            hooks=hooks,
            sandbox=sandbox,
            environment=self._env,
            namespace=self._identity.namespace,
            listener=self,
        )
        if not is_pause:
            await sandbox.cgroups.enter_class(request.container_id, spec.raw.get("linux") or {})
        try:
            await container.create(sandbox.plan.config.runtime.create_container_timeout_s)
        except AgentGone as exc:
            raise Unavailable(
                f"create container '{request.container_id}': {await sandbox.loss_reason(str(exc))}"
            ) from exc
        if not is_pause:
            self._pid_namespace.has_container(request.container_id)
        sandbox.network.has_container(request.container_id)
        self._saved.save_soon()
        return container

    @property
    def is_empty(self) -> bool:
        """There is no VM and no container, nor one under creation or deletion."""
        return not (self._containers or self._creating or self._deleting or self._is_opening or self._sandbox)

    # ---- calls on what exists

    async def start(self, container_id: ContainerId, exec_id: ExecId | None) -> int:
        container = self._find(container_id)
        name = f"exec {container_id}/{exec_id}" if exec_id else f"start {container_id}"
        with self._trace.of(name, saved=not exec_id):
            return await container.start(exec_id)

    def state(self, container_id: ContainerId, exec_id: ExecId | None) -> ProcessState:
        """The process's state; UNKNOWN while its container is being created."""
        creation = self._creating.get(container_id)
        if creation is not None and exec_id is None:
            return ProcessState.being_created(creation.request, self._vm_pid)
        container = self._find(container_id)
        state = container.process(exec_id).state()
        if exec_id is not None and state.status is Status.RUNNING and container.init.status is Status.PAUSED:
            return replace(state, status=Status.PAUSED)
        return state

    def pids(self, container_id: ContainerId) -> tuple[ProcessInfo, ...]:
        """As `Container.processes`; of a container under creation, its init."""
        if container_id in self._creating:
            return (ProcessInfo(pid=self._vm_pid, exec_id=None),)
        return self._find(container_id).processes()

    async def pause(self, container_id: ContainerId) -> None:
        await self._find(container_id).pause()

    async def resume(self, container_id: ContainerId) -> None:
        await self._find(container_id).resume()

    async def kill(self, container_id: ContainerId, exec_id: ExecId | None, signal: int, all_processes: bool) -> None:
        container, sandbox = self._find(container_id), self._sandbox
        if sandbox is None:
            await container.process(exec_id).kill(signal, all_processes=all_processes)
            return
        if exec_id is not None:
            process = container.process(exec_id)
            await signal_exec(container, process, signal, all_processes=all_processes, tasks=self._tasks)
            return
        owner = container_id == self._owner
        await signal_init(container, sandbox, signal, all_processes=all_processes, owner=owner, tasks=self._tasks)

    async def exec(self, request: ExecTask) -> None:
        self._find(request.container_id).add_exec(request)

    async def resize_pty(self, container_id: ContainerId, exec_id: ExecId | None, width: int, height: int) -> None:
        await self._find(container_id).process(exec_id).resize(width, height)

    async def close_io(self, container_id: ContainerId, exec_id: ExecId | None) -> None:
        self._find(container_id).process(exec_id).pumps.close_input()

    async def update(self, container_id: ContainerId, resources: Mapping[str, Any]) -> None:
        await self._find(container_id).update(resources)

    async def wait(self, container_id: ContainerId, exec_id: ExecId | None) -> ExitStatus:
        """The process's exit status. Waits for a container under creation, and raises NotFound when the creation fails.

        nerdctl's log program needs that: Create starts it, and it waits for the container before it copies anything.

        For CRI-O the owner ends when the sandbox has left the host: StopPodSandbox waits for the owner only, and then
        the kubelet kills what is in the pod's cgroup, the shim among it.
        """
        creation = self._creating.get(container_id)
        if creation is not None and exec_id is None:
            await asyncio.wait([creation.task])
        container = self._find(container_id)
        exit_status = await container.process(exec_id).wait()
        if exec_id is None and container_id == self._owner and container.caller is Caller.CRI_O:
            await self._end_sandbox(container.init.agent_gone)
        return exit_status

    async def stats(self, container_id: ContainerId) -> ContainerStats:
        return await self._find(container_id).stats()

    def connect(self, container_id: ContainerId) -> int:
        """The pid that containerd was given for the container; 0 for an unknown one."""
        container = self._containers.get(container_id)
        return container.pid if container else self._vm_pid if container_id in self._creating else 0

    @property
    def _vm_pid(self) -> int:
        return self._sandbox.pid if self._sandbox else 0

    # ---- the end

    async def delete(self, container_id: ContainerId, exec_id: ExecId | None) -> tuple[int, ExitStatus]:
        """The exec is deleted, or without `exec_id` the container. Repeated calls join the one under way.

        With the owner, VM, mounts and network are gone, too. The cgroups are removed after the reply. They are in the
        ledger until then: Shutdown waits for their removal, and `delete` removes them if the shim is killed.
        """
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
        with self._trace.of(f"delete {container.id}", saved=False):
            exit_status = await self._remove(container)
        self._env.publisher.publish(TaskDeleted(container_id=container.id, pid=container.pid, exit=exit_status))
        return container.pid, exit_status

    async def _remove(self, container: Container) -> ExitStatus:
        exit_status = await container.delete()
        if container.id == self._owner:
            self._owner = None
            if self._sandbox is not None:
                await self._sandbox.stop()
                self._tasks.supervise(f"end/{container.id}", self._end_sandbox())
                if container.hooks.follow_delete:
                    await self._sandbox.leave()  # else the hooks would run in the shim's cgroup and end with it
        await container.hooks.after_delete()
        self._containers.pop(container.id, None)
        self._drop_ended_sandbox()
        if self._containers or self._on_end is not None:
            self.changed()
        return exit_status

    async def shutdown(self, now: bool) -> bool:
        """True when the shim may end after its reply: nothing is left to serve, or `now` is set.

        containerd calls it after each deleted task, when the pod may have others.
        """
        if not now and (self._containers or self._creating or self._deleting or self._on_end):
            return False
        await self.close()
        return True

    async def close(self) -> None:
        """Every container and the sandbox are gone, and nothing new can be created. Idempotent."""
        self._closing = True
        await to_the_end(self._close())

    async def _close(self) -> None:
        for container in self._containers.values():
            container.end_all(EXIT_KILLED)
        await asyncio.gather(*(self._abandon_creation(container_id) for container_id in tuple(self._creating)))
        await self._abandon_opening()
        await self._end_sandbox()
        self._report_end(EXIT_KILLED)
        self._owner = None
        if self._deleting:
            await asyncio.wait(self._deleting.values())
        await asyncio.gather(*(self._delete_at_shutdown(container) for container in tuple(self._containers.values())))
        await self._tasks.close()
        self._drop_ended_sandbox()

    async def _delete_at_shutdown(self, container: Container) -> None:
        try:
            await container.delete()
        except Exception as exc:  # the shim ends anyway
            log.warning("delete container at shutdown", extra={"container": container.id, "error": str(exc)})
        await container.hooks.after_delete()
        self._containers.pop(container.id, None)

    async def _abandon_creation(self, container_id: ContainerId) -> None:
        """A creation under way is cancelled and undone."""
        creation = self._creating.get(container_id)
        if creation is not None:
            creation.task.cancel()
            await asyncio.wait([creation.task])

    async def _end_sandbox(self, agent_gone: bool = False) -> None:
        """Only the sandbox's state is left on the host; it goes with the last container."""
        if (sandbox := self._sandbox) is None:
            return
        await sandbox.stop(agent_gone)
        await sandbox.leave()
        self._drop_ended_sandbox()
        if self._saved is not None:
            # Soon, not now: mostly a Delete removes the state first, which saves the write.
            self._saved.save_soon()

    def _drop_ended_sandbox(self) -> None:
        """Once it has left and has no container, the sandbox is forgotten and its state, with the ledger, removed."""
        if self._containers or self._creating or self._is_opening:
            return
        if self._sandbox is not None and not self._sandbox.has_left:
            return
        self._sandbox = None
        if self._saved is not None:
            saved, self._saved = self._saved, None
            saved.remove()

    # ---- reports of sandbox and containers (PodListener)

    def changed(self) -> None:
        """The state on disk is current."""
        if self._saved is not None:
            self._saved.save()

    def init_started(self) -> None:
        if self._saved is not None:
            self._saved.save_soon()

    def init_exited(self, container_id: ContainerId, *, agent_gone: bool) -> None:
        """Ends the sandbox with its owner, as soon as the exit is published and before Delete."""
        if container_id != self._owner or self._sandbox is None:
            return
        for other in self._containers.values():
            if other.id != container_id:
                other.end_all(EXIT_KILLED)
        self._tasks.supervise(f"stop/{container_id}", self._end_traced(agent_gone))

    def sandbox_lost(self, reason: str) -> None:
        for container in self._containers.values():
            container.end_all(EXIT_SANDBOX_LOST)
        if self._sandbox is not None:
            self.changed()
            self._tasks.supervise("stop/lost", self._end_lost())

    async def _end_lost(self) -> None:
        """Reports the end after the VM is gone: containerd does not call StopSandbox after the report."""
        await self._end_traced()
        self._report_end(EXIT_SANDBOX_LOST)

    async def _end_traced(self, agent_gone: bool = False) -> None:
        with self._trace.of("end sandbox", saved=False):
            await self._end_sandbox(agent_gone)

    def container_met_oom(self, container_id: str) -> None:
        if (container := self._containers.get(ContainerId(container_id))) is not None:
            container.oom_kills += 1
            self._env.publisher.publish(TaskOom(container_id=container.id))
            if container.oom_kills == 1:
                self._tasks.spawn(f"oom/{container.id}", self._mark_oom(container))

    async def _mark_oom(self, container: Container) -> None:
        """The bundle has the file `oom`: CRI-O reads it, since it takes no events."""
        try:
            await self._env.host.write_bytes(f"{container.request.bundle}/oom", b"", 0o600)
        except ShimError as exc:
            log.warning("oom not marked in the bundle", extra={"container": container.id, "error": str(exc)})

    def _find(self, container_id: ContainerId) -> Container:
        container = self._containers.get(container_id)
        if container is None:
            raise NotFound(f"find container '{container_id}': no such container in this shim")
        return container
