"""What one shim serves: a sandbox and its containers, by the calls of the Task API.

Create and Delete run as tasks of the pod, not of the call, because ttrpc has no cancel and callers repeat calls. A
repeated call joins the task under way. The state changes between awaits and there is no lock for the whole pod, so that
State answers while a VM boots.
"""

import asyncio
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from pyshim.concurrency.tasks import TaskOwner, joined, to_the_end
from pyshim.model.errors import AgentGone, AlreadyExists, FailedPrecondition, NotFound, Unavailable
from pyshim.model.guest import ContainerStats
from pyshim.model.ids import ContainerId, ExecId, SandboxId
from pyshim.model.observation import Trace, step
from pyshim.model.oci import Caller, ContainerKind, Membership, OciSpec, membership, pod_of
from pyshim.model.sandbox import EndedBy, Phase, SandboxRequest
from pyshim.model.seams import ContainerAgent
from pyshim.model.task import (
    EXIT_KILLED,
    CreateTask,
    ExecTask,
    ExitStatus,
    Identity,
    ProcessInfo,
    ProcessState,
    Status,
    TaskCreated,
    TaskDeleted,
)
from pyshim.pod.container import Container
from pyshim.pod.creation import plan_container, plan_sandbox, read_spec
from pyshim.pod.environment import Environment
from pyshim.pod.hooks import ContainerHooks
from pyshim.pod.killing import signal_exec, signal_init
from pyshim.pod.life import CONTAINERS_STATUS, SandboxLife
from pyshim.pod.monitor import PodMonitor
from pyshim.pod.pause import PauseAgent
from pyshim.pod.pid_namespace import PodPidNamespace
from pyshim.pod.plan.container import without_image
from pyshim.pod.plan.pod_spec import let_through, with_files
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
        self.life: SandboxLife | None = None
        """None before the first request for a sandbox, and once a sandbox with an owner is forgotten."""
        self._saved: SavedState | None = None
        self._containers: dict[ContainerId, Container] = {}
        self._creating: dict[ContainerId, _Creation] = {}
        self._deleting: dict[ContainerId, asyncio.Task[tuple[int, ExitStatus]]] = {}
        self._closing = False
        self._trace = Trace(environment.clock_ns, on_mark=self.changed)
        self._pid_namespace: PodPidNamespace | None = None

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
        self._forget_ended()

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
                life, sandbox = self._sandbox_of(member, container_id)
                spec = with_files(spec, sandbox.files)
                await hooks.before_create(sandbox.pid)
                return await self._create_container(request, spec, life, sandbox, hooks)
            return await self._create_owner(request, spec, member, hooks)
        except BaseException:
            await to_the_end(hooks.after_delete())
            raise

    def _membership(self, spec: OciSpec, container_id: ContainerId) -> Membership:
        """As the annotations say; without them (`ctr run --sandbox`), a container of the sandbox without an owner."""
        member = membership(spec.annotations, container_id)
        if self.life is None or not self.life.outlives_containers or member.kind is not ContainerKind.SINGLE_CONTAINER:
            return member
        return Membership(kind=ContainerKind.POD_CONTAINER, sandbox_id=self.life.sandbox_id)

    def _sandbox_of(self, member: Membership, container_id: ContainerId) -> tuple[SandboxLife, Sandbox]:
        """The container's sandbox, which runs, and its life. Raises NotFound if it is not this shim's."""
        life = self.life
        if life is None or life.sandbox is None or life.sandbox_id != member.sandbox_id:
            raise NotFound(f"create container '{container_id}': no sandbox '{member.sandbox_id}' in this shim")
        if life.phase is not Phase.RUNNING:
            reason = life.failure or f"sandbox '{life.sandbox_id}' is {life.phase}"
            raise Unavailable(f"create container '{container_id}': {reason}")
        return life, life.sandbox

    async def _create_owner(
        self, request: CreateTask, spec: OciSpec, member: Membership, hooks: ContainerHooks
    ) -> Container:
        """The sandbox and the container that owns it. When this raises, neither is left."""
        wanted = SandboxRequest(sandbox_id=member.sandbox_id, kind=member.kind, spec=spec, options=request.options)
        life = self.begin_sandbox(wanted.sandbox_id, owner=request.container_id)
        try:
            sandbox = await life.open(lambda: self.make_sandbox(life, wanted, hooks))
            return await self._create_container(request, spec, life, sandbox, hooks)
        except BaseException:
            await to_the_end(life.end(EndedBy.FAILED))
            raise

    # ---- the sandbox

    def begin_sandbox(self, sandbox_id: SandboxId, *, owner: ContainerId | None) -> SandboxLife:
        """The life of the pod's sandbox, which nothing has opened yet. Raises FailedPrecondition if the pod has one."""
        self.refuse_second(sandbox_id)
        self.life = SandboxLife(
            sandbox_id,
            owner=owner,
            tasks=self._tasks,
            trace=self._trace,
            clock_ns=self._env.clock_ns,
            listener=self,
        )
        return self.life

    def refuse_second(self, sandbox_id: SandboxId) -> None:
        if self._closing:
            raise Unavailable(f"create sandbox '{sandbox_id}': the shim is ending")
        if self.life is not None:
            raise FailedPrecondition(f"create sandbox '{sandbox_id}': this shim already runs '{self.life.sandbox_id}'")

    async def make_sandbox(self, life: SandboxLife, request: SandboxRequest, hooks: ContainerHooks) -> None:
        """The VM of `life.sandbox` runs, without a container. For `SandboxLife.open`, which undoes it on an error."""
        if self._closing:
            raise Unavailable(f"start sandbox '{request.sandbox_id}': the shim is ending")
        spec = request.spec
        name = pod_of(spec.annotations)
        cgroups = self._env.host.cgroups((await self._env.host_facts()).cgroup_mode)
        cgroups.hasten_moves()  # the kernel delays the first of several moves: that delay begins now
        config = await step("read configuration", self._env.load_config(request.options, spec.annotations))
        if config.runtime.enable_tracing:
            self._env.export_trace(self._trace, config.runtime.otlp_endpoint, request.sandbox_id, spec.annotations)
        request = let_through(request, config.runtime.pod_annotations)
        plan, facts = await plan_sandbox(self._env, request, config)
        records = await self._env.open_records(request.sandbox_id)
        sandbox = life.sandbox = Sandbox(
            plan=plan,
            files=request.files,
            host_facts=facts,
            environment=self._env,
            records=records,
            tasks=self._tasks,
            listener=self,
        )
        self._pid_namespace = PodPidNamespace(
            sandbox,
            host=self._env.host,
            containers=self._containers,
            is_pod=life.outlives_containers or plan.kind is ContainerKind.POD_SANDBOX,
        )
        containers: Collection[Container] = self._containers.values()
        self._saved = SavedState(records, lambda: sandbox_snapshot(life, sandbox, containers, name, self._trace))
        self._saved.save()
        monitor = PodMonitor(sandbox, name=name, containers=containers, records=records, trace=self._trace)
        await sandbox.start(monitor, hooks)

    async def _create_container(
        self, request: CreateTask, spec: OciSpec, life: SandboxLife, sandbox: Sandbox, hooks: ContainerHooks
    ) -> Container:
        assert self._saved is not None, "make_sandbox has made it"
        assert self._pid_namespace is not None, "make_sandbox has made it"
        is_pause = request.container_id == life.owner and sandbox.plan.kind is ContainerKind.POD_SANDBOX
        binds = sandbox.vm.attachments.binds.all()
        plan = await plan_container(self._env.host, request, spec, sandbox.plan, binds, sandbox.network.sysctls)
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
            raise Unavailable(f"create container '{request.container_id}': {await life.loss_reason(str(exc))}") from exc
        if not is_pause:
            self._pid_namespace.container_was_created(request.container_id)
        sandbox.vm.network.container_was_created(request.container_id)
        self._saved.save_soon()
        return container

    @property
    def is_empty(self) -> bool:
        """There is no VM and no container, nor one under creation or deletion."""
        is_active = self.life is not None and self.life.is_active
        return not (self._containers or self._creating or self._deleting or is_active)

    # ---- calls on what exists

    async def start(self, container_id: ContainerId, exec_id: ExecId | None) -> int:
        container = self._find(container_id)
        name = f"exec {container_id}/{exec_id}" if exec_id else f"start {container_id}"
        with self._trace.of(name, saved=not exec_id):
            return await container.start(exec_id)

    def state(self, container_id: ContainerId, exec_id: ExecId | None) -> ProcessState:
        """The process's state; of a container under creation `ProcessState.being_created`."""
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
        container, life = self._find(container_id), self.life
        assert life is not None, "it is kept as long as a container is"
        if exec_id is not None:
            process = container.process(exec_id)
            await signal_exec(container, process, signal, all_processes=all_processes, tasks=self._tasks)
            return
        owner = container_id == life.owner
        await signal_init(container, life, signal, all_processes=all_processes, owner=owner, tasks=self._tasks)

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
        life = self.life
        if exec_id is None and life is not None and container_id == life.owner and container.caller is Caller.CRI_O:
            await asyncio.shield(life.exit)
        return exit_status

    async def stats(self, container_id: ContainerId) -> ContainerStats:
        return await self._find(container_id).stats()

    def connect(self, container_id: ContainerId) -> int:
        """The pid that containerd was given for the container; 0 for an unknown one."""
        container = self._containers.get(container_id)
        return container.pid if container else self._vm_pid if container_id in self._creating else 0

    @property
    def _vm_pid(self) -> int:
        """As `PodVm.pid`; for a remote VM, which may take minutes, also before its start."""
        sandbox = self.life.sandbox if self.life is not None else None
        if sandbox is None:
            return 0
        return os.getpid() if sandbox.plan.config.is_remote else sandbox.pid

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
        if (life := self.life) is not None and container.id == life.owner:
            life.begin_end(EndedBy.OWNER)
            await life.until_vm_gone()
            if container.hooks.follow_delete:
                await life.until_idle()  # else the hooks would run in the shim's cgroup and end with it
        await container.hooks.after_delete()
        self._containers.pop(container.id, None)
        self._forget_ended()
        if self._containers or (life is not None and life.outlives_containers):
            self.changed()
        return exit_status

    async def shutdown(self, now: bool) -> bool:
        """True when the shim may end after its reply: nothing is left to serve, or `now` is set.

        containerd calls it after each deleted task, when the pod may have others.
        """
        waits_for_stop = self.life is not None and self.life.outlives_containers
        if not now and (self._containers or self._creating or self._deleting or waits_for_stop):
            return False
        await self.close()
        return True

    async def close(self) -> None:
        """Every container and the sandbox are gone, and nothing new can be created. Idempotent."""
        self._closing = True
        await to_the_end(self._close())

    async def _close(self) -> None:
        for container in self._containers.values():
            container.report_all_ended(EXIT_KILLED)
        await asyncio.gather(*(self._abandon_creation(container_id) for container_id in tuple(self._creating)))
        if self.life is not None:
            await self.life.end(EndedBy.SHUTDOWN)
        if self._deleting:
            await asyncio.wait(self._deleting.values())
        await asyncio.gather(*(self._delete_at_shutdown(container) for container in tuple(self._containers.values())))
        if self.life is not None:
            await self.life.end(EndedBy.SHUTDOWN)  # again: directories were busy as long as containers had mounts there
        await self._tasks.close()
        self._forget_ended()

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

    def _forget_ended(self) -> None:
        """Once the sandbox has ended and has no container, its state, with the ledger, is removed.

        One with an owner is forgotten, so that the pod can get another.
        """
        if self._containers or self._creating or self.life is None or self.life.is_active:
            return
        if self._saved is not None:
            saved, self._saved = self._saved, None
            saved.remove()
        if not self.life.outlives_containers:
            self.life = None

    # ---- reports of life, sandbox and containers (LifeListener, PodListener)

    def changed(self) -> None:
        """The state on disk is current."""
        if self._saved is not None:
            self._saved.save()

    def init_started(self) -> None:
        if self._saved is not None:
            self._saved.save_soon()

    def init_exited(self, container_id: ContainerId, *, agent_gone: bool) -> None:
        """Ends the sandbox with its owner, as soon as the exit is published and before Delete."""
        if (life := self.life) is None or container_id != life.owner:
            return
        if agent_gone:
            self._tasks.supervise(f"lost/{container_id}", self._lose(life))
        else:
            life.begin_end(EndedBy.OWNER)

    async def _lose(self, life: SandboxLife) -> None:
        """The watchers of the sandbox mostly report the loss first, with the VM's own reason."""
        life.lost("agent", await life.loss_reason("the agent's connection ended"))

    def sandbox_ends(self, by: EndedBy) -> None:
        for container in self._containers.values():
            container.report_all_ended(CONTAINERS_STATUS[by])
        if by is EndedBy.LOST:
            self.changed()

    def sandbox_is_gone(self) -> None:
        self._forget_ended()
        if self._saved is not None:
            # Soon, not now: mostly a Delete removes the state first, which saves the write.
            self._saved.save_soon()

    def container_met_oom(self, container_id: str) -> None:
        if (container := self._containers.get(ContainerId(container_id))) is not None:
            container.met_oom()

    def _find(self, container_id: ContainerId) -> Container:
        container = self._containers.get(container_id)
        if container is None:
            raise NotFound(f"find container '{container_id}': no such container in this shim")
        return container
