"""A mount namespace with a few files of the host: what a thread in it sees, and what it holds of the host's mounts."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from pyshim.host.mounts.view import View, ViewPath, make_view
from pyshim.host.processes.launch import User, become

pytestmark = pytest.mark.root

T = TypeVar("T")
PROJECT = Path(__file__).parents[3]
USER = User(id=1879048192)


def keep(path: Path | str, **changes: bool) -> ViewPath:
    return ViewPath(path=str(path), why="the test", **changes)


def in_thread(look: Callable[[], T]) -> T:
    """Namespaces, working directory and users are the thread's, and go with it."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(look())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def seen(mount_point: Path, look: Callable[[], T], *kept: ViewPath) -> T:
    """Returns what `look` finds in a view of `kept`."""

    def body() -> T:
        with make_view(kept, str(mount_point)):
            return look()

    return in_thread(body)


def attempt(act: Callable[[], object]) -> str:
    try:
        act()
    except OSError as error:
        return type(error).__name__ if error.errno != 30 else "read-only"
    return "done"


@pytest.fixture
def point(tmp_path: Path) -> Path:
    (tmp_path / "vm").mkdir()
    (tmp_path / "vm/console.log").touch()
    return tmp_path / "vm"


def test_only_what_is_kept_is_there_under_its_own_name(tmp_path: Path, point: Path) -> None:
    for name in ("kept/inner", "other"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("kept/inner/file", "file", "beside"):
        (tmp_path / name).write_text(name)

    found = seen(
        point,
        lambda: (
            os.listdir("/"),
            sorted(os.listdir(tmp_path)),
            (tmp_path / "kept/inner/file").read_text(),
            os.getcwd(),
        ),
        keep(tmp_path / "kept"),
        keep(tmp_path / "file"),
        keep(tmp_path / "never", may_lack=True),
    )

    assert set(found[0]) == {"proc", tmp_path.parts[1]}
    assert found[1:] == (["file", "kept"], "kept/inner/file", "/")
    assert (point / "console.log").exists(), "the host's directory is as it was"


def test_nothing_can_be_written_by_root_either_but_where_that_is_wanted(tmp_path: Path, point: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "file").touch()
    paths = [tmp_path / "kept/new", Path("/new"), tmp_path / "new", tmp_path / "shared/new"]

    found = seen(
        point,
        lambda: (
            [attempt(lambda path=path: path.touch()) for path in paths]  # type: ignore[misc]
            + [attempt(lambda: (tmp_path / "file").write_text("changed"))]
        ),
        keep(tmp_path / "kept"),
        keep(tmp_path / "shared", is_writable=True),
        keep(tmp_path / "file"),
    )

    assert found == ["read-only", "read-only", "read-only", "done", "read-only"]
    assert (tmp_path / "shared/new").exists()


def test_a_link_leads_where_it_leads_on_the_host(tmp_path: Path, point: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/program").write_text("code")
    (tmp_path / "current").symlink_to("v1")
    (tmp_path / "program").symlink_to(tmp_path / "current/program")

    found = seen(
        point,
        lambda: [os.path.realpath(tmp_path / "program"), (tmp_path / "current/program").read_text()],
        keep(tmp_path / "current"),
        keep(tmp_path / "program"),
    )

    assert found == [f"{tmp_path}/v1/program", "code"]


def test_a_link_that_leads_out_of_what_is_kept_brings_its_target(tmp_path: Path, point: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "outside").write_text("far")
    (tmp_path / "tree/link").symlink_to("../outside")

    text = seen(point, (tmp_path / "tree/link").read_text, keep(tmp_path / "tree"), keep(tmp_path / "tree/link"))

    assert text == "far"


def test_what_must_be_there_and_is_not_is_named(tmp_path: Path, point: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        seen(point, os.getcwd, keep(tmp_path / "never"))
    assert caught.value.filename == f"{tmp_path}/never"


def test_a_user_in_it_sees_no_processes_but_its_own(tmp_path: Path, point: Path) -> None:
    def look() -> list[str]:
        become(USER)
        return [name for name in os.listdir("/proc") if name.isdigit()]

    assert seen(point, look, keep(tmp_path / "never", may_lack=True)) == [str(os.getpid())]


def test_a_device_node_works_in_it_and_another_thread_can_enter_it(tmp_path: Path, point: Path) -> None:
    view = in_thread(lambda: make_view([keep("/dev/null")], str(point)))

    def look() -> tuple[int, list[str]]:
        view.enter()
        return Path("/dev/null").write_bytes(b"x"), os.listdir("/dev")

    with view:
        assert in_thread(look) == (1, ["null"])


PROGRAM = """
import os, sys, threading
sys.path.insert(0, {project!r})
from pyshim.host import syscalls
from pyshim.host.mounts.view import View, ViewPath, make_view

top = sys.argv[1]
for name in ("kept/inner", "other"):
    os.makedirs(f"{{top}}/{{name}}")
    syscalls.mount("test", f"{{top}}/{{name}}", "tmpfs", 0)
os.mkdir(f"{{top}}/point")
made, ended = threading.Event(), threading.Event()
found = {{}}

def mounted():
    with open("/proc/thread-self/mountinfo") as file:
        return sorted(line.split()[4].removeprefix(top) for line in file)

def stay():
    kept = [ViewPath(path=f"{{top}}/kept", why=""), ViewPath(path="/sys", why="", is_recursive=False)]
    with make_view(kept, f"{{top}}/point"):
        found["before"] = mounted()
        made.set()
        ended.wait()
        found["after"] = mounted()

thread = threading.Thread(target=stay)
thread.start()
made.wait()
host = mounted()
for name in ("kept/inner", "other"):
    syscalls.umount2(f"{{top}}/{{name}}", 0)
    os.rmdir(f"{{top}}/{{name}}")
ended.set()
thread.join()
print(found["before"], found["after"], "/point" in host, sep="|")
"""


def test_it_holds_no_mount_of_the_host_that_is_not_kept_and_lets_go_of_one_that_goes(tmp_path: Path) -> None:
    """A tree whose mounts propagate, as on a node with systemd."""
    words = ["unshare", "--mount", "--propagation=shared", sys.executable, "-c", PROGRAM.format(project=str(PROJECT))]

    ended = subprocess.run([*words, str(tmp_path)], capture_output=True, text=True, check=True)

    before, after, is_on_host = ended.stdout.strip().split("|")
    assert before == str(sorted(["/", "/kept", "/kept/inner", "/proc", "/sys"]))
    assert after == str(sorted(["/", "/kept", "/proc", "/sys"]))
    assert is_on_host == "False"


CHROOTED = """
import os, subprocess, sys, threading
sys.path.insert(0, {project!r})
from pyshim.host import syscalls
from pyshim.host.mounts.view import CODE, ViewPath, make_view

top, outside = sys.argv[1:]
for name in ("usr", "proc", "kept", "point"):
    os.mkdir(f"{{top}}/{{name}}")
for link in ("bin", "lib", "lib64"):
    os.symlink(f"usr/{{link}}", f"{{top}}/{{link}}")
syscalls.mount(top, top, "", syscalls.MS_BIND)
syscalls.mount("/usr", f"{{top}}/usr", "", syscalls.MS_BIND | syscalls.MS_REC)
syscalls.mount("proc", f"{{top}}/proc", "proc", 0)
os.chroot(top)
os.chdir("/")
views = []

def make():
    views.append(make_view([*CODE, ViewPath(path="/kept", why="")], "/point"))

def names(enter):
    def run():
        enter()
        found.append(os.path.exists(outside))
        found.append(subprocess.run(["/bin/ls", "/"], capture_output=True, text=True).stdout.split())
    found = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found

def enter_a_copy_of_the_namespace():
    syscalls.unshare(syscalls.CLONE_NEWNS)
    with open("/proc/thread-self/ns/mnt") as namespace:
        syscalls.setns(namespace.fileno(), syscalls.CLONE_NEWNS)

making = threading.Thread(target=make)
making.start()
making.join()
print([names(enter_a_copy_of_the_namespace)[0], *names(views[0].enter)])
"""


def test_a_program_of_a_shim_in_a_chroot_sees_its_view_and_not_the_outer_files(tmp_path: Path) -> None:
    """setns(2) leads to the root of the namespace: outside of a chroot, which is the control."""
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").touch()
    words = ["unshare", "--mount", sys.executable, "-c", CHROOTED.format(project=str(PROJECT))]

    ended = subprocess.run([*words, f"{tmp_path}/root", f"{tmp_path}/outside"], capture_output=True, text=True)

    assert ended.stdout.strip() == "[True, False, ['bin', 'kept', 'lib', 'lib64', 'proc', 'usr']]", ended.stderr


def test_nothing_in_its_proc_can_be_written_and_the_kernels_files_are_there_when_asked_for(point: Path) -> None:
    def look() -> tuple[str, bool, str]:
        setting = Path("/proc/sys/kernel/core_pattern")
        opened = attempt(lambda: os.close(os.open(setting, os.O_WRONLY)))
        return opened, setting.exists(), attempt(lambda: os.close(os.open("/proc/self/oom_score_adj", os.O_WRONLY)))

    def look_at_all() -> tuple[str, bool, str]:
        with make_view([], str(point), shows_kernel=True):
            return look()

    assert in_thread(look)[:2] == ("done", True), "the control"
    assert seen(point, look) == ("FileNotFoundError", False, "read-only")
    assert in_thread(look_at_all) == ("read-only", True, "read-only")


def test_a_view_whose_namespace_has_another_root_is_not_entered(tmp_path: Path, point: Path) -> None:
    view = in_thread(lambda: make_view([], str(point)))
    other = in_thread(lambda: make_view([], str(point)))
    mixed = View(view._namespace, other._root)

    with view, other, pytest.raises(OSError, match="another root"):
        in_thread(mixed.enter)
