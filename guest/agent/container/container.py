"""One container, from its creation by crun to the end of its last process, and all containers of the sandbox.

Theory of operation. `Containers.create` writes the bundle and runs `crun create`; init then waits inside crun until
`start`. The process that crun leaves becomes this process's child, so `Children` sees its end. One lock per container
orders what changes it; signals, waits and streams need no lock. A failed `create` leaves nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

from protos.agent import oci_pb2

from guest.agent.container.cgroup import CgroupStats
from guest.agent.container.crun import Crun, CrunStdio, Process, Stdio
from guest.agent.container.spec import Json, oci_process
from guest.agent.errors import AlreadyExists, FailedPrecondition, Internal, InvalidArgument, NotFound
from guest.agent.files import opened, read_text, remove_file, write_text
from guest.agent.syscalls import RT_SIGTIMEDWAIT

log = logging.getLogger(__name__)

CONTAINERS = "/run/kata-containers"
_CGROUP_ROOT = "/sys/fs/cgroup"
# A probe every few seconds for months must not make the table grow.
_MAX_FINISHED_EXECS = 256
# Looks at a cgroup whose processes were killed, and seconds between two.
_REMOVE_LOOKS, _REMOVE_PAUSE_S = 20, 0.01
# Looks at a process that runs at each of them: between `status` and `syscall` a wait may have ended.
_MAX_LOOKS = 5
_SIGNAL_SET_BYTES = 8


class Container:
    """A container that crun has created. `cgroup` is its directory, "" when the guest has no cgroup v2.

    `pci_addresses` has the guest's address of each PCI function passed through to it, by the host's.
    """

    def __init__(
        self,
        cid: str,
        spec: oci_pb2.Spec,
        init: Process,
        *,
        cgroup: str,
        hooks: Collection[str],
        pci_addresses: Mapping[str, str],
        crun: Crun,
    ) -> None:
        self.cid = cid
        self.spec = spec
        self.init = init
        self.cgroup = cgroup
        self.cgroup_stats = CgroupStats(cgroup)
        self.pci_addresses = pci_addresses
        self.processes: dict[str, Process] = {"": init}
        self._hooks = hooks
        self._is_started = False
        self._crun = crun
        self._lock = asyncio.Lock()
        # No process of the container outlives its init, even in a shared pid namespace, as with runc's shim.
        init.child.when_ended(lambda _code: self.kill_all())

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Init goes on to become the container's program."""
        async with self._lock:
            if self._is_started:
                raise FailedPrecondition(f"start container {self.cid!r}: already started")
            if self.init.has_exited:
                raise FailedPrecondition(f"start container {self.cid!r}: init has already exited")
            await self._crun.start(self.cid, has_hooks="poststart" in self._hooks)
            self._is_started = True

    async def execute(self, exec_id: str, process: oci_pb2.Process) -> None:
        """A further process runs in the container. AlreadyExists if an unfinished one has the id."""
        async with self._lock:
            old = self.init if exec_id == self.cid else self.processes.get(exec_id)
            if old is self.init or (old is not None and not old.has_exited):
                raise AlreadyExists(f"exec {exec_id!r} in container {self.cid!r}: the id is in use")
            if self.init.has_exited:
                raise FailedPrecondition(f"exec {exec_id!r} in container {self.cid!r}: the container has exited")
            process_file, pid_file = self._crun.scratch("process"), self._crun.scratch("pid")
            write_json(process_file, oci_process(process))
            try:
                started = await _launch(
                    self._crun,
                    exec_id,
                    process,
                    pid_file=pid_file,
                    run=lambda stdio: self._crun.execute(self.cid, process_file, pid_file, stdio),
                )
            finally:
                remove_file(process_file)
                remove_file(pid_file)
            self._forget_finished()
            if old is not None:
                old.close()
            self.processes[exec_id] = started

    def _forget_finished(self) -> None:
        finished = [key for key, process in self.processes.items() if key and process.is_finished()]
        for key in finished[: max(0, len(finished) - _MAX_FINISHED_EXECS)]:
            self.processes.pop(key).close()

    async def remove(self) -> None:
        """The container, its processes and its cgroup are gone; streams are at their end. The bundle is still there."""
        async with self._lock:
            self.kill_all()
            for process in self.processes.values():
                await process.child.wait()
            if "poststop" not in self._hooks and await _remove_cgroup(self.cgroup):
                self._crun.forget(self.cid)
            else:
                await self._crun.delete(self.cid)
            for process in self.processes.values():
                process.close()
            self.cgroup_stats.close()

    # -- processes -------------------------------------------------------------------------------------------------

    def process(self, exec_id: str) -> Process:
        """Init for "" and for the container's id, which Kata's shims send; else the exec of that id.

        NotFound names both ids.
        """
        found = self.processes.get("" if exec_id == self.cid else exec_id)
        if found is None:
            raise NotFound(f"process {exec_id!r} in container {self.cid!r}: no such process")
        return found

    def signal(self, exec_id: str, number: int) -> None:
        """The process gets the signal, unless it has ended.

        SIGKILL for "" goes to every process of the container. SIGTERM for an init that neither handles, blocks,
        ignores nor awaits it becomes SIGKILL: the kernel would drop it, because init is PID 1 of its namespace. Both as
        kata-agent does, but that one takes an init that awaits the signal, as `tini` does, for one that does not.
        """
        if not 0 < number <= 64:
            raise InvalidArgument(f"signal container {self.cid!r}: no signal {number}")
        process = self.process(exec_id)
        if not exec_id and number == signal.SIGKILL:
            self.kill_all()
            return
        if process is self.init and number == signal.SIGTERM and not takes_signal(process.pid, number):
            number = signal.SIGKILL
        self._kill(process, number)

    def kill_all(self) -> None:
        """SIGKILL is on its way to every process of the container, forks in progress included."""
        if self.cgroup:
            try:
                write_text(f"{self.cgroup}/cgroup.kill", "1")
            except OSError as error:
                log.debug("no cgroup.kill", extra={"container": self.cid, "error": error})
        for process in self.processes.values():
            self._kill(process, signal.SIGKILL)

    def _kill(self, process: Process, number: int) -> None:
        try:
            with suppress(ProcessLookupError):
                process.child.send_signal(number)
        except OSError as error:
            raise Internal(f"signal process {process.pid} of container {self.cid!r}: {error}") from error

    # -- resources -------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        async with self._lock:
            await self._crun.pause(self.cid)

    async def resume(self) -> None:
        async with self._lock:
            await self._crun.resume(self.cid)

    async def update(self, resources: Json) -> None:
        """The container's cgroup has these limits; limits not named stay."""
        path = self._crun.scratch("resources")
        write_json(path, resources)
        try:
            async with self._lock:
                await self._crun.update(self.cid, path)
        finally:
            remove_file(path)
            self.cgroup_stats.forget()


