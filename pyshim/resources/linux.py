"""The host as orchestration sees it (`model/seams.py`, Host): blocking work in threads, streams on the loop."""

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Callable, Collection, Mapping
from typing import BinaryIO, ParamSpec, TypeVar

from pyshim.concurrency.deadlines import CHANGE_S, MARGIN_S, READ_S, within_s
from pyshim.host.fds import OwnedFd, with_spare_descriptors
from pyshim.host.files import list_tree, read_piece
from pyshim.host.kernel_image import boot_file_architecture, kernel_release
from pyshim.host.mounts.mounting import perform_mount
from pyshim.host.mounts.table import mounted_files
from pyshim.host.os_errors import os_errors
from pyshim.host.processes.children import Children
from pyshim.host.processes.hooks import hook_timeout_s, netns_member, run_hook
from pyshim.host.python_child import python_command
from pyshim.host.streams.opening import Streams, open_streams
from pyshim.host.threads import ended, in_own_thread, in_thread, thread_to_the_end
from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.oci import OciHook
from pyshim.model.places import METRICS_DIRECTORY
from pyshim.model.remote_vms import RemoteVmState
from pyshim.model.task import Stdio
from pyshim.model.vm import LocalVm
from pyshim.model.volumes import HostMount, MountedFile, SourceFacts, TreeEntry, VirtiofsdPlan
from pyshim.resources.cgroups.host.hierarchies import Hierarchy, mounted
from pyshim.resources.cgroups.host.sandbox_cgroups import LinuxCgroups
from pyshim.resources.network.host.namespace import make_netns
from pyshim.resources.templates.plan import template_key
from pyshim.resources.templates.store import TemplateStore, machine_facts
from pyshim.resources.volumes.host.share_namespace import ShareNamespace
from pyshim.resources.volumes.host.sources import source_facts
from pyshim.resources.volumes.host.virtiofsd import VirtiofsdProcess, start_virtiofsd
from pyshim.resources.volumes.host.virtiofsd_flavours import VirtiofsdFlavours

log = logging.getLogger(__name__)

P = ParamSpec("P")
_IN_MEMORY = ("/run/vc/", f"{METRICS_DIRECTORY}/")
"""Where the shim has sockets of its own, on a file system in memory."""
_LOG_FD, _LOCK_FD = 2, 3
T = TypeVar("T")


