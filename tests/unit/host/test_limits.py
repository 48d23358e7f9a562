"""At a limit of the host: no thread, no descriptor, no watch. What was made is undone, and errors say which limit."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyshim.cleanup.undo import undo_entry
from pyshim.host import fds, threads
from pyshim.host.fds import keep_spare_descriptors, with_spare_descriptors
from pyshim.host.processes.children import Children, SpawnFailed
from pyshim.host.processes.identity import Ends, ProcessRef, start_ticks
from pyshim.host.threads import daemon_thread, in_short_thread, in_thread, keep_one_in_reserve
from pyshim.model.errors import ErrorCode, ResourceExhausted, declared
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.resources.linux import LinuxHost

Limit = Callable[[], None]


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Limit]:
    """After a call of it no thread can be started, as at pids.max, until `monkeypatch.undo`."""

    def reached() -> None:
        def start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)

    yield reached
    monkeypatch.undo()
    if threads._reserve._thread is not None:
        threads._reserve._work.put(lambda: None)
        threads._reserve._thread.join()
        threads._reserve._thread = None


def test_work_of_the_pool_is_done_once_where_it_cannot_grow(no_threads: Limit, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    async def main() -> int:
        leave = threading.Event()
        busy = asyncio.ensure_future(in_thread(leave.wait))
        await asyncio.sleep(0)
        no_threads()
        found = await in_thread(lambda: done.append(threading.get_native_id()) or 7)
        leave.set()  # the pool's one thread finds what was queued for it, too
        await busy
        monkeypatch.undo()
        return found

    assert asyncio.run(main()) == 7
    assert done == [threading.get_native_id()]


def test_work_that_needs_its_own_thread_gets_the_one_in_reserve(no_threads: Limit) -> None:
    keep_one_in_reserve()
    no_threads()

    assert in_short_thread(threading.get_native_id) != threading.get_native_id()
    with pytest.raises(ResourceExhausted, match=r"start thread 'get_native_id': EAGAIN \(hint: .*pids.max"):
        in_short_thread(threading.get_native_id)  # the first ended with its namespaces, and has no successor yet


def test_the_reserve_has_a_successor_as_soon_as_there_can_be_one(no_threads: Limit) -> None:
    keep_one_in_reserve()
    first = threads._reserve._thread

    def fails() -> None:
        raise KeyError("work")

    with pytest.raises(KeyError):
        threads._reserve.carry_out(fails)
    no_threads()

    assert threads._reserve._thread is not first
    assert in_short_thread(lambda: 7) == 7


def test_an_undo_needs_no_new_thread(tmp_path: Path, no_threads: Limit) -> None:
    made = tmp_path / "made"
    (made / "below").mkdir(parents=True)

    async def main() -> None:
        host = LinuxHost(children=Children(), undo_entry=undo_entry, template_maker="")
        no_threads()
        await host.undo(LedgerEntry(kind=ResourceKind.DIRECTORY, key=str(made)))

    asyncio.run(main())

    assert not made.exists()


def test_a_change_without_a_thread_is_refused_by_name(no_threads: Limit) -> None:
    no_threads()
    with pytest.raises(ResourceExhausted, match="start thread 'own/mount'"):
        daemon_thread("own/mount", lambda: None)


_AT_THE_LIMIT = """
import os, resource, sys
sys.path[:0] = sys.argv[2:]
from pyshim.host.fds import keep_spare_descriptors, with_spare_descriptors
from pyshim.host.files import remove_tree
from pyshim.cleanup.background import run_in_background
keep_spare_descriptors()
lowest = os.open("/", os.O_RDONLY)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, 4096))
try:
    remove_tree(sys.argv[1])
    sys.exit("the limit was not reached")
except OSError as error:
    assert error.errno == 24, error
outcome = run_in_background(lambda report: with_spare_descriptors(remove_tree, sys.argv[1]), "clean", 0.0)
assert outcome.errors == [], outcome.errors
try:
    os.open("/", os.O_RDONLY)
    sys.exit("the spare descriptors were not kept again")
except OSError as error:
    assert error.errno == 24, error
