"""Each undo on the real thing: whole, half made, already gone, and twice."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyshim.cleanup.undo import undo_entries, undo_entry
from pyshim.host import syscalls
from pyshim.host.files import remove_tree
from pyshim.host.mounts.table import mounted_below
from pyshim.host.processes import identity as processes
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, ShimError
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.resources.cgroups.host.hierarchies import place_of
from pyshim.resources.cgroups.host.removal import remove_cgroup
from tests.fakes.open_files import same_open_files


def entry(kind: ResourceKind, key: Path | str, **detail: str | int) -> LedgerEntry:
    return LedgerEntry(kind=kind, key=str(key), detail=detail)


def twice(found: LedgerEntry) -> None:
    undo_entry(found)
    undo_entry(found)


# ---- directories and files


def test_a_directory_goes_with_all_below_it_but_not_what_its_links_point_to(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    tree = tmp_path / "tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/file").write_text("x")
    (tree / "a/link").symlink_to(outside)
    (tree / "dangling").symlink_to("nowhere")
    os.mkfifo(tree / "fifo")
    (tree / "a/b").chmod(0)

    twice(entry(ResourceKind.DIRECTORY, tree))

    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(outside) == ["kept"]


def test_a_link_in_a_directorys_place_is_removed_itself(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    twice(entry(ResourceKind.DIRECTORY, f"{tmp_path}/link/"))

    assert os.listdir(tmp_path) == ["real"]


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (ResourceKind.DIRECTORY, lambda path: path.mkdir()),
        (ResourceKind.SOCKET, lambda path: a_socket(path)),
        (ResourceKind.FILE, lambda path: a_file(path)),
    ],
)
def test_a_link_on_the_way_leads_no_undo_to_another_place(
    tmp_path: Path, kind: ResourceKind, make: Callable[[Path], object]
) -> None:
    (tmp_path / "precious").mkdir()
    make(tmp_path / "precious/made")
    (tmp_path / "sb1").symlink_to("precious")

    with pytest.raises(FailedPrecondition, match=rf"release {kind.value} '{tmp_path}/sb1/made': .*symbolic links"):
        undo_entry(entry(kind, tmp_path / "sb1/made"))

    assert os.listdir(tmp_path / "precious") == ["made"]


def test_a_directory_whose_parent_is_gone_is_gone(tmp_path: Path) -> None:
    twice(entry(ResourceKind.DIRECTORY, tmp_path / "no/such/place"))


@pytest.mark.parametrize("path", ["/", "//"])
def test_the_root_directory_is_refused(path: str) -> None:
    with pytest.raises(OSError, match="refused"):
        remove_tree(path)


@pytest.mark.root
@pytest.mark.parametrize("source", ["tmpfs", "bind", "file"])
def test_what_is_mounted_in_a_directory_is_neither_emptied_nor_entered(
    tmp_path: Path, source: str, private_mounts: None
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("x")
    point = tmp_path / "tree/sub/point"
    (point.parent).mkdir(parents=True)

    if source == "file":
        point.touch()
        syscalls.mount(str(precious / "data"), str(point), "", syscalls.MS_BIND)
    elif source == "bind":
        point.mkdir()
        syscalls.mount(str(precious), str(point), "", syscalls.MS_BIND)
    else:
        point.mkdir()
        syscalls.mount("tmpfs", str(point), "tmpfs", 0)
        (point / "data").write_text("x")
    found = entry(ResourceKind.DIRECTORY, tmp_path / "tree")

    with pytest.raises(FailedPrecondition, match=rf"still mounted there \({point}\)"):
        undo_entry(found)

    assert (precious / "data").read_text() == "x"
    assert source == "file" or (point / "data").read_text() == "x"
    undo_entry(entry(ResourceKind.MOUNT, point))
    undo_entry(found)
    assert not (tmp_path / "tree").exists()


def a_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    return path


def a_file(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.parametrize(("kind", "make"), [(ResourceKind.SOCKET, a_socket), (ResourceKind.FILE, a_file)])
def test_a_socket_and_a_file_are_unlinked(tmp_path: Path, kind: ResourceKind, make: Callable[[Path], Path]) -> None:
    twice(entry(kind, make(tmp_path / "made")))
    twice(entry(kind, tmp_path / "no/such"))

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "make", "problem"),
    [
        (ResourceKind.SOCKET, a_file, "not a socket"),
        (ResourceKind.SOCKET, lambda path: path.mkdir(), "not a socket"),
        (ResourceKind.FILE, a_socket, "not a regular file"),
        (ResourceKind.FILE, lambda path: path.symlink_to("/etc/passwd"), "not a regular file"),
    ],
)
def test_what_is_no_socket_or_no_file_stays_and_the_error_names_kind_and_key(
    tmp_path: Path, kind: ResourceKind, make: Callable[[Path], object], problem: str
) -> None:
    make(tmp_path / "other")

    with pytest.raises(ShimError, match=rf"release {kind.value} '{tmp_path}/other': {problem}"):
        undo_entry(entry(kind, tmp_path / "other"))

    assert os.listdir(tmp_path) == ["other"]


def test_a_mount_that_was_never_made_is_gone(tmp_path: Path) -> None:
    twice(entry(ResourceKind.MOUNT, tmp_path))
    twice(entry(ResourceKind.MOUNT, tmp_path / "nowhere"))


@pytest.mark.root
@pytest.mark.parametrize("trick", ["link out", "link beside", "gone", "file"])
def test_a_guest_that_exchanges_a_directory_cannot_have_another_mount_detached(
    tmp_path: Path, trick: str, private_mounts: None
) -> None:
    rootfs, outside = tmp_path / "rootfs", tmp_path / "outside/b"
    (rootfs / "a/b").mkdir(parents=True)
    outside.mkdir(parents=True)

    for point in (rootfs / "a/b", outside):
        syscalls.mount("tmpfs", str(point), "tmpfs", 0)
    # As seen from virtiofsd's mount namespace, where nothing is mounted there, a guest can do this.
    (rootfs / "a").rename(rootfs / "z")
    if trick == "link out":
        (rootfs / "a").symlink_to(outside.parent)
    elif trick == "link beside":
        (rootfs / "a").symlink_to("../outside")
    elif trick == "file":
        (rootfs / "a").touch()

    twice(entry(ResourceKind.MOUNT, rootfs / "a/b", beneath=str(rootfs)))

    assert mounted_below(str(outside)) == (str(outside),)


@pytest.mark.parametrize("key", ["root", "", "other/x", "root/../x"])
def test_a_mount_that_is_not_below_its_root_is_an_error(tmp_path: Path, key: str) -> None:
    (tmp_path / "root").mkdir()

    with pytest.raises(FailedPrecondition, match="not a path below"):
        undo_entry(entry(ResourceKind.MOUNT, tmp_path / key, beneath=str(tmp_path / "root")))


# ---- cgroups


_HIERARCHIES: dict[str, tuple[str, ...]] = {
    "/sys/fs/cgroup/pids": ("pids",),
    "/sys/fs/cgroup/unified": (),
    "/sys/fs/cgroup": (),
}
"""Controllers by root."""


def cgroup_roots() -> list[str]:
    return [root for root in _HIERARCHIES if os.path.exists(f"{root}/cgroup.procs") and os.access(root, os.W_OK)]


@pytest.fixture(params=cgroup_roots() or [pytest.param("", marks=pytest.mark.skip(reason="needs a cgroup hierarchy"))])
def cgroup(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Below our own, which takes processes; in version 2 the root of a cgroup namespace may not."""
    path = Path(request.param + place_of("self", _HIERARCHIES[request.param]), f"pyshim-test-{os.getpid()}")
    path.mkdir()
    yield path
    for found in (path / "a/b", path / "a", path):
        if found.exists():
            found.rmdir()


