"""One container: from the bundle on disk to the last of its processes.

Theory of operation. `create` writes the bundle and runs `crun create`; init then waits inside crun until `start`.
Whatever crun leaves behind is this process's child, so its end is seen by `Children`. One lock per container orders
what changes it; signals, waits and streams need no lock. A failed `create` leaves nothing.
"""

from __future__ import annotations

import os

from guest.agent import log
from guest.agent.container.crun import Crun, remove_file
from guest.agent.container.process import Process, Stdio
from guest.agent.errors import AlreadyExists, FailedPrecondition, Internal, InvalidArgument, NotFound
from guest.agent.runtime.loop import Lock
from guest.agent.runtime.signals import SIGKILL, SIGTERM
from guest.agent.text_files import read_text
from guest.agent.wire.jsontext import dumps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent
    from guest.agent.container.spec import Json
    from guest.agent.wire.codec import Message

CONTAINERS = "/run/kata-containers"
_CGROUP_ROOT = "/sys/fs/cgroup"
_MAX_FINISHED_EXECS = 256


class Container:
    """A container known to crun. `cgroup` is its directory, "" when the guest has no cgroup v2."""

    def __init__(self, agent: Agent, crun: Crun, cid: str, spec: Message) -> None:
        self._agent = agent
        self._crun = crun
        self.cid = cid
        self.spec = spec
        self.bundle = f"{CONTAINERS}/{cid}"
        self.cgroup = ""
        self.is_started = False
        self._has_poststart = False
        self.pci_addresses: dict[str, str] = {}
        """Host -> guest address of the functions passed through to it."""
        self.lock = Lock(agent.loop)
        self.processes: dict[str, Process] = {}
        self.init = Process(agent.loop, "", has_terminal=spec.Process.Terminal)

    def rewrite_env(self, process: Message) -> None:
        """Variables that name the host's PCI functions name the guest's. InvalidArgument for one that is not here."""
        if any(text.startswith("PCIDEVICE_") for text in process.Env):
            from guest.agent.storage.passthrough import rewrite_env

            process._values["Env"] = rewrite_env(process.Env, self.pci_addresses)

    # -- life ------------------------------------------------------------------------------------------------------

    async def create(self, config: Json) -> None:
        """crun has made the container from `config` and its init waits to be started."""
        _remove_empty_cgroup(config["linux"]["cgroupsPath"])
        write_file(f"{self.bundle}/config.json", dumps(config))
        self._has_poststart = bool(config.get("hooks", {}).get("poststart"))
        stdio = self._stdio(self.init)

        async def run(pid_file: str) -> None:
            await self._crun.create(self.cid, self.bundle, pid_file, stdio.console, stdio.child_fds)

        try:
            await self._launch(self.init, stdio, run, f"{self.bundle}/crun.pid")
        except BaseException:
            await self._crun.delete(self.cid)
            raise
        self.processes[""] = self.init
        if self._crun.has_cgroups:
            self.cgroup = _CGROUP_ROOT + config["linux"]["cgroupsPath"]

    async def start(self) -> None:
        """Init has been told to become the container's program."""
        await self.lock.acquire()
        try:
            if self.is_started:
                raise FailedPrecondition(f"start container {self.cid!r}: already started")
            if self.init.exited.done:
                raise FailedPrecondition(f"start container {self.cid!r}: init has already exited")
            await self._crun.start(self.cid, tells_hooks=self._has_poststart)
            self.is_started = True
        finally:
            self.lock.release()

    async def execute(self, exec_id: str, process: Message, spec: Json) -> None:
        """A further process runs in the container. AlreadyExists when the id is taken by one that is not finished."""
        await self.lock.acquire()
        try:
            old = self.init if exec_id == self.cid else self.processes.get(exec_id)
            if old is self.init or (old is not None and not old.exited.done):
                raise AlreadyExists(f"exec {exec_id!r} in container {self.cid!r}: the id is in use")
            if self.init.exited.done:
                raise FailedPrecondition(f"exec {exec_id!r} in container {self.cid!r}: the container has exited")
            await self._execute(Process(self._agent.loop, exec_id, has_terminal=process.Terminal), spec)
        finally:
            self.lock.release()

    async def _execute(self, process: Process, spec: Json) -> None:
        process_file, pid_file = self._crun.scratch("process"), self._crun.scratch("pid")
        write_file(process_file, dumps(spec))
        stdio = self._stdio(process)

        async def run(pid_file: str) -> None:
            await self._crun.execute(self.cid, process_file, pid_file, stdio.console, stdio.child_fds)

        try:
            await self._launch(process, stdio, run, pid_file)
        finally:
            remove_file(process_file)
            remove_file(pid_file)
        self._forget_finished()
        old = self.processes.pop(process.exec_id, None)
        if old is not None:
            old.close()
        self.processes[process.exec_id] = process

    def _stdio(self, process: Process) -> Stdio:
        console_path = self._crun.scratch("tty")
        pipe_size = self._agent.settings.container_pipe_size
        return Stdio(self._agent.loop, terminal=process.has_terminal, console_path=console_path, pipe_size=pipe_size)

    async def _launch(self, process: Process, stdio: Stdio, run: object, pid_file: str) -> None:
        """`run` has crun leave a process behind, whose number is in `pid_file` and which becomes `process`."""
        children = self._agent.children
        children.expect()
        try:
            await run(pid_file)  # type: ignore[operator]
            pid = int(read_text(pid_file))
            stdio.attach(process)
            process.started(pid, children.adopt(pid))
        finally:
            children.expected()
            stdio.abandon()

    def _forget_finished(self) -> None:
        # A liveness probe every few seconds for months must not grow the table.
        finished = [key for key, process in self.processes.items() if key and process.is_finished()]
        for key in finished[: max(0, len(finished) - _MAX_FINISHED_EXECS)]:
            self.processes.pop(key).close()

    async def remove(self) -> None:
        """The container, its processes and its cgroup are gone; streams are at their end. The bundle is still there."""
        await self.lock.acquire()
        try:
            self.kill_all()
            await self._crun.delete(self.cid)
            # crun killed them, but their ends arrive here: nobody may see a removed container without an exit code.
            for process in self.processes.values():
                if self._agent.children.is_running(process.pid):
                    await process.exited
            for process in self.processes.values():
                process.close()
        finally:
            self.lock.release()

    # -- processes -------------------------------------------------------------------------------------------------

    def process(self, exec_id: str) -> Process:
        """Init for "" and for the container's own id, as the shims of Kata name it; else the exec of that id.

        NotFound names both ids.
        """
        found = self.processes.get("" if exec_id == self.cid else exec_id)
        if found is None:
            raise NotFound(f"process {exec_id!r} in container {self.cid!r}: no such process")
        return found

    def signal(self, exec_id: str, number: int) -> None:
        """The process gets the signal; nothing happens when it has ended.

        SIGKILL for "" goes to every process of the container. SIGTERM for an init that neither handles, blocks nor
        ignores it becomes SIGKILL: the kernel would drop it, because init is PID 1 of its namespace. Both as kata-agent
        does.
        """
        if not 0 < number <= 64:
            raise InvalidArgument(f"signal container {self.cid!r}: no signal {number}")
        process = self.process(exec_id)
        if not exec_id and number == SIGKILL:
            self.kill_all()
            return
        if process is self.init and number == SIGTERM and not _takes_signal(process.pid, number):
            number = SIGKILL
        self._kill(process, number)

    def kill_all(self) -> None:
        """SIGKILL is on its way to every process of the container, forks in progress included."""
        if self.cgroup:
            try:
                write_file(f"{self.cgroup}/cgroup.kill", "1")
            except OSError as error:
                log.debug("no cgroup.kill", container=self.cid, error=error)
        for process in self.processes.values():
            self._kill(process, SIGKILL)

    def _kill(self, process: Process, number: int) -> None:
        if self._agent.children.is_running(process.pid):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                pass
            except OSError as error:
                raise Internal(f"signal process {process.pid} of container {self.cid!r}: {error}") from error

    # -- resources -------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        await self._locked(self._crun.pause(self.cid))

    async def resume(self) -> None:
        await self._locked(self._crun.resume(self.cid))

    async def update(self, resources: Json) -> None:
        """The container's cgroup has these limits; limits not named stay."""
        path = self._crun.scratch("resources")
        write_file(path, dumps(resources))
        try:
            await self._locked(self._crun.update(self.cid, path))
        finally:
            remove_file(path)

    async def _locked(self, action: object) -> None:
        await self.lock.acquire()
        try:
            await action  # type: ignore[misc]
        finally:
            self.lock.release()


def write_file(path: str, text: str) -> None:
    """The file holds `text`, in one write(2), readable by its owner only if it is new."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        data = memoryview(text.encode("utf-8", "surrogateescape"))
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def _remove_empty_cgroup(path: str) -> None:
    """What a container of the same name left there is gone, unless it is in use.

    Seen on Linux 6.18: crun's child is killed at birth in a cgroup that once had `cgroup.kill` written.
    """
    try:
        os.rmdir(_CGROUP_ROOT + path)
    except OSError:
        pass  # not there, or in use


def _takes_signal(pid: int, number: int) -> bool:
    """Whether the process blocks, ignores or handles the signal. Source: proc(5), SigBlk, SigIgn, SigCgt."""
    try:
        for line in read_text(f"/proc/{pid}/status").split("\n"):
            if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")) and int(line[7:], 16) >> (number - 1) & 1:
                return True
    except (FileNotFoundError, ProcessLookupError):
        pass
    return False
