"""crun: what is run, and what its failures say. Every call ends when crun does; the loop goes on meanwhile."""

from __future__ import annotations

import os

from guest.agent.errors import Internal
from guest.agent.runtime.children import find_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.runtime.children import Children
    from guest.agent.runtime.loop import Promise

RUN_DIR = "/run/pyshim-agent"
_MAX_ERROR_BYTES = 4096
_CGROUP_ROOT = "/sys/fs/cgroup"


class CrunFailed(Internal):
    """crun ended with an error; the text is crun's own."""


class Crun:
    """One per agent. Makes the agent a subreaper, because what crun starts must become its child.

    With `fixed_addresses` every start of it has the same addresses, which an emulator has translated code for. What it
    starts must not: crun sets the personality that a container's config.json names, of init and of execs.
    """

    def __init__(self, children: Children, *, fixed_addresses: bool = False) -> None:
        program = find_program("crun")
        if program is None:
            raise Internal("run crun: no executable of that name")
        if os.getpid() != 1:
            from guest.agent.storage import syscalls

            syscalls.become_subreaper()
        os.makedirs(f"{RUN_DIR}/crun", mode=0o700, exist_ok=True)
        has_cgroup2 = os.path.exists(f"{_CGROUP_ROOT}/cgroup.controllers")
        self.has_cgroups = has_cgroup2
        self._children = children
        self.fixed_addresses = fixed_addresses
        self._serial = 0
        self._base = [
            program,
            f"--root={RUN_DIR}/crun",
            f"--cgroup-manager={'cgroupfs' if has_cgroup2 else 'disabled'}",
        ]
        self.limits_devices = has_cgroup2 and _may_load_bpf()
        self._create_options = ["--no-pivot"] if _root_is_initramfs() else []

    def scratch(self, suffix: str) -> str:
        """A path that no other call uses; the caller removes the file."""
        self._serial += 1
        return f"{RUN_DIR}/{self._serial}.{suffix}"

    async def create(
        self, cid: str, bundle: str, pid_file: str, console: str | None, stdio: tuple[int, int, int]
    ) -> None:
        """The container waits to be started; what crun said meanwhile stays in its bundle."""
        options = [f"--bundle={bundle}", f"--pid-file={pid_file}", *self._create_options]
        if console is not None:
            options.append(f"--console-socket={console}")
        doing = f"create container {cid!r}"
        await self._run("create", [*options, "--", cid], doing, stdio, log_file=f"{bundle}/crun.log")

    async def start(self, cid: str, *, tells_hooks: bool) -> None:
        """The waiting init has been let go, and with `tells_hooks` the container's poststart hooks have run."""
        if tells_hooks or not _let_go(f"{RUN_DIR}/crun/{cid}/exec.fifo"):
            await self._run("start", ["--", cid], f"start container {cid!r}")

    async def execute(
        self, cid: str, process_file: str, pid_file: str, console: str | None, stdio: tuple[int, int, int]
    ) -> None:
        options = ["--detach", f"--process={process_file}", f"--pid-file={pid_file}"]
        if console is not None:
            options.append(f"--console-socket={console}")
        await self._run("exec", [*options, "--", cid], f"exec in container {cid!r}", stdio)

    async def delete(self, cid: str) -> None:
        """The container is gone, its processes killed; nothing happens when crun does not know it."""
        if os.path.exists(f"{RUN_DIR}/crun/{cid}"):
            # It tells hooks the container's state, and a hook may end without having read it.
            arguments = ["--force", "--", cid]
            await self._run("delete", arguments, f"remove container {cid!r}", outlives_readers=True)

    async def pause(self, cid: str) -> None:
        await self._run("pause", ["--", cid], f"pause container {cid!r}")

    async def resume(self, cid: str) -> None:
        await self._run("resume", ["--", cid], f"resume container {cid!r}")

    async def update(self, cid: str, resources_file: str) -> None:
        await self._run("update", [f"--resources={resources_file}", "--", cid], f"update container {cid!r}")

    async def _run(
        self,
        command: str,
        arguments: list[str],
        doing: str,
        stdio: tuple[int, int, int] = (-1, -1, -1),
        *,
        outlives_readers: bool = False,
        log_file: str = "",
    ) -> None:
        # stderr may be the container's own, so crun's complaint is read from its log file.
        keeps_log = bool(log_file)
        log_file = log_file or self.scratch("log")
        argv = [*self._base, f"--log=file:{log_file}", command, *arguments]
        try:
            ended: Promise = self._children.spawn(
                argv,
                stdin=stdio[0],
                stdout=stdio[1],
                stderr=stdio[2],
                outlives_readers=outlives_readers,
                fixed_addresses=self.fixed_addresses,
            )
            code = await ended
            if code != 0:
                raise CrunFailed(f"{doing}: {_complaint(log_file) or f'crun {command} exited {code}'}")
        finally:
            if not keeps_log:
                remove_file(log_file)


def remove_file(path: str) -> None:
    """`path` is gone."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _let_go(fifo: str) -> bool:
    """What `crun start` comes to when there are no hooks to run, without the start of a program that it takes.

    Init reads the FIFO; crun takes a container whose FIFO is there for one that is not started. False when this cannot
    be done, so that crun is asked and says why. Source: crun's src/libcrun/status.c, for years the same.
    """
    try:
        fd = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # not there, or init is gone
    try:
        os.unlink(fifo)
        return os.write(fd, b"\0") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def _complaint(log_file: str) -> str:
    try:
        with open(log_file, "rb") as file:
            text = file.read(_MAX_ERROR_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _root_is_initramfs() -> bool:
    # pivot_root(2) cannot leave the initial root file system. That has no device, as the image's own root has.
    if os.major(os.stat("/").st_dev):
        return False
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        types = [line.split(" ")[2] for line in file if line.split(" ")[1:2] == ["/"]]
    return bool(types) and types[-1] == "rootfs"


def _may_load_bpf() -> bool:
    """Whether device rules can be enforced: on cgroup v2 they are a BPF program, for which crun also raises a limit."""
    from guest.agent.storage import syscalls

    sys_admin, sys_resource = 21, 24
    return syscalls.has_capability(sys_admin) and syscalls.has_capability(sys_resource)
