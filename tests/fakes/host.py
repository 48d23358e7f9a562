"""The host, the records and the publisher as memory: every effect is counted, any of them can be made to fail."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ledger import LedgerEntry
from pyshim.model.oci import OciHook
from pyshim.model.sandbox import SandboxSnapshot
from pyshim.model.seams import MonitorRpc
from pyshim.model.task import Stdio, TaskEvent
from pyshim.model.vm import LocalVm
from pyshim.model.volumes import HostMount, MountedFile, SourceFacts, SourceKind, TreeEntry, VirtiofsdPlan
from pyshim.resources.linux import LinuxHost
from tests.fakes.cgroups import FakeCgroups
from tests.fakes.deadlines import deadlines_of


class Faults:
    """Makes the nth call of a named step fail: `Faults({"mount": 2})` lets the first mount pass."""

    def __init__(self, plan: Mapping[str, int] | None = None) -> None:
        self._plan = dict(plan or {})
        self.seen: Counter[str] = Counter()

    def plan(self, plan: Mapping[str, int]) -> None:
        """From now on these calls fail, counted from the beginning."""
        self._plan = dict(plan)

    def hit(self, step: str) -> None:
        self.seen[step] += 1
        if self._plan.get(step) == self.seen[step]:
            raise FailedPrecondition(f"{step}: injected fault")


class FakeInput:
    def __init__(self) -> None:
        self.chunks: asyncio.Queue[bytes] = asyncio.Queue()
        self.closed = False

    async def read(self) -> bytes:
        return await self.chunks.get()

    def close_io(self) -> None:
        self.chunks.put_nowait(b"")

    async def close(self) -> None:
        self.closed = True


class FakeOutput:
    def __init__(self) -> None:
        self.data = bytearray()
        self.keep_bytes = 1 << 30
        """Of more than this the beginning is forgotten."""
        self.closed = False
        self.broken: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def write(self, data: bytes) -> None:
        await self.gate.wait()
        if self.broken is not None:
            raise self.broken
        self.data += data
        del self.data[: -self.keep_bytes]

    async def finish(self) -> None:
        await self.gate.wait()
        self.closed = True

    async def close(self) -> None:
        self.closed = True


class FakeStreams:
    def __init__(self, stdio: Stdio) -> None:
        self.stdin = FakeInput() if stdio.stdin else None
        self.stdout = FakeOutput() if stdio.stdout else None
        self.stderr = FakeOutput() if stdio.stderr else None
        self.closed = False

    async def close(self) -> None:
        self.closed = True
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                await stream.close()


class FakeVirtiofsd:
    def __init__(self, host: "FakeHost") -> None:
        self.pid = 77
        self.takes_groups = host.share_takes_groups
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._host = host

    async def wait(self) -> str:
        return await asyncio.shield(self.ended)

    async def stop(self) -> None:
        self._host.daemons.discard(self)
        if not self.ended.done():
            self.ended.set_result("stopped")


class FakeMonitor:
    def __init__(self, path: str, pod: MonitorRpc) -> None:
        self.path = path
        self.pod = pod
        self.is_open = True
        self.may_close = asyncio.Event()
        """Cleared, `close` does not return."""
        self.may_close.set()

    async def close(self) -> None:
        await self.may_close.wait()
        self.is_open = False


@deadlines_of(LinuxHost)
class FakeHost:
    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.files: dict[str, bytes] = {}
        self.directories: set[str] = set()
        self.trees: dict[str, list[TreeEntry]] = {}
        self.mounts: list[str] = []
        self.placed: dict[str, MountedFile] = {}
        """The places of sources; of the others nothing is known."""
        self.daemons: set[FakeVirtiofsd] = set()
        self.share_takes_groups = True
        self.kernel = "6.12.57-amd64"
        self.architectures: dict[str, str] = {}
        """The guest's kernel, its release."""
        self.streams: dict[str, FakeStreams] = {}
        self.sources: dict[str, SourceFacts] = {}
        self.cgroup_tree = FakeCgroups(self.faults.hit)
        self.hooks: list[tuple[str, str, dict[str, Any]]] = []
        """Kind, path and state of every hook that was started."""
        self.netns_members: list[str] = []
        self.images: dict[str, int] = {}
        self.template: str | None = None
        self.templates_asked_for: list[str] = []
        """The configurations."""
        """The directory of a template for every VM."""
        self.on_discard: Callable[[], None] = lambda: None
        self.monitors: list[FakeMonitor] = []
        self.before_effect: Callable[[str, str], None] = lambda _effect, _path: None
        self.may_open_streams = asyncio.Event()
        """Cleared: `open_streams` takes until it is set, as a log program's start may."""
        self.may_open_streams.set()

    def write_spec(self, bundle: str, args: list[str], **extra: Any) -> None:
        spec = {"ociVersion": "1.0.2", "process": {"args": args, "cwd": "/"}, "root": {"path": "rootfs"}, **extra}
        self.files[f"{bundle}/config.json"] = json.dumps(spec).encode()

    async def read_bytes(self, path: str, max_bytes: int) -> bytes:
        self.faults.hit("read")
        if path not in self.files:
            raise NotFound(f"read '{path}': ENOENT")
        return self.files[path]

    async def source_facts(self, path: str, vhost_user_store: str) -> SourceFacts:
        """A directory unless said otherwise; every block device is there, loop7 by the number 7:7."""
        if path.startswith("/dev/block/7:"):
            return SourceFacts(kind=SourceKind.BLOCK, device_path=f"/dev/loop{path.rpartition(':')[2]}")
        return self.sources.get(path, SourceFacts(kind=SourceKind.DIRECTORY))

    async def find_template(self, root: str, vm: LocalVm) -> str:
        if self.template is None:
            raise NotFound(f"find template in '{root}': there is none")
        return self.template

    async def make_template(self, root: str, vm: LocalVm, source: str) -> None:
        self.faults.hit("make_template")
        self.templates_asked_for.append(source)

    async def discard_template(self, directory: str, reason: str) -> None:
        self.template = None
        self.on_discard()

    async def mounted_files(self, paths: Collection[str]) -> Mapping[str, MountedFile]:
        return {path: self.placed[path] for path in paths if path in self.placed}

    def cgroups(self, mode: CgroupMode) -> FakeCgroups:
        return self.cgroup_tree

    async def disk_bytes(self, path: str) -> int:
        return self.images.get(path, 1 << 30)

    async def serve_monitor(
        self, path: str, metrics_path: str, pod: MonitorRpc, *, debug: bool
    ) -> Callable[[], Awaitable[None]]:
        self.faults.hit("monitor")
        for each in (path, metrics_path):
            self.before_effect("monitor", each)
        self.monitors.append(FakeMonitor(path, pod))
        return self.monitors[-1].close

    async def make_directory(self, path: str, mode: int) -> None:
        self.faults.hit("make_directory")
        self.before_effect("make_directory", path)
        self.directories.add(path)

    async def write_bytes(self, path: str, content: bytes, mode: int) -> None:
        self.faults.hit("write_bytes")
        self.before_effect("write_bytes", path)
        self.files[path] = content
        self.images[path] = len(content)

    async def kernel_release(self, path: str) -> str:
        self.faults.hit("kernel_release")
        return self.kernel

    async def boot_architectures(self, paths: Collection[str]) -> Mapping[str, str]:
        return {path: self.architectures[path] for path in paths if path in self.architectures}

    async def make_disk_file(self, path: str, size_bytes: int, head: bytes = b"") -> None:
        self.faults.hit("make_disk_file")
        self.before_effect("make_disk_file", path)
        self.files[path] = head

    async def list_tree(self, root: str) -> tuple[TreeEntry, ...]:
        self.faults.hit("list_tree")
        if root not in self.trees:
            raise NotFound(f"read '{root}': ENOENT")
        return tuple(self.trees[root])

    async def read_piece(self, root: str, path: str, offset: int, length: int) -> bytes:
        self.faults.hit("read_piece")
        return (await self.read_bytes(f"{root}/{path}" if path else root, offset + length))[offset : offset + length]

    async def mount(self, mount: HostMount) -> None:
        self.faults.hit("mount")
        self.before_effect("mount", mount.target)
        self.mounts.append(mount.target)

    async def start_virtiofsd(self, plan: VirtiofsdPlan, ledger: object) -> FakeVirtiofsd:
        self.faults.hit("virtiofsd")
        daemon = FakeVirtiofsd(self)
        self.daemons.add(daemon)
        return daemon

    async def open_streams(self, stdio: Stdio, *, namespace: str, process_id: str) -> FakeStreams:
        self.faults.hit("streams")
        await self.may_open_streams.wait()
        self.streams[process_id] = FakeStreams(stdio)
        return self.streams[process_id]

    async def run_hook(self, kind: str, hook: OciHook, state: bytes) -> None:
        self.hooks.append((kind, hook.path, json.loads(state)))
        await asyncio.sleep(0)
        self.faults.hit(f"{kind} hook")

    async def make_netns(self, path: str) -> None:
        self.faults.hit("make_netns")
        self.before_effect("make_netns", path)
        self.mounts.append(path)

    @asynccontextmanager
    async def netns_member(self, netns_path: str) -> AsyncIterator[int]:
        self.faults.hit("netns_member")
        self.netns_members.append(netns_path)
        yield 4711

    async def undo(self, entry: LedgerEntry) -> None:
        self.faults.hit("release")
        self.cgroup_tree.release(entry.key)
        self.mounts = [path for path in self.mounts if path != entry.key]
        self.images = {path: size for path, size in self.images.items() if not path.startswith(entry.key)}
        self.directories = {path for path in self.directories if not path.startswith(entry.key)}

    def left(self) -> dict[str, object]:
        """Leftovers, by kind; empty on a clean host."""
        found = {
            "mounts": self.mounts,
            "directories": sorted(self.directories),
            "cgroups": list(self.cgroup_tree.there),
            "daemons": len(self.daemons),
            "images": sorted(self.images),
            "monitors": [monitor.path for monitor in self.monitors if monitor.is_open],
            "streams": [name for name, streams in self.streams.items() if not streams.closed],
        }
        return {name: value for name, value in found.items() if value}


