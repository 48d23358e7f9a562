"""A sandbox as its state has it: what a later daemon would answer, and what it would have to open to take it over.

No daemon takes over yet: this is the reader by which tests see that what is written is enough for one.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pyshim.model.errors import NotFound
from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.ledger import ResourceKind
from pyshim.model.snapshot import ContainerSnapshot, ExecSnapshot, SandboxSnapshot, StreamPositions
from pyshim.model.task import ProcessInfo, ProcessState, Status
from pyshim.state.schema import SandboxState


class Reopened(NamedTuple):
    """A descriptor of the former daemon: what it was for, and where a successor gets its own."""

    purpose: str
    where: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """Answers of the Task API by what is on disk. A process that has ended meanwhile is still as it was last seen."""

    state: SandboxState

    @property
    def snapshot(self) -> SandboxSnapshot:
        """Raises NotFound for a sandbox that was not planned yet: there is nothing to take over."""
        if self.state.snapshot is None:
            raise NotFound(f"recover sandbox {self.state.sandbox_id!r}: it has no vm yet")
        return self.state.snapshot

    def container(self, container_id: ContainerId) -> ContainerSnapshot:
        for container in self.snapshot.containers:
            if container.container_id == container_id:
                return container
        raise NotFound(f"recover container {container_id!r}: the state of {self.state.sandbox_id!r} has none")

    def process_state(self, container_id: ContainerId, exec_id: ExecId | None) -> ProcessState:
        """The answer of State."""
        container = self.container(container_id)
        process = self._process(container, exec_id)
        is_paused = exec_id is not None and Status.PAUSED is container.status and process.status is Status.RUNNING
        return ProcessState(
            container_id=container_id,
            exec_id=exec_id,
            bundle=container.bundle,
            pid=self.snapshot.vmm_pid,
            status=Status.PAUSED if is_paused else process.status,
            stdio=process.stdio,
            exit=process.exit,
        )

    def processes(self, container_id: ContainerId) -> tuple[ProcessInfo, ...]:
        """The answer of Pids."""
        container, pid = self.container(container_id), self.snapshot.vmm_pid
        running = (one for one in container.execs if one.status is Status.RUNNING)
        return (
            ProcessInfo(pid=pid, exec_id=None),
            *(ProcessInfo(pid=pid, exec_id=process.exec_id) for process in running),
        )

    def moved(self, container_id: ContainerId, exec_id: ExecId | None) -> StreamPositions:
        return self._process(self.container(container_id), exec_id).moved

    def reopened(self) -> tuple[Reopened, ...]:
        """What a successor opens, in an order in which it can: the processes first, for a dead VMM ends it all.

        The guest's consoles are not among them: they were socket pairs, and QEMU does without.
        """
        snapshot = self.snapshot
        found = [
            Reopened("pidfd", f"{entry.detail['pid']}/{entry.detail['start_ticks']}")
            for entry in self.state.ledger
            if entry.kind is ResourceKind.PROCESS and "pid" in entry.detail
        ]
        found.append(Reopened("listen", self.state.shim.socket))
        if snapshot.vmm_pid:
            # What a remote VM's socket has behind it is its service, connected anew for each call.
            control = "service" if snapshot.hypervisor_type == "remote" else "qmp"
            found.append(Reopened(control, str(snapshot.hypervisor.get("APISocket", ""))))
            found.append(Reopened("agent", snapshot.agent_address))
        for container in snapshot.containers:
            processes: tuple[ContainerSnapshot | ExecSnapshot, ...] = (container, *container.execs)
            for process in processes:
                if process.exit is None:
                    streams = ("stdin", "stdout", "stderr")
                    found += [Reopened(name, path) for name in streams if (path := getattr(process.stdio, name))]
        return tuple(found)

    def _process(self, container: ContainerSnapshot, exec_id: ExecId | None) -> ContainerSnapshot | ExecSnapshot:
        if exec_id is None:
            return container
        for process in container.execs:
            if process.exec_id == exec_id:
                return process
        raise NotFound(f"recover exec {exec_id!r}: container {container.container_id!r} has none")