class Containers:
    """The sandbox's containers by id, in the order of their creation."""

    def __init__(self, crun: Crun) -> None:
        self._crun = crun
        self._known: dict[str, Container] = {}
        self._in_creation: set[str] = set()

    def __iter__(self) -> Iterator[Container]:
        return iter(tuple(self._known.values()))

    def find(self, cid: str) -> Container:
        """The container of that id. NotFound names it."""
        container = self._known.get(cid)
        if container is None:
            raise NotFound(f"container {cid[:80]!r}: no such container")
        return container

    @contextmanager
    def reserved(self, cid: str) -> Iterator[None]:
        """No other container gets this id while the block runs. AlreadyExists if one has it."""
        if cid in self._known or cid in self._in_creation:
            raise AlreadyExists(f"create container {cid!r}: it exists")
        self._in_creation.add(cid)
        try:
            yield
        finally:
            self._in_creation.discard(cid)

    async def create(
        self, cid: str, spec: oci_pb2.Spec, config: Json, *, pci_addresses: Mapping[str, str]
    ) -> Container:
        """crun has made the container from `config` (its config.json) and its init waits to be started."""
        bundle, cgroup = f"{CONTAINERS}/{cid}", config["linux"]["cgroupsPath"]
        pid_file = f"{bundle}/crun.pid"
        _remove_empty_cgroup(cgroup)
        write_json(f"{bundle}/config.json", config)
        try:
            init = await _launch(
                self._crun,
                "",
                spec.Process,
                pid_file=pid_file,
                run=lambda stdio: self._crun.create(cid, bundle, pid_file, stdio),
            )
        except BaseException:
            await self._crun.delete(cid)
            raise
        container = Container(
            cid,
            spec,
            init,
            cgroup=_CGROUP_ROOT + cgroup if self._crun.has_cgroups else "",
            hooks=config.get("hooks", {}).keys(),
            pci_addresses=pci_addresses,
            crun=self._crun,
        )
        self._known[cid] = container
        return container

    def forget(self, container: Container) -> None:
        """The container was removed."""
        self._known.pop(container.cid, None)