class FakeLedger:
    def __init__(self, host: FakeHost) -> None:
        self.entries: list[LedgerEntry] = []
        self._host = host

    def acquire(self, *entries: LedgerEntry) -> None:
        self._host.faults.hit("acquire")
        for entry in entries:
            self.entries = [old for old in self.entries if (old.kind, old.key) != (entry.kind, entry.key)] + [entry]

    async def release(self, entry: LedgerEntry) -> None:
        await self._host.undo(entry)
        self.entries = [old for old in self.entries if (old.kind, old.key) != (entry.kind, entry.key)]


class FakeRecords:
    def __init__(self, host: FakeHost) -> None:
        self.ledger = FakeLedger(host)
        self.snapshots: list[SandboxSnapshot] = []
        self.removed = False
        self.pinned_by_others: dict[int, str] = {}

    @property
    def entry_counts(self) -> Mapping[str, int]:
        return Counter(entry.kind.value for entry in self.ledger.entries)

    def pins(self) -> AbstractContextManager[Mapping[int, str]]:
        return nullcontext(self.pinned_by_others)

    def claims(self, cgroups: Iterable[str]) -> AbstractContextManager[Mapping[str, str]]:
        return nullcontext({})

    def save(self, snapshot: SandboxSnapshot) -> None:
        self.snapshots.append(snapshot)

    def remove(self) -> None:
        if not self.ledger.entries:  # who still holds something keeps the only record of it
            self.removed = True


class FakePublisher:
    def __init__(self) -> None:
        self.events: list[TaskEvent] = []

    def publish(self, event: TaskEvent) -> None:
        self.events.append(event)

    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]