@pytest.mark.root
def test_a_cgroup_goes_with_its_children_and_their_processes(cgroup: Path, sleeper: subprocess.Popen[bytes]) -> None:
    (cgroup / "a/b").mkdir(parents=True)
    (cgroup / "a/b/cgroup.procs").write_text(str(sleeper.pid))

    twice(entry(ResourceKind.CGROUP, cgroup))

    assert not cgroup.exists()
    assert sleeper.wait() == -signal.SIGKILL


@pytest.mark.root
def test_a_cgroup_we_are_in_ourselves_is_left_first(cgroup: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))
            undo_entry(entry(ResourceKind.CGROUP, cgroup))
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)

    assert status == 0
    assert not cgroup.exists()


@pytest.mark.root
def test_init_is_moved_out_of_a_cgroup_instead_of_killed(cgroup: Path) -> None:
    """Seen by those in a pid namespace of its own, whose pid 1 is a shell that must outlive them."""
    script = (
        "from pyshim.resources.cgroups.host.removal import remove_cgroup\n"
        "import sys, time\n"
        "open(sys.argv[1] + '/cgroup.procs', 'w').write('1')\n"
        "remove_cgroup(sys.argv[1], time.monotonic() + 10)\n"
    )
    shell = '"$0" -c "$1" "$2"; echo "removal ended with $?"'
    command = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", shell, sys.executable, script, str(cgroup)]

    repository = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=repository)

    assert done.stdout == "removal ended with 0\n", done.stderr
    assert not cgroup.exists()


