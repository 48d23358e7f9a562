"""The edges to cgroup v1 and v2 on plain directories, where only files matter; the kernel's part is in integration."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pyshim.cleanup.undo import undo_entry
from pyshim.host.processes.children import Children
from pyshim.model.confinement import Group, GroupSetting, HostOom, Role
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.resources.cgroups.host import hierarchies
from pyshim.resources.cgroups.host.hierarchies import Hierarchy, make_directory, mounted, place_of
from pyshim.resources.cgroups.host.sandbox_cgroups import LinuxCgroups
from pyshim.resources.cgroups.host.v1 import CgroupsV1
from pyshim.resources.cgroups.host.v2 import CgroupsV2

CGROUPS = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t2\t1\ncpuacct\t1\t2\t1\nmemory\t4\t15\t1\n"
SANDBOX = Group(role=Role.SANDBOX, path="/pod1/c1")
DEVICES = Group(role=Role.DEVICES, path="/pod1/c1/vmm", controllers=("devices",))


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
        "/other rw - cgroup cgroup rw,memory",
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
def test_a_process_is_where_its_controllers_are(tmp_path: Path, controllers: tuple[str, ...], place: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text("5:cpuacct,cpu:/a\n4:memory:/b:c\n3:blkio:/../outside\n0::/d\n")

    assert place_of(7, controllers, str(tmp_path)) == place


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
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("c1/**") if path.is_dir())
    assert made == ["cpu,cpuacct/pod1/c1", "devices/pod1/c1", "devices/pod1/c1/vmm", "memory/pod1/c1"]


def test_v1_fills_an_empty_cpuset_on_the_way_and_leaves_a_set_one(v1: Callable[..., CgroupsV1], tmp_path: Path) -> None:
    tree = v1("cpuset")
    root = tmp_path / "cpuset"
    (root / "pod1/c1").mkdir(parents=True)
    for directory, cpus in ((root, "0-3"), (root / "pod1", "2"), (root / "pod1/c1", "")):
        (directory / "cpuset.cpus").write_text(cpus)
        (directory / "cpuset.mems").write_text("0")

    tree.make(SANDBOX)

    assert (root / "pod1/cpuset.cpus").read_text() == "2"
    assert (root / "pod1/c1/cpuset.cpus").read_text() == "2"
    assert tree.allowed(SANDBOX, "cpus") == "2"


@pytest.mark.parametrize(("line", "written"), [("3:memory:/a", ["0", ""]), ("3:memory:/../b", ["", ""])])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_move_to_where_this_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, line: str, written: list[str]
) -> None:
    """A process outside of what is mounted here stays out of its root."""
    files = [tmp_path / "a/cgroup.procs", tmp_path / "cgroup.procs"]
    (tmp_path / "a").mkdir()
    for file in files:
        file.touch()
    line = line if version == "v1" else line.replace("3:memory", "0:")
    monkeypatch.setattr(hierarchies, "_content", lambda path: line.encode())

    (CgroupsV1 if version == "v1" else CgroupsV2)((Hierarchy(str(tmp_path), ("memory",) * (version == "v1")),)).stay()

    assert [file.read_text() for file in files] == written


def test_v1_writes_into_the_controllers_hierarchy_and_says_why_not(
    v1: Callable[..., CgroupsV1], tmp_path: Path
) -> None:
    tree = v1("cpu,cpuacct")
    tree.make(SANDBOX)
    file = tmp_path / "cpu,cpuacct/pod1/c1/cpu.shares"
    file.write_text("1024")

    def setting(controller: str, name: str) -> GroupSetting:
        return GroupSetting(role=Role.SANDBOX, controller=controller, file=name, value="2", source="a test")

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
        (1, (30, 1), (50, 1), HostOom(limited_by="/pod1/c1", limit_bytes=30)),
        (1, (2**63 - 4096, 0), (2**63 - 4096, 0), HostOom(limited_by="", limit_bytes=0)),
    ],
    ids=["no kill", "the pod's limit", "our own limit", "the host's memory"],
)
def test_v1_names_the_cgroup_whose_limit_was_met(
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
    _memory_v1(root / "pod1/c1", *own, kills)

    assert tree.oom(SANDBOX) == found


def test_v2_names_the_controllers_it_cannot_give(tmp_path: Path) -> None:
    tree = CgroupsV2((Hierarchy(str(tmp_path), ()),))
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory")

    notes = tree.make(Group(role=Role.SANDBOX, path="/c1"))

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
        (root / "pod1/c1/vmm").mkdir(parents=True)
    entry = LedgerEntry(
        kind=ResourceKind.CGROUP, key="/pod1/c1", detail={"roots": ":".join(map(str, [*roots, tmp_path / "gone"]))}
    )

    undo_entry(entry)
    undo_entry(entry)

    assert [sorted(path.name for path in root.rglob("*")) for root in roots] == [["pod1"], ["pod1"]]


@pytest.mark.root
async def test_a_program_of_a_confined_caller_runs_on_the_cpus_of_its_cgroup_as_they_are_and_as_they_become() -> None:
    """A cpuset alone does not undo the mask that a program has inherited (since Linux 6.2), which is the control."""
    found = [each for each in mounted() if "cpuset" in each.controllers]
    if not found or not os.access(found[0].mount_point, os.W_OK) or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs a writable cpuset hierarchy and two CPUs")
    first, second, *_ = sorted(os.sched_getaffinity(0))
    group = Group(role=Role.SANDBOX, path=f"/pyshim-cpus-{os.getpid()}", controllers=("cpuset",))
    cgroups = LinuxCgroups(CgroupMode.V1, (found[0],))
    directory = f"{found[0].mount_point}{group.path}"

    def sets(value: str) -> GroupSetting:
        return GroupSetting(role=Role.SANDBOX, controller="cpuset", file="cpuset.cpus", value=value, source="")

    with confined_to(first):
        program = await Children().spawn(("/bin/sleep", "600"))
    await cgroups.make((group,))
    try:
        assert await cgroups.apply(group, (sets(f"{first},{second}"),)) == {}
        await cgroups.join(group, (program.pid,))
        inherited = os.sched_getaffinity(program.pid)

        assert await cgroups.pin_family(program.pid, (), ()) == ""

        assert os.sched_getaffinity(program.pid) == {first, second}
        assert await cgroups.apply(group, (sets(f"{first}"),)) == {}
        assert os.sched_getaffinity(program.pid) == {first}
        assert await cgroups.apply(group, (sets(f"{first},{second}"),)) == {}
        assert os.sched_getaffinity(program.pid) == {first, second}
        assert inherited == {first} or kernel() < (6, 2), "the control"
    finally:
        await program.end()
        os.rmdir(directory)


@contextmanager
def confined_to(cpu: int) -> Iterator[None]:
    former = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, former)


def kernel() -> tuple[int, ...]:
    return tuple(int(word) for word in os.uname().release.split("-")[0].split(".")[:2])