async def _launch(
    crun: Crun,
    exec_id: str,
    process: oci_pb2.Process,
    *,
    pid_file: str,
    run: Callable[[CrunStdio], Awaitable[None]],
) -> Process:
    """The process that crun leaves behind in `run`, with its streams. Its pid is in `pid_file` then."""
    stdio = Stdio(
        terminal=process.Terminal,
        has_stdin=not process.NoStdin,
        console_path=crun.scratch("tty"),
        pipe_size=crun.pipe_size,
    )
    try:
        with crun.children.expecting() as adopt:
            await run(stdio.for_crun)
            return stdio.attach(exec_id, adopt(int(read_text(pid_file))))
    finally:
        stdio.close()


def write_json(path: str, value: Json) -> None:
    """The file has `value`. A new file is readable by its owner only."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(json.dumps(value).encode())


async def _remove_cgroup(folder: str) -> bool:
    """True once the cgroup and those below it are gone; False if its processes, which are being killed, stay."""
    for _ in range(_REMOVE_LOOKS if folder else 0):
        try:
            for path, _folders, _files in os.walk(folder, topdown=False):
                os.rmdir(path)
        except OSError:
            await asyncio.sleep(_REMOVE_PAUSE_S)
        else:
            return True
    return False


def _remove_empty_cgroup(path: str) -> None:
    """The cgroup of a former container with the same name is gone, unless it is in use.

    Seen on Linux 6.18: crun's child is killed at once in a cgroup whose `cgroup.kill` was written before.
    """
    with suppress(OSError):  # not there, or in use
        os.rmdir(_CGROUP_ROOT + path)


def takes_signal(pid: int, number: int) -> bool:
    """True if the process blocks, ignores, handles or awaits the signal.

    Sources: proc(5), SigBlk, SigIgn, SigCgt of `status`; the kernel's sig_ignored(). A reader of a signalfd blocks the
    signal. While rt_sigtimedwait waits, the kernel takes the awaited signals out of SigBlk.
    """
    for _ in range(_MAX_LOOKS):
        try:
            lines = read_text(f"/proc/{pid}/status").splitlines()
            masks = [int(line[7:], 16) for line in lines if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:"))]
            if any(mask >> (number - 1) & 1 for mask in masks):
                return True
            call = read_text(f"/proc/{pid}/syscall").split()
            if call[0] == str(RT_SIGTIMEDWAIT):
                return bool(_awaited_signals(pid, int(call[1], 16)) >> (number - 1) & 1)
        except OSError:
            return False  # it has ended, or its memory changes: the process runs
        if call[0] != "running":
            return False
    return False


def _awaited_signals(pid: int, address: int) -> int:
    """The signals of the set at `address` in the process's memory, as a mask."""
    with opened(f"/proc/{pid}/mem", os.O_RDONLY) as memory:
        return int.from_bytes(os.pread(memory, _SIGNAL_SET_BYTES, address), sys.byteorder)