def test_a_process_that_no_cgroup_above_takes_is_an_error_and_no_file_is_made(tmp_path: Path) -> None:
    """The search ends above the hierarchy, where a file of the name of the kernel's would be a file like any other."""
    inner = tmp_path / "above" / "sandbox"
    inner.mkdir(parents=True)
    (inner / "cgroup.procs").write_text(f"{os.getpid()}\n")

    with pytest.raises(OSError, match="no cgroup above it takes the process"):
        remove_cgroup(str(inner), time.monotonic() + 10)

    assert list(tmp_path.rglob("cgroup.procs")) == [inner / "cgroup.procs"]


# ---- network


@pytest.fixture
def netns(tmp_path: Path) -> Iterator[Path]:
    """A bound network namespace with the tap `t0`, which has an ingress qdisc."""
    path = tmp_path / "netns"
    path.touch()
    script = (
        "ip link set lo up && ip tuntap add t0 mode tap && tc qdisc add dev t0 ingress"
        f" && mount --bind /proc/self/ns/net {path}"
    )
    # Bound in our mount namespace: `nsenter` back into it through our own.
    subprocess.run(["unshare", "-n", "sh", "-c", script], check=True)
    yield path
    subprocess.run(["umount", "-l", str(path)], check=False, stderr=subprocess.DEVNULL)


def in_netns(netns: Path, *command: str) -> str:
    return subprocess.run(["nsenter", f"--net={netns}", *command], check=True, capture_output=True, text=True).stdout


@pytest.mark.root
def test_a_link_is_deleted_in_its_namespace(netns: Path) -> None:
    before = os.readlink("/proc/self/ns/net")

    twice(entry(ResourceKind.LINK, "t0", netns=str(netns)))

    assert "t0" not in in_netns(netns, "ip", "link", "show")
    assert "lo" in in_netns(netns, "ip", "link", "show")
    assert os.readlink("/proc/self/ns/net") == before


@pytest.mark.root
def test_an_ingress_qdisc_is_deleted_and_the_link_stays(netns: Path) -> None:
    assert "ingress" in in_netns(netns, "tc", "qdisc", "show", "dev", "t0")

    twice(entry(ResourceKind.INGRESS, "t0", netns=str(netns)))

    assert "ingress" not in in_netns(netns, "tc", "qdisc", "show", "dev", "t0")
    assert "t0" in in_netns(netns, "ip", "link", "show")


@pytest.mark.root
@pytest.mark.parametrize("kind", [ResourceKind.LINK, ResourceKind.INGRESS])
def test_what_was_in_a_namespace_that_is_gone_is_gone(netns: Path, tmp_path: Path, kind: ResourceKind) -> None:
    twice(entry(kind, "no-such-link", netns=str(netns)))
    twice(entry(kind, "t0", netns=str(tmp_path / "no-such-namespace")))
    subprocess.run(["umount", str(netns)], check=True)

    twice(entry(kind, "t0", netns=str(netns)))


@pytest.mark.root
def test_nothing_is_touched_in_a_namespace_the_path_has_come_to_lead_to(netns: Path) -> None:
    """As /proc/PID/ns/net does when the pid has been given to a process of the host or of another pod."""
    inode = netns.stat().st_ino
    for kind in (ResourceKind.LINK, ResourceKind.INGRESS):
        twice(entry(kind, "t0", netns=str(netns), netns_inode=inode + 1))

    assert "ingress" in in_netns(netns, "tc", "qdisc", "show", "dev", "t0")

    for kind in (ResourceKind.INGRESS, ResourceKind.LINK):
        twice(entry(kind, "t0", netns=str(netns), netns_inode=inode))
    assert "t0" not in in_netns(netns, "ip", "link", "show")


