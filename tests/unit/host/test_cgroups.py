"""The edges to cgroup v1 and v2 on plain directories, where only files matter; the kernel's part is in integration."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.host.cgroups.first_move import MOST_TIMES, move_to_own_place, stay_movable
from pyshim.host.cgroups.hierarchies import Hierarchy, make_directory, mounted, place_of
from pyshim.host.cgroups.sandbox_cgroups import LinuxCgroups
from pyshim.host.cgroups.v1 import CgroupsV1
from pyshim.host.cgroups.v2 import CgroupsV2
from pyshim.host.release import release
from pyshim.model.cgroups import Group, HostOom, Role, Setting
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ledger import LedgerEntry, ResourceKind

CGROUPS = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t2\t1\ncpuacct\t1\t2\t1\nmemory\t4\t15\t1\n"
SANDBOX = Group(role=Role.SANDBOX, path="/pod1/kata_c1")
DEVICES = Group(role=Role.DEVICES, path="/pod1/kata_c1/vmm", controllers=("devices",))


def _proc(root: Path, *mounts: str) -> str:
    (root / "self").mkdir(parents=True)
    (root / "cgroups").write_text(CGROUPS)
    (root / "self/mountinfo").write_text("".join(f"1 2 0:3 / {line}\n" for line in mounts))
    return str(root)


def test_mounted_hierarchies_of_a_hybrid_host(tmp_path: Path) -> None:
    proc = _proc(
        tmp_path / "proc",
        "/sys/fs/cgroup rw - tmpfs tmpfs rw",
        "/sys/fs/cgroup/cpu,cpuacct rw shared:5 - cgroup cgroup rw,cpu,cpuacct",
        "/sys/fs/cgroup/my\\040memory rw - cgroup cgroup rw,memory",
        "/sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd",
        "/sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate",
        "/elsewhere rw - cgroup cgroup rw,memory",
    )

    assert mounted(proc) == (
        Hierarchy("/sys/fs/cgroup/cpu,cpuacct", ("cpu", "cpuacct")),
        Hierarchy("/sys/fs/cgroup/my memory", ("memory",)),
        Hierarchy("/sys/fs/cgroup/unified", ()),
    )


@pytest.mark.parametrize(
    ("controllers", "place"),
    [(("cpu", "cpuacct"), "/a"), (("memory",), "/b:c"), ((), "/d"), (("pids",), ""), (("blkio",), "")],
    ids=str,
)
def test_place_of_a_process(tmp_path: Path, controllers: tuple[str, ...], place: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text("5:cpuacct,cpu:/a\n4:memory:/b:c\n3:blkio:/../outside\n0::/d\n")

    assert place_of(7, controllers, str(tmp_path)) == place


def test_a_process_is_moved_to_where_it_is(tmp_path: Path) -> None:
    own = os.getpid()
    memory = tmp_path / "memory"
    proc = _proc(
        tmp_path / "proc", f"{tmp_path}/cpu rw - cgroup cgroup rw,cpu", f"{memory} rw - cgroup cgroup rw,memory"
    )
    (tmp_path / f"proc/{own}").mkdir()
    (tmp_path / f"proc/{own}/cgroup").write_text("1:cpu:/elsewhere\n4:memory:/b\n")
    (memory / "b").mkdir(parents=True)
    procs = memory / "b/cgroup.procs"
    before = f"1\n{own}\n"
    procs.write_text(before)

    move_to_own_place(mounted(proc), proc)

    assert procs.read_text() == f"{own}{before[len(str(own)) :]}"  # an ordinary file is written over from its start


def test_a_process_that_stays_movable_is_moved_to_where_it_is_until_told_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes, stop = [], threading.Event()

    def write(path: str, text: str) -> None:
        writes.append((path, text))
        if len(writes) == 3:
            stop.set()

    monkeypatch.setattr("pyshim.host.cgroups.first_move.write", write)

    stay_movable(stop, "/cg/memory/b")

    assert writes == [("/cg/memory/b/cgroup.procs", str(os.getpid()))] * 3


def test_a_process_stays_movable_for_a_bounded_number_of_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[str] = []
    monkeypatch.setattr("pyshim.host.cgroups.first_move.AGAIN_S", 0)
    monkeypatch.setattr("pyshim.host.cgroups.first_move.write", lambda path, _text: writes.append(path))

    stay_movable(threading.Event(), "/cg/memory/b")

    assert len(writes) == MOST_TIMES


def test_a_cgroup_that_cannot_be_written_to_ends_it(tmp_path: Path) -> None:
    stay_movable(threading.Event(), str(tmp_path / "none"))


def test_a_process_that_is_not_where_it_seems_is_not_moved(tmp_path: Path) -> None:
    own = os.getpid()
    proc = _proc(tmp_path / "proc", f"{tmp_path}/memory rw - cgroup cgroup rw,memory")
    (tmp_path / f"proc/{own}").mkdir()
    (tmp_path / f"proc/{own}/cgroup").write_text("4:memory:/b\n")
    (tmp_path / "memory/b").mkdir(parents=True)
    procs = tmp_path / "memory/b/cgroup.procs"
    procs.write_text("1\n")

    move_to_own_place(mounted(proc), proc)

    assert procs.read_text() == "1\n"


def test_the_shim_joins_its_cgroup_after_the_move_to_its_own_place(tmp_path: Path) -> None:
    proc = _proc(tmp_path / "proc", f"{tmp_path}/memory rw - cgroup cgroup rw,memory")
    (tmp_path / "memory/pod1/kata_c1").mkdir(parents=True)
    procs = tmp_path / "memory/pod1/kata_c1/cgroup.procs"
    procs.touch()

    async def scenario() -> None:
        first_move: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        cgroups = LinuxCgroups(CgroupMode.V1, mounted(proc), first_move=first_move)
        joining = asyncio.create_task(cgroups.join(SANDBOX, (os.getpid(),)))
        await asyncio.sleep(0.05)
        assert procs.read_text() == ""

        first_move.set_result(None)

        await joining
        assert procs.read_text() == str(os.getpid())

    asyncio.run(scenario())


@pytest.fixture
def v1(tmp_path: Path) -> Callable[..., CgroupsV1]:
    def make(*controllers: str) -> CgroupsV1:
        for name in controllers:
            (tmp_path / name).mkdir()
        return CgroupsV1(tuple(Hierarchy(str(tmp_path / name), tuple(name.split(","))) for name in controllers))

    return make


def test_v1_makes_the_group_in_every_hierarchy_and_device_rules_in_theirs(
    v1: Callable[..., CgroupsV1], tmp_path: Path
) -> None:
    tree = v1("cpu,cpuacct", "memory", "devices")

    for group in (SANDBOX, DEVICES):
        assert tree.make(group) == ()

    assert tree.roots(DEVICES) == (str(tmp_path / "devices"),)
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("kata_c1/**") if path.is_dir())
    assert made == [
        "cpu,cpuacct/pod1/kata_c1",
        "devices/pod1/kata_c1",
        "devices/pod1/kata_c1/vmm",
        "memory/pod1/kata_c1",
    ]


def test_v1_fills_an_empty_cpuset_on_the_way_and_leaves_a_set_one(v1: Callable[..., CgroupsV1], tmp_path: Path) -> None:
    tree = v1("cpuset")
    root = tmp_path / "cpuset"
    (root / "pod1/kata_c1").mkdir(parents=True)
    for directory, cpus in ((root, "0-3"), (root / "pod1", "2"), (root / "pod1/kata_c1", "")):
        (directory / "cpuset.cpus").write_text(cpus)
        (directory / "cpuset.mems").write_text("0")

    tree.make(SANDBOX)

    assert (root / "pod1/cpuset.cpus").read_text() == "2"
    assert (root / "pod1/kata_c1/cpuset.cpus").read_text() == "2"
    assert tree.allowed(SANDBOX, "cpus") == "2"


def test_v1_writes_into_the_controllers_hierarchy_and_says_why_not(
    v1: Callable[..., CgroupsV1], tmp_path: Path
) -> None:
    tree = v1("cpu,cpuacct")
    tree.make(SANDBOX)
    file = tmp_path / "cpu,cpuacct/pod1/kata_c1/cpu.shares"
    file.write_text("1024")

    def setting(controller: str, name: str) -> Setting:
        return Setting(role=Role.SANDBOX, controller=controller, file=name, value="2", source="a test")

    assert tree.apply(SANDBOX, setting("cpu", "cpu.shares")) == ""
    assert file.read_text().startswith("2")
    assert tree.apply(SANDBOX, setting("memory", "memory.limit")) == "controller memory is not mounted"
    assert tree.apply(SANDBOX, setting("cpu", "cpu.unknown")) == "ENOENT (no such file or directory)"


def _memory_v1(directory: Path, limit: int, failures: int, kills: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(str(limit))
    (directory / "memory.failcnt").write_text(str(failures))
    (directory / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


@pytest.mark.parametrize(
    ("kills", "own", "pod", "found"),
    [
        (0, (100, 5), (50, 1), None),
        (1, (100, 0), (50, 1), HostOom(limited_by="/pod1", limit_bytes=50)),
        (1, (30, 1), (50, 1), HostOom(limited_by="/pod1/kata_c1", limit_bytes=30)),
        (1, (2**63 - 4096, 0), (2**63 - 4096, 0), HostOom(limited_by="", limit_bytes=0)),
    ],
    ids=["no kill", "the pod's limit", "our own limit", "the host's memory"],
)
def test_v1_tells_whose_limit_made_the_oom_killer_come(
    v1: Callable[..., CgroupsV1],
    tmp_path: Path,
    kills: int,
    own: tuple[int, int],
    pod: tuple[int, int],
    found: HostOom | None,
) -> None:
    tree = v1("memory")
    root = tmp_path / "memory"
    _memory_v1(root, 2**63 - 4096, 0)
    _memory_v1(root / "pod1", *pod)
    _memory_v1(root / "pod1/kata_c1", *own, kills)

    assert tree.oom(SANDBOX) == found


def test_v2_names_the_controllers_it_cannot_give(tmp_path: Path) -> None:
    tree = CgroupsV2((Hierarchy(str(tmp_path), ()),))
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory")

    notes = tree.make(Group(role=Role.SANDBOX, path="/kata_c1"))

    assert [note.split(" ")[2] for note in notes] == ["cpuset", "io", "pids"]


@pytest.mark.parametrize(
    ("there", "problem"), [("file", "a file of this name is there"), ("missing/below", "ENOENT")], ids=str
)
def test_a_cgroup_that_cannot_be_made_is_named(tmp_path: Path, there: str, problem: str) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(FailedPrecondition, match=f"make cgroup '{tmp_path}/{there}': .*{problem}"):
        make_directory(str(tmp_path / there))


def test_release_removes_the_group_in_every_hierarchy_it_was_in(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("cpu", "memory")]
    for root in roots:
        (root / "pod1/kata_c1/vmm").mkdir(parents=True)
    entry = LedgerEntry(
        kind=ResourceKind.CGROUP, key="/pod1/kata_c1", detail={"roots": ":".join(map(str, [*roots, tmp_path / "gone"]))}
    )

    release(entry)
    release(entry)

    assert [sorted(path.name for path in root.rglob("*")) for root in roots] == [["pod1"], ["pod1"]]