"""


def test_an_undo_and_delete_need_no_new_descriptor(tmp_path: Path) -> None:
    made = tmp_path / "made"
    (made / "a" / "b").mkdir(parents=True)

    subprocess.run([sys.executable, "-c", _AT_THE_LIMIT, str(made), *sys.path], check=True)

    assert not made.exists()


_WATCHES = """
import sys
sys.path[:0] = sys.argv[2:]
with open(f"/proc/sys/user/{sys.argv[1]}", "w") as file:
    file.write("1" if "watches" in sys.argv[1] else "0")
from pyshim.start.invocation import CommandError
from pyshim.zygote.code import LoadedCode
try:
    LoadedCode()
except CommandError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", ["max_inotify_instances", "max_inotify_watches"])
def test_a_zygote_without_watches_says_so(limit: str) -> None:
    """It would not notice that its code was replaced; `start` executes shims without one."""
    program = [sys.executable, "-c", _WATCHES, limit, *sys.path]
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", *program], check=True, capture_output=True, text=True
    )

    number = "EMFILE" if "instances" in limit else "ENOSPC"
    cause = f"{number} ({os.strerror(getattr(errno, number)).lower()})"
    assert done.stdout == f"watch 'directories of the loaded code': {cause}\n"


def test_an_undo_with_another_error_is_not_repeated() -> None:
    tried: list[int] = []

    def undo() -> None:
        tried.append(1)
        raise OSError(errno.EIO, "input/output error")

    keep_spare_descriptors()
    with pytest.raises(OSError, match="input/output"):
        with_spare_descriptors(undo)
    while fds._spare:
        os.close(fds._spare.pop())

    assert tried == [1]


class _LoopOfFewWatches(asyncio.SelectorEventLoop):
    """Refuses a watch as epoll_ctl(2) does at fs.epoll.max_user_watches."""

    left = 1000

    def add_reader(self, fd, callback, *args):  # type: ignore[no-untyped-def]
        if self.left <= 0:
            raise OSError(errno.ENOSPC, "no space left on device")
        self.left -= 1
        super().add_reader(fd, callback, *args)


@pytest.mark.parametrize("left", [0, 1])
def test_a_child_that_cannot_be_watched_leaves_no_half_a_watch(left: int) -> None:
    problems: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context))
        open_before = set(os.listdir("/proc/self/fd"))
        loop.left = left  # type: ignore[attr-defined]
        with pytest.raises(SpawnFailed, match="watch program '/bin/sleep': ENOSPC"):
            await Children().spawn(["/bin/sleep", "60"])
        loop.left = 1000  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
        assert set(os.listdir("/proc/self/fd")) == open_before

    with asyncio.Runner(loop_factory=_LoopOfFewWatches) as runner:
        runner.run(main())

    assert problems == []
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_an_end_that_cannot_be_watched_is_forgotten() -> None:
    async def main() -> None:
        open_before = set(os.listdir("/proc/self/fd"))
        asyncio.get_running_loop().left = 0  # type: ignore[attr-defined]
        ticks = start_ticks(os.getpid())
        assert ticks is not None
        with pytest.raises(OSError, match="no space"):
            Ends().watch(ProcessRef(os.getpid(), ticks), lambda: None)
        assert set(os.listdir("/proc/self/fd")) == open_before

    with asyncio.Runner(loop_factory=_LoopOfFewWatches) as runner:
        runner.run(main())


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (errno.EIO, ErrorCode.INTERNAL, "serve Create: EIO (input/output error): '/proc/1/stat' (hint: the shim's log"),
        (
            errno.EMFILE,
            ErrorCode.RESOURCE_EXHAUSTED,
            "serve Create: EMFILE (too many open files): '/proc/1/stat' (hint: ",
        ),
        (
            errno.ENOLCK,
            ErrorCode.RESOURCE_EXHAUSTED,
            "serve Create: ENOLCK (no locks available): '/proc/1/stat' (hint: ",
        ),
    ],
)
def test_the_error_of_a_system_call_has_its_cause_and_a_hint(number: int, code: ErrorCode, text: str) -> None:
    found = declared(OSError(number, os.strerror(number), "/proc/1/stat"), "serve Create")

    assert found.code is code
    assert str(found).startswith(text)