class LinuxHost:
    """Implements the seam `Host` on this machine. Every method raises ShimError naming the object."""

    def __init__(self, *, children: Children, undo_entry: Callable[[LedgerEntry], None], template_maker: str) -> None:
        """`template_maker` is a module whose `main`, in a child, makes the template of a configuration file."""
        self._children = children
        self._template_maker = template_maker
        self._undo_entry = undo_entry
        self._flavours = VirtiofsdFlavours(children)
        self._share: ShareNamespace | None = None
        """virtiofsd's mount namespace, once it runs in one."""
        self._hierarchies: tuple[Hierarchy, ...] = ()
        """The mounted cgroup hierarchies; empty before the first look."""
        self._stuck: dict[str, asyncio.Future[None]] = {}
        """Changes that go on after their caller was cancelled, by path."""

    @within_s(READ_S, "read '{path}'")
    async def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """The file's content. Raises NotFound when missing, InvalidArgument when larger or no regular file."""
        return await _reading(path, _read_bytes, path, max_bytes)

    @within_s(READ_S, "look at '{path}'")
    async def source_facts(self, path: str, vhost_user_store: str) -> SourceFacts:
        """The kind of `path`, links followed; see `sources.source_facts`."""
        return await in_thread(source_facts, path, vhost_user_store)

    @within_s(READ_S, "look at mounts")
    async def mounted_files(self, paths: Collection[str]) -> Mapping[str, MountedFile]:
        """Where each path is; see `table.mounted_files`."""
        return await _reading("/proc/self/mountinfo", mounted_files, paths)

    def cgroups(self, mode: CgroupMode) -> LinuxCgroups:
        """One sandbox's host cgroups; see `cgroups.LinuxCgroups`."""
        with os_errors("find cgroup mounts"):
            self._hierarchies = self._hierarchies or mounted()
            return LinuxCgroups(mode, self._hierarchies)

    @within_s(CHANGE_S, "make directory '{path}'")
    async def make_directory(self, path: str, mode: int) -> None:
        """The directory exists with exactly `mode`; those above it were made with 0755 where missing.

        Not in a thread, whose start takes longer: the directories are below /run, in memory.
        """
        with os_errors(f"make directory {path!r}"):
            _make_directory(path, mode)

    @within_s(CHANGE_S, "list '{root}'")
    async def list_tree(self, root: str) -> tuple[TreeEntry, ...]:
        """Directories, files and links of a host tree; see `files.list_tree`."""
        return await _reading(root, list_tree, root)

    @within_s(READ_S, "read '{root}/{path}'")
    async def read_piece(self, root: str, path: str, offset: int, length: int) -> bytes:
        """A piece of a file beneath `root`; see `files.read_piece`."""
        return await _reading(f"{root}/{path}" if path else root, read_piece, root, path, offset, length)

    @within_s(CHANGE_S, "make disk '{path}'")
    async def make_disk_file(self, path: str, size_bytes: int, head: bytes = b"") -> None:
        """A new sparse file of that size that begins with `head`; what was there before is replaced."""

        def make() -> None:
            with _new_file(path, 0o600) as file:
                file.write(head)
                file.truncate(size_bytes)

        with os_errors(f"make disk {path!r}"):
            await thread_to_the_end(make)

    @within_s(CHANGE_S, "write '{path}'")
    async def write_bytes(self, path: str, content: bytes, mode: int) -> None:
        """A new file with that content; what was there before is replaced."""

        def write() -> None:
            with _new_file(path, mode) as file:
                file.write(content)
                os.fchmod(file.fileno(), mode)

        with os_errors(f"write {path!r}"):
            await thread_to_the_end(write)

    @within_s(READ_S, "read '{path}'")
    async def kernel_release(self, path: str) -> str:
        """The release of a kernel's file; see `host/kernel_image.py`."""
        return await _reading(path, kernel_release, path)

    @within_s(READ_S, "read the headers of kernel and initrd")
    async def boot_architectures(self, paths: Collection[str]) -> Mapping[str, str]:
        """For each boot file that says so, its architecture; see `host/kernel_image.py`. One that cannot be read says
        nothing here: the VMM names it.
        """

        def look() -> Mapping[str, str]:
            found: dict[str, str] = {}
            for path in paths:
                with contextlib.suppress(OSError):
                    found[path] = boot_file_architecture(path)
            return found

        return await in_thread(look)

    @within_s(READ_S, "measure '{path}'")
    async def disk_bytes(self, path: str) -> int:
        """The size of a block device or file."""

        def measure() -> int:
            with OwnedFd(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
                return os.lseek(fd.fileno(), 0, os.SEEK_END)

        with os_errors(f"measure {path!r}"):
            return await in_thread(measure)

    @within_s(READ_S, "find template in '{root}'")
    async def find_template(self, root: str, vm: LocalVm) -> str:
        """The directory of a template; see `templates/store.py`."""

        return await _reading(root, lambda: TemplateStore(root).find(template_key(vm, machine_facts(vm))))

    @within_s(CHANGE_S, "make template in '{root}'")
    async def make_template(self, root: str, vm: LocalVm, source: str) -> None:
        """The template's maker has been started. It boots a machine, and may end after the sandbox."""
        store = TemplateStore(root)
        key = await _reading(root, lambda: template_key(vm, machine_facts(vm)))
        command = python_command(f"from {self._template_maker} import main; main({str(source)!r})")
        with os_errors(f"make template in {root!r}"), contextlib.suppress(Unavailable), store.locked() as lock:
            if not store.was_tried(key):
                store.note_trial(key)
                await self._children.spawn(command, fds={_LOCK_FD: lock.fileno()}, stderr=_LOG_FD)

    @within_s(CHANGE_S, "discard template '{directory}'")
    async def discard_template(self, directory: str, reason: str) -> None:
        root, _, key = directory.rpartition("/")
        store = TemplateStore(root)
        await thread_to_the_end(store.discard, key)
        store.note_trial(key, reason)

    @within_s(CHANGE_S, "mount '{mount.source}' on '{mount.target}'")
    async def mount(self, mount: HostMount) -> None:
        """The mount is in place, or nothing is; see `mounts.perform_mount`."""
        perform = self._share.mount if self._share is not None and mount.for_guest_only else perform_mount
        await self._change(mount.target, perform, mount)

    @within_s(CHANGE_S, "start virtiofsd '{plan.binary}'")
    async def start_virtiofsd(self, plan: VirtiofsdPlan, ledger: Ledger) -> VirtiofsdProcess:
        """virtiofsd runs and its socket takes connections; see `virtiofsd.start_virtiofsd`."""
        process = await start_virtiofsd(plan, ledger, self._children, flavours=self._flavours)
        self._share = process.namespace
        return process

    @within_s(CHANGE_S, "open streams of '{process_id}'")
    async def open_streams(self, stdio: Stdio, *, namespace: str, process_id: str) -> Streams:
        """The process's streams are open; see `streams.open_streams`."""
        return await open_streams(stdio, namespace=namespace, process_id=process_id, children=self._children)

    @within_s(lambda self, kind, hook, state: hook_timeout_s(hook) + MARGIN_S, "run {kind} hook '{hook.path}'")
    async def run_hook(self, kind: str, hook: OciHook, state: bytes) -> None:
        """The hook has exited with status 0, within its own time limit; see `hooks.run_hook`."""
        await run_hook(self._children, kind, hook, state)

    @within_s(CHANGE_S, "make network namespace '{path}'")
    async def make_netns(self, path: str) -> None:
        """See `namespace.make_netns`."""
        await self._change(path, make_netns, path)

    def netns_member(self, netns_path: str) -> contextlib.AbstractAsyncContextManager[int]:
        """A process in that network namespace; see `hooks.netns_member`."""
        return netns_member(self._children, netns_path)

    @within_s(CHANGE_S, "release {entry.kind.value} '{entry.key}'")
    async def undo(self, entry: LedgerEntry) -> None:
        """The resource is gone; see `cleanup/undo.py`.

        Raises FailedPrecondition while an earlier change of it may still happen: the ledger must keep the entry.
        """
        if entry.key in self._stuck:
            raise FailedPrecondition(f"release {entry.kind.value} {entry.key!r}: an earlier change of it has not ended")
        if _is_quick(entry):
            self._undo_here(entry)
        else:
            try:
                await self._change(entry.key, with_spare_descriptors, self._undo_here, entry)
            except ResourceExhausted:
                # At the limit of processes: a resource that stays would cost more than a loop that waits.
                with_spare_descriptors(self._undo_here, entry)

    def _undo_here(self, entry: LedgerEntry) -> None:
        if entry.kind is ResourceKind.MOUNT and self._share is not None:
            self._share.unmount(entry.key)
        self._undo_entry(entry)

    async def _change(self, path: str, change: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        # In its own thread: changes that hang on a dead server must not fill the loop's few threads.
        work = asyncio.ensure_future(in_own_thread(change, *args, **kwargs))
        try:
            await ended(work)
        finally:
            if not work.done():
                log.error("change given up", extra={"path": path})
                self._stuck[path] = work
                work.add_done_callback(lambda _: self._stuck.pop(path, None))


def _is_quick(entry: LedgerEntry) -> bool:
    """Its undo takes less time than the start of a thread."""
    if entry.kind is ResourceKind.REMOTE_VM:
        return entry.detail.get("state") == RemoteVmState.STOPPED
    return entry.kind is ResourceKind.SOCKET and entry.key.startswith(_IN_MEMORY)


async def _reading(what: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    with os_errors(f"read {what!r}"):
        try:
            return await in_thread(function, *args, **kwargs)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"read {what!r}: no such file") from None


def _read_bytes(path: str, max_bytes: int) -> bytes:
    # Non-blocking, so that a FIFO in a file's place is refused instead of waited for.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidArgument(f"read {path!r}: not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InvalidArgument(f"read {path!r}: larger than {max_bytes} bytes")
    return content


def _new_file(path: str, mode: int) -> BinaryIO:
    """A new file, open for writing; what was at `path` before is removed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb")


def _make_directory(path: str, mode: int) -> None:
    os.makedirs(os.path.dirname(path) or "/", mode=0o755, exist_ok=True)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    os.chmod(path, mode)