@pytest.mark.root
@pytest.mark.parametrize("kind", [ResourceKind.LINK, ResourceKind.INGRESS, ResourceKind.QDISC])
def test_a_link_made_later_under_the_same_name_is_left_alone(netns: Path, kind: ResourceKind) -> None:
    limit = ("tc", "qdisc", "add", "dev", "t0", "root", "handle", "7079:", "tbf", "rate", "1mbit", "burst", "9k")
    in_netns(netns, *limit, "latency", "50ms")

    def seen() -> tuple[str, str]:
        return in_netns(netns, "ip", "-o", "link", "show", "t0"), in_netns(netns, "tc", "qdisc", "show", "dev", "t0")

    before = seen()
    index = int(before[0].split(":")[0])
    for other in (index + 1, 1 << 40):
        twice(entry(kind, "t0", netns=str(netns), index=other))
    assert seen() == before

    in_netns(netns, "ip", "link", "set", "t0", "name", "renamed")
    twice(entry(kind, "t0", netns=str(netns), index=index))

    after = in_netns(netns, "ip", "link", "show") + in_netns(netns, "tc", "qdisc", "show")
    gone = {ResourceKind.LINK: "renamed", ResourceKind.INGRESS: "ingress", ResourceKind.QDISC: "tbf"}[kind]
    assert gone not in after


@pytest.mark.root
def test_a_link_that_cannot_be_deleted_is_an_error(netns: Path) -> None:
    with pytest.raises(FailedPrecondition, match="release link 'lo'"):
        undo_entry(entry(ResourceKind.LINK, "lo", netns=str(netns)))


@pytest.mark.root
def test_a_bound_namespace_is_unmounted_and_its_file_removed(netns: Path) -> None:
    twice(entry(ResourceKind.NETNS, netns))

    assert not netns.exists()


@pytest.mark.parametrize(
    "broken",
    [
        entry(ResourceKind.SOCKET, "/run/with\0nul"),
        entry(ResourceKind.DIRECTORY, "/run/\udcff\ud800"),
        entry(ResourceKind.PROCESS, "some-long-key", pid=-5, start_ticks=1),
        entry(ResourceKind.CGROUP, "/x", roots="/with\0nul"),
        entry(ResourceKind.MOUNT, "/run/with\0nul"),
        entry(ResourceKind.LINK, "tap\0", netns="/with\0nul"),
    ],
    ids=lambda broken: broken.kind.value,
)
def test_an_entry_that_makes_no_sense_does_not_keep_the_others_from_their_undo(
    tmp_path: Path, broken: LedgerEntry
) -> None:
    """A damaged state, or a bug of ours: what comes before it in the ledger is undone all the same."""
    directory = entry(ResourceKind.DIRECTORY, tmp_path / "directory")
    (tmp_path / "directory").mkdir()
    errors: list[str] = []

    held = undo_entries(
        (directory, broken), deadline=time.monotonic() + 60, one_timeout_s=5, errors=errors, check=lambda _entry: None
    )

    assert not (tmp_path / "directory").exists()
    assert held in ((), (broken,))
    assert [broken.kind.value in error for error in errors] == [True] * len(held)


def test_a_tree_is_removed_however_deep_it_is(tmp_path: Path) -> None:
    """A guest can nest directories as it likes."""
    top = tmp_path / "top"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=fd)
        os.close(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)

    try:
        with same_open_files():
            twice(entry(ResourceKind.DIRECTORY, top))

        assert not top.exists()
    finally:
        subprocess.run(["rm", "-rf", str(top)], check=True)  # pytest's own cleaning is recursive


# ---- processes


def ticks(process: subprocess.Popen[Any]) -> int:
    found = processes.start_ticks(process.pid)
    assert found is not None
    return found


def known(process: subprocess.Popen[Any], **other: str | int) -> LedgerEntry:
    """The entry of a process whose pid was written down."""
    found = processes.ProcessRef(process.pid, ticks(process))
    detail = {"pid": process.pid, "start_ticks": found.start_ticks, "program": processes.executable(found)}
    return entry(ResourceKind.PROCESS, "some-long-key", **(detail | other))


def test_a_process_dies_by_pid_and_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    twice(known(sleeper))

    assert sleeper.wait() == -signal.SIGKILL


def test_what_a_process_started_dies_with_it() -> None:
    script = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        found = known(parent)

        twice(found)

        assert processes.start_ticks(child) is None
        assert parent.wait() == -signal.SIGKILL


_FORKS = """
import os, sys, time
print(flush=True)
for _ in range(1000):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.001)
time.sleep(60)
"""


def test_what_a_process_starts_while_it_is_killed_dies_with_it(tmp_path: Path) -> None:
    word = str(tmp_path / "family")
    argv = [sys.executable, "-I", "-S", "-c", _FORKS, word]
    for _ in range(3):
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            parent.stdout.readline()

            undo_entry(known(parent))

            left = processes.find_by_argument(word)
            for each in left:
                processes.kill(each, time.monotonic() + 30)
        assert left == ()


def test_what_an_unkillable_process_started_is_not_left_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """In uninterruptible I/O, say: its end does not come in time, and its children's was never asked for."""

    def in_vain(process: processes.ProcessRef, _deadline: float) -> None:
        raise DeadlineExceeded(f"kill process {process.pid}: it did not end in time")

    monkeypatch.setattr(processes, "kill", in_vain)
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        found = processes.ProcessRef(parent.pid, ticks(parent))
        fd = os.pidfd_open(child)
        try:
            with pytest.raises(DeadlineExceeded, match=str(parent.pid)):
                processes.kill_family(found, time.monotonic() + 30)

            assert select.select([fd], [], [], 30)[0], "the child lives on, stopped"
        finally:
            os.close(fd)
            os.kill(parent.pid, signal.SIGKILL)


def test_a_successor_of_the_pid_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    twice(known(sleeper, start_ticks=ticks(sleeper) - 1))

    assert sleeper.poll() is None


def test_a_process_whose_pid_was_never_written_down_is_found_by_its_program_and_command_line(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """A process that looks for a VM by its UUID has the UUID in its own command line."""
    undo_entry(entry(ResourceKind.PROCESS, tmp_path / "key", program="/usr/bin/qemu-system-x86_64"))
    assert sleeper.poll() is None

    twice(entry(ResourceKind.PROCESS, tmp_path / "key", program=sys.executable))
    assert sleeper.wait() == -signal.SIGKILL


def test_a_process_of_the_pid_and_start_time_that_is_neither_the_program_nor_has_the_key_is_left_alone(
    sleeper: subprocess.Popen[bytes],
) -> None:
    undo_entry(known(sleeper, program="/usr/bin/qemu-system-x86_64"))

    assert sleeper.poll() is None


def test_a_wrapper_that_has_become_its_program_is_known_by_the_key(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    detail = {"pid": sleeper.pid, "start_ticks": ticks(sleeper)}

    undo_entry(entry(ResourceKind.PROCESS, tmp_path / "key", program="/opt/qemu-wrapper", **detail))

    assert sleeper.wait() == -signal.SIGKILL


def test_an_entry_without_a_program_ends_no_process(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="names no program"):
        undo_entry(entry(ResourceKind.PROCESS, tmp_path / "key", pid=sleeper.pid, start_ticks=ticks(sleeper)))

    assert sleeper.poll() is None


def test_a_program_that_is_a_script_is_known_by_the_script(tmp_path: Path) -> None:
    script = tmp_path / "wrapper"
    script.write_text("#!/bin/sh\necho up\nread line\n")
    script.chmod(0o755)
    with subprocess.Popen([script, "the-long-key"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()

        twice(entry(ResourceKind.PROCESS, "the-long-key", program=str(script)))

        assert process.wait() == -signal.SIGKILL


def test_a_search_does_not_hit_others_nor_ourselves(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    undo_entry(entry(ResourceKind.PROCESS, tmp_path / "other-key", program=sys.executable))
    undo_entry(entry(ResourceKind.PROCESS, sys.orig_argv[-1] + "-no-such-word", program=sys.executable))

    assert sleeper.poll() is None


@pytest.mark.parametrize("key", ["", "a", "qemu"])
def test_a_search_for_a_word_of_many_command_lines_is_refused(key: str) -> None:
    with pytest.raises(InvalidArgument, match="too short"):
        undo_entry(entry(ResourceKind.PROCESS, key, program=sys.executable))


def test_a_zombie_counts_as_gone(sleeper: subprocess.Popen[bytes]) -> None:
    found = processes.ProcessRef(sleeper.pid, ticks(sleeper))
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)

    assert not processes.is_alive(found)
    processes.kill(found, time.monotonic())


def test_waiting_for_a_process_ends_at_the_deadline(sleeper: subprocess.Popen[bytes]) -> None:
    fd = os.pidfd_open(sleeper.pid)
    try:
        with pytest.raises(DeadlineExceeded, match=str(sleeper.pid)):
            processes.wait_gone(fd, sleeper.pid, time.monotonic() + 0.05)
    finally:
        os.close(fd)
