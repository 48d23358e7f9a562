"""The order of things in a sandbox's cgroups, its limits, what stops it, and how an end is explained."""

import asyncio
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyshim.model.confinement import Group, HostOom
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.sizing import Placement, PlacementRequest, SavedPlacement
from pyshim.model.vm import GuestNode, VmExit, VmExitKind
from pyshim.resources.cgroups.live import SandboxCgroups
from pyshim.state.records import SandboxRecords
from pyshim.state.schema import ShimRecord
from pyshim.state.store import StateStore
from tests.fakes.disks import disk

from .cgroups_rig import Rig, sizing_record

SHIM = os.getpid()
SANDBOX, OVERHEAD = "/pod1/c1", "/kata_overhead/s1"


async def test_one_of_two_simultaneous_sandboxes_with_the_same_cgroups_path_is_refused(
    tmp_path: Path,
) -> None:
    """Neither is seen in the cgroup yet: its vCPUs get there last. The one's undo would kill the other's."""

    rig = Rig()

    async def no_occupants(_groups: tuple[Group, ...]) -> Mapping[str, int]:
        await asyncio.sleep(0)
        return {}

    rig.host.occupants = no_occupants  # type: ignore[method-assign]

    async def release(entry: LedgerEntry) -> None:
        rig.host.release(entry.key)

    async def enter(name: str) -> SandboxRecords:
        shim = ShimRecord(pid=os.getpid(), start_ticks=1, socket="unix:///s", namespace="default", pid_namespace=1)
        records = SandboxRecords(
            store=StateStore(root=str(tmp_path)), sandbox_id=SandboxId(name), shim=shim, undo=release
        )
        records.ledger.acquire(LedgerEntry(kind=ResourceKind.DIRECTORY, key=f"/run/{name}"))
        plan: Any = SimpleNamespace(
            config=rig.config,
            sandbox_id=name,
            cgroups=rig.plan,
            sizing=rig.record,
            placement=None,
            numa=(),
            numa_why="",
        )
        cgroups = SandboxCgroups(plan=plan, host=rig.host, records=records, on_change=lambda: None)
        await cgroups.enter()
        return records

    for number in range(10):
        both = await asyncio.gather(enter(f"a{number}"), enter(f"b{number}"), return_exceptions=True)

        (refused,) = [each for each in both if isinstance(each, BaseException)]
        assert isinstance(refused, FailedPrecondition), refused
        assert "has the same cgroupsPath" in str(refused)
        (winner,) = [each for each in both if isinstance(each, SandboxRecords)]
        for entry in reversed(winner.entries()):
            await winner.ledger.release(entry)
        winner.remove()  # the end of a Delete: until then its strike-outs may wait for a write


def _cpus(text: str) -> Mapping[str, Any]:
    return {"cpu": {"cpus": text}}


async def test_the_shim_joins_before_the_vmm_is_made_and_its_vcpus_are_placed_after() -> None:
    rig = Rig()

    await rig.start()

    assert rig.host.history == [
        f"{SHIM} into {OVERHEAD}",
        "vmm is made",
        f"50 into {OVERHEAD}/vmm",
        f"40 into {OVERHEAD}/vmm",
    ]
    assert rig.host.threads == {SANDBOX: (71,)}


async def test_on_v2_the_vmm_is_born_in_the_pods_cgroup_and_the_shim_goes_back() -> None:
    rig = Rig(CgroupMode.V2)

    await rig.start()

    assert rig.host.history == [
        f"{SHIM} into {OVERHEAD}",
        f"{SHIM} into {SANDBOX}",
        "vmm is made",
        f"{SHIM} into {OVERHEAD}",
        f"40 into {OVERHEAD}/vmm",
    ]
    assert rig.host.threads == {f"{SANDBOX}/vcpus": (71,)}
    listed = [path for path, file, _ in rig.host.settings if file == "devices.deny"]
    assert listed == [f"{OVERHEAD}/vmm", f"{SANDBOX}/vcpus", SANDBOX], "the shim is in none of them any more"


async def test_on_v2_all_but_the_shim_is_below_its_cgroup_and_in_the_list() -> None:
    rig = Rig(CgroupMode.V2, sandbox_cgroup_only=True)

    await rig.start()

    assert rig.host.history == [
        f"{SHIM} into {SANDBOX}",
        "vmm is made",
        f"50 into {SANDBOX}/vmm",
        f"40 into {SANDBOX}/vmm",
    ]
    assert rig.host.threads == {f"{SANDBOX}/vcpus": (71,)}
    listed = [path for path, file, _ in rig.host.settings if file == "devices.deny"]
    assert listed == [f"{SANDBOX}/vmm", f"{SANDBOX}/vcpus"]


async def test_a_v2_that_takes_no_program_is_one_note_for_each_cgroup() -> None:
    rig = Rig(CgroupMode.V2, sandbox_cgroup_only=True)
    rig.host.refused = dict.fromkeys(("devices.deny", "devices.allow"), "attach program: EPERM")

    await rig.start()

    assert rig.cgroups.saved()["Notes"] == [
        f"no device list for '{SANDBOX}/{name}': attach program: EPERM" for name in ("vmm", "vcpus")
    ]


async def test_an_intent_is_in_the_ledger_before_a_cgroup_is_made_and_struck_out_after_it_is_gone() -> None:
    rig = Rig()
    await rig.start()
    assert [entry.key for _, entry in rig.ledger.history] == [SANDBOX, OVERHEAD, f"{OVERHEAD}/vmm"]

    await rig.cgroups.leave()
    await rig.cgroups.leave()

    assert (rig.host.there, rig.ledger.held) == ({}, {})


async def test_an_occupied_cgroup_is_refused_and_left_alone() -> None:
    rig = Rig()
    rig.host.there = {SANDBOX: {4711}}

    with pytest.raises(FailedPrecondition, match=f"make cgroup '{SANDBOX}': process 4711 is in it: another sandbox"):
        await rig.cgroups.enter()
    await rig.cgroups.leave()

    assert rig.host.there == {SANDBOX: {4711}}
    assert rig.ledger.history == []


async def test_a_limit_that_was_demanded_and_cannot_be_set_stops_the_start_and_leaves_nothing() -> None:
    rig = Rig(sandbox_cgroup_limits=True)
    rig.host.refused["cpu.cfs_quota_us"] = "controller cpu is not mounted"

    with pytest.raises(FailedPrecondition, match=f"set cpu.cfs_quota_us of '{SANDBOX}' to '100000': controller cpu"):
        await rig.cgroups.enter()
    await rig.cgroups.leave()

    assert (rig.host.there, rig.ledger.held) == ({}, {})


async def test_a_setting_that_is_not_required_is_only_noted() -> None:
    rig = Rig(sandbox_cgroup_limits=True)
    rig.host.refused["blkio.bfq.weight"] = "ENOENT"

    await rig.start()

    notes = rig.cgroups.saved()["Notes"]
    assert isinstance(notes, list)
    assert any("set blkio.bfq.weight" in note for note in notes)


async def test_new_threads_are_placed_and_limits_follow_the_size_after_hotplug() -> None:
    rig = Rig(sandbox_cgroup_limits=True)
    await rig.start()
    rig.threads = (71, 72)

    await rig.fit(record=sizing_record("2"))

    assert rig.host.threads == {SANDBOX: (71, 72)}
    assert rig.written("cpu.cfs_quota_us") == ["100000", "100000", "200000", "100000"]
    assert rig.cgroups.saved()["VcpuThreads"] == [71, 72]
    assert rig.changes == 1


async def test_a_pods_own_container_does_not_change_the_cpu_set() -> None:
    rig = Rig()
    await rig.start()

    await rig.fit({}, _cpus("1"), _cpus("3"))
    await rig.fit({}, _cpus("1"))
    await rig.fit({}, _cpus("1"), {"pids": {}})

    assert rig.written("cpuset.cpus") == ["1,3", "1", ""]


async def test_a_cpu_that_is_not_there_is_refused_before_anything_changes() -> None:
    rig = Rig()
    await rig.start()

    with pytest.raises(InvalidArgument, match="CPUs 9 of '1,9' are not there: the cgroup above has 0-3"):
        await rig.fit(_cpus("1,9"))

    assert rig.written("cpuset.cpus") == []


async def test_vcpus_are_pinned_and_let_go_again() -> None:
    rig = Rig(enable_vcpus_pinning=True)
    rig.threads = (71, 72)
    await rig.start()

    await rig.fit(_cpus("2"))
    assert rig.host.pins == {72: (2,)}
    assert rig.cgroups.saved()["Pinned"] == {"1": 2}
    await rig.fit({"pids": {}})

    assert rig.host.pins == {}
    assert rig.cgroups.saved()["Pinned"] == {}


@pytest.mark.parametrize("mode", [CgroupMode.V1, CgroupMode.V2, CgroupMode.NONE])
async def test_the_programs_of_a_vm_are_not_confined_to_the_cpus_of_containerd(mode: CgroupMode) -> None:
    """Nor in a sandbox without cgroups; the shim stays where containerd is."""
    rig = Rig(mode)
    rig.helper_pids = (60,)

    await rig.start()

    assert {40, 50, 60} <= set(rig.host.widened)
    assert os.getpid() not in rig.host.widened


async def test_a_cancelled_wait_for_the_lock_releases_it() -> None:
    """The lock is the node's: no other pod could be made."""
    rig = Rig(enable_vcpus_pinning=True)
    await rig.start()
    asked, mine = threading.Event(), threading.Event()
    held = []

    @contextmanager
    def pins() -> Iterator[Mapping[int, str]]:
        asked.set()
        mine.wait()
        held.append("lock")
        yield {}
        held.remove("lock")

    rig.records.pins = pins  # type: ignore[method-assign]
    fitting = asyncio.create_task(rig.fit(_cpus("2")))
    await asyncio.to_thread(asked.wait)
    fitting.cancel()
    await asyncio.sleep(0.05)
    mine.set()

    with pytest.raises(asyncio.CancelledError):
        await fitting
    await asyncio.get_running_loop().shutdown_default_executor()

    assert held == []


async def test_a_cpu_another_sandbox_pins_is_left_alone() -> None:
    rig = Rig(enable_vcpus_pinning=True)
    rig.records.pinned_by_others = {2: "other"}
    await rig.start()

    await rig.fit(_cpus("2"))

    assert rig.host.pins == {}
    assert rig.cgroups.saved()["Pinning"] == "not pinned: CPU 2 is pinned by sandbox 'other'"


async def test_programs_that_serve_the_guest_are_in_the_cgroup_of_the_device_rules() -> None:
    rig = Rig()
    rig.helper_pids = (60,)
    rig.host.descendants = {40: (41, 42)}

    await rig.start()

    assert rig.host.there[f"{OVERHEAD}/vmm"] == {50, 40, 41, 42, 60}


async def test_a_device_is_allowed_before_the_vmm_is_given_it() -> None:
    rig = Rig()
    await rig.start()
    await rig.cgroups.allow(disk("blk-1", "/dev/sdb"))

    assert rig.host.settings[-1] == (f"{OVERHEAD}/vmm", "devices.allow", "b 8:0 rwm")


async def test_nothing_is_touched_after_the_end() -> None:
    rig = Rig()
    await rig.start()
    await rig.cgroups.leave()
    before = list(rig.host.settings)

    await rig.fit(_cpus("1"))

    assert rig.host.settings == before


@pytest.mark.parametrize(
    ("kind", "oom", "reason"),
    [
        (VmExitKind.VMM_DIED, None, "it died"),
        (
            VmExitKind.VMM_DIED,
            HostOom(limited_by="/pod1", limit_bytes=300 << 20),
            "the host's OOM killer ended the VMM, as cgroup '/pod1' met its memory limit of 300 MiB: it died",
        ),
        (
            VmExitKind.VMM_DIED,
            HostOom(limited_by="", limit_bytes=0),
            "the host ran out of memory and its OOM killer ended the VMM: it died",
        ),
        (VmExitKind.GUEST_PANIC, HostOom(limited_by="/pod1", limit_bytes=1), "it died"),
    ],
    ids=["by itself", "a limit was met", "the host ran out", "the guest panicked"],
)
async def test_the_reason_of_an_end_names_its_cause(kind: VmExitKind, oom: HostOom | None, reason: str) -> None:
    rig = Rig()
    rig.host.killed = oom
    await rig.start()

    assert await rig.cgroups.explain(VmExit(kind=kind, reason="it died")) == reason


async def test_on_a_host_without_cgroups_nothing_happens() -> None:
    rig = Rig(CgroupMode.NONE)
    await rig.start()
    await rig.fit(_cpus("1"))
    await rig.cgroups.leave()

    assert (rig.host.history, rig.host.settings, rig.ledger.history) == (["vmm is made"], [], [])
    assert rig.cgroups.saved() == {"Mode": "none", "Notes": ["this host has no cgroups mounted"]}


def _placed(*, exclusive: bool, cpus: tuple[int, ...], service: tuple[int, ...]) -> SavedPlacement:
    return SavedPlacement(
        request=PlacementRequest(
            sandbox_id="s1", name="default/s1", vcpus=2, memory_bytes=1 << 30, exclusive=exclusive
        ),
        placement=Placement(
            vcpu_cpus=cpus,
            service_cpus=service,
            cpu_nodes=(0,),
            memory_nodes=(0,),
            exclusive=exclusive,
            why="node 0 is the emptiest",
        ),
    )


async def test_a_placed_vm_has_its_cpus_before_anything_of_it_runs_and_serves_it_from_the_shared_ones() -> None:
    rig = Rig(placement=_placed(exclusive=True, cpus=(2, 3), service=(0, 1)))
    rig.threads = (71, 72)

    await rig.cgroups.enter()
    assert (rig.written("cpuset.cpus"), rig.written("cpuset.mems")) == (["0-3"], [""])
    assert rig.host.pins == {SHIM: (0, 1)}
    await rig.place()

    assert rig.host.pins == {SHIM: (0, 1), 71: (2,), 72: (3,)}
    saved = rig.cgroups.saved()
    assert saved["Pinned"] == {"0": 2, "1": 3}
    assert saved["Pinning"] == "node 0 is the emptiest"
    assert {each["Source"] for each in saved["Settings"] if each["File"] == "cpuset.cpus"} == {  # type: ignore[attr-defined]
        "the placement that the node's plugin gave"
    }


async def test_the_shared_cpus_of_a_placed_vm_follow_its_containers_and_its_own_do_not() -> None:
    rig = Rig(placement=_placed(exclusive=True, cpus=(2, 3), service=(0, 1)))
    rig.threads = (71, 72)
    await rig.start()

    await rig.fit(_cpus("0,2-3"), {"cpu": {"cpus": "0,2-3", "mems": "0"}})
    assert rig.host.pins == {SHIM: (0,), 71: (2,), 72: (3,)}
    await rig.fit(_cpus("0,2-3"), {"memory": {"limit": 1 << 30}})

    assert rig.written("cpuset.cpus")[-1] == "0-3"
    assert rig.host.pins == {SHIM: (0, 1), 71: (2,), 72: (3,)}


async def test_vcpus_of_a_vm_placed_on_shared_cpus_run_on_all_of_them() -> None:
    rig = Rig(placement=_placed(exclusive=False, cpus=(0, 1), service=(0, 1)))
    rig.threads = (71, 72)

    await rig.start()

    assert rig.host.pins == {SHIM: (0, 1), 71: (0, 1), 72: (0, 1)}
    assert rig.cgroups.saved()["Pinned"] == {}


async def test_a_placement_that_the_pods_cgroup_does_not_allow_is_given_up_and_noted() -> None:
    rig = Rig(placement=_placed(exclusive=True, cpus=(2, 900), service=(0, 1)))

    await rig.start()

    assert rig.host.pins == {}
    assert "Placed" not in rig.cgroups.saved()
    assert any("not placed: set cpuset" in str(note) for note in rig.cgroups.saved()["Notes"])  # type: ignore[attr-defined]


async def test_a_thread_that_the_kernel_does_not_pin_is_a_note_and_stops_nothing() -> None:
    rig = Rig(placement=_placed(exclusive=True, cpus=(2, 3), service=(0, 1)))
    rig.threads = (71, 72)
    rig.host.unpinnable = {SHIM, 72}

    await rig.start()

    assert rig.host.pins == {71: (2,)}
    assert list(rig.cgroups.saved()["Notes"])[1:] == [  # type: ignore[call-overload]
        "the shim is not where it is placed: EINVAL",
        "a thread is not where it is placed: EINVAL",
        "vCPU 1 is not where it is pinned to: EINVAL",
    ]


def _node(vcpus: tuple[int, ...], cpus: tuple[int, ...]) -> GuestNode:
    return GuestNode(vcpus=vcpus, memory_mib=128, distances=(10, 21), memory_nodes=(0,), cpus=cpus)


_NODES = (_node((0, 1), (0, 1)), _node((2, 3), (2, 3)))


@pytest.mark.parametrize("placed", [False, True], ids=["by enable_numa", "placed on shared CPUs"])
async def test_a_vcpu_runs_on_the_cpus_behind_its_node_of_the_guest(placed: bool) -> None:
    placement = _placed(exclusive=False, cpus=(0, 1, 2, 3), service=(0, 1, 2, 3)) if placed else None
    rig = Rig(placement=placement, nodes=_NODES)
    rig.threads = (71, 72, 73, 74)
    await rig.start()

    before_the_guest_runs = {tid: rig.host.pins[tid] for tid in rig.threads}
    await rig.fit(_cpus("1-2"))
    by_containers = {tid: rig.host.pins[tid] for tid in rig.threads}
    await rig.fit(_cpus("1"))

    assert before_the_guest_runs == {71: (0, 1), 72: (0, 1), 73: (2, 3), 74: (2, 3)}
    assert by_containers == {71: (1,), 72: (1,), 73: (2,), 74: (2,)}
    assert {tid: rig.host.pins[tid] for tid in rig.threads} == dict.fromkeys(rig.threads, (1,))
    numa = rig.cgroups.saved()["Numa"]
    assert isinstance(numa, dict)
    assert (numa["Why"], [node["vcpus"] for node in numa["Nodes"]]) == ("as on the host", [(0, 1), (2, 3)])


@pytest.mark.parametrize(
    ("cpus", "base", "pinned", "reason"),
    [
        ("0-3", "0", {0: 0, 1: 1, 2: 2, 3: 3}, "4 vCPUs on a CPU each"),
        ("0,2-3", "1", {1: 0, 2: 2, 3: 3}, "3 vCPUs on a CPU each; 1 of the base run on any of them"),
        ("1-3", "1/2", {1: 1, 2: 2, 3: 3}, "3 vCPUs on a CPU each; 1 of the base run on any of them"),
    ],
)
async def test_vcpus_are_pinned_to_cpus_behind_their_node(
    cpus: str, base: str, pinned: dict[int, int], reason: str
) -> None:
    rig = Rig(nodes=_NODES, enable_vcpus_pinning=True)
    rig.threads = (71, 72, 73, 74)
    rig.record = sizing_record(base)
    await rig.start()

    await rig.fit(_cpus(cpus), record=rig.record)

    saved = rig.cgroups.saved()
    assert (saved["Pinned"], saved["Pinning"]) == ({str(vcpu): cpu for vcpu, cpu in pinned.items()}, reason)
    assert {71 + vcpu: rig.host.pins[71 + vcpu] for vcpu in pinned} == {
        71 + vcpu: (cpu,) for vcpu, cpu in pinned.items()
    }


async def test_more_cpus_behind_a_node_than_it_has_vcpus_pin_none() -> None:
    rig = Rig(nodes=(_node((0,), (0, 1)), _node((1, 2, 3), (2, 3))), enable_vcpus_pinning=True)
    rig.threads = (71, 72, 73, 74)
    await rig.start()

    await rig.fit(_cpus("0-3"))

    assert rig.cgroups.saved()["Pinning"] == "not pinned: 2 CPUs for the 1 vCPUs of the guest's node 0"
    assert rig.host.pins[71] == (0, 1)
    assert rig.host.pins[74] == (2, 3)


V1, V2 = CgroupMode.V1, CgroupMode.V2


def rate(number: int, minor: int = 0) -> dict[str, int]:
    return {"major": 8, "minor": minor, "rate": number}


def limits(**block_io: Any) -> dict[str, Any]:
    return {"blockIO": block_io}


async def started(mode: CgroupMode, **runtime: Any) -> Rig:
    rig = Rig(mode, **runtime)
    await rig.start()
    return rig


async def test_a_limit_is_the_sum_of_the_containers() -> None:
    rig = await started(V1, sandbox_cgroup_only=True)

    await rig.fit(
        limits(throttleReadBpsDevice=[rate(100), rate(7, minor=16)], throttleWriteIOPSDevice=[rate(3)]),
        limits(throttleReadBpsDevice=[rate(20)], throttleWriteIOPSDevice=[rate(4)]),
    )

    assert rig.written("blkio.throttle.read_bps_device") == ["8:0 120"]
    assert rig.written("blkio.throttle.write_iops_device") == ["8:0 7"]
    assert rig.written("blkio.throttle.write_bps_device") == ["8:0 0"]


async def test_a_limit_goes_with_its_container_or_when_one_without_comes() -> None:
    rig = await started(V2, sandbox_cgroup_only=True)
    limited = limits(throttleReadBpsDevice=[rate(100)], throttleReadIOPSDevice=[rate(5, minor=16)])

    await rig.fit(limited)
    await rig.fit(limited, {"cpu": {"shares": 2}})
    await rig.fit()
    await rig.fit()

    assert rig.written("io.max") == [
        *("8:0 rbps=100 wbps=max riops=max wiops=max", "8:16 rbps=max wbps=max riops=5 wiops=max"),
        *("8:0 rbps=max wbps=max riops=max wiops=max", "8:16 rbps=max wbps=max riops=max wiops=max") * 2,
    ]


def may_swap(bytes_text: str) -> dict[str, Any]:
    return {"unified": {"memory.swap.max": bytes_text}}


@pytest.mark.parametrize(
    ("containers", "value"),
    [
        ([may_swap("0")], ["0"]),
        ([may_swap("0"), may_swap("4096")], ["4096"]),
        ([{"memory": {"limit": 100, "swap": 250}}, may_swap("7")], ["157"]),
        ([{"memory": {"limit": 100, "swap": 100}}], ["0"]),
        ([may_swap("0"), {"memory": {"limit": 100}}], []),
        ([may_swap("0"), {"memory": {"limit": 100, "swap": -1}}], []),
        ([may_swap("0"), may_swap("max")], []),
        ([may_swap("1G")], []),
        ([may_swap("1" * 5000)], []),
        ([], []),
    ],
)
async def test_a_vm_is_swapped_by_no_more_than_its_containers_together(
    containers: list[dict[str, Any]], value: list[str]
) -> None:
    rig = await started(V2, sandbox_cgroup_only=True)

    await rig.fit(*containers)

    assert rig.written("memory.swap.max") == value


async def test_a_limit_of_swap_stays_without_containers_and_goes_with_one_that_has_none() -> None:
    rig, of_v1 = await started(V2, sandbox_cgroup_only=True), await started(V1, sandbox_cgroup_only=True)

    for containers in ([may_swap("0")], [], [may_swap("0"), {"pids": {"limit": 1}}]):
        await rig.fit(*containers)
        await of_v1.fit(*containers)

    assert rig.written("memory.swap.max") == ["0", "max"]
    assert of_v1.written("memory.swap.max") == []


@pytest.mark.parametrize(
    ("mode", "written"),
    [
        (V1, {"blkio.bfq.weight": ["300"], "blkio.bfq.weight_device": ["8:0 500"]}),
        (V2, {"io.bfq.weight": ["default 300", "8:0 500"]}),
    ],
)
async def test_a_weight_is_the_largest_of_the_containers(mode: CgroupMode, written: dict[str, list[str]]) -> None:
    rig = await started(mode, sandbox_cgroup_only=True)

    await rig.fit(
        limits(weight=100, weightDevice=[{"major": 8, "minor": 0, "weight": 500}]),
        limits(weight=300, weightDevice=[{"major": 8, "minor": 0, "weight": 400}, {"major": 8, "minor": 1}]),
        {"blockIO": None},
    )

    assert {file: rig.written(file) for file in written} == written


async def test_vmm_and_virtiofsd_are_limited_where_each_of_them_is() -> None:
    rig = await started(V2, sandbox_cgroup_only=False)

    await rig.fit({**limits(throttleReadBpsDevice=[rate(100)]), **may_swap("0")})

    for limit in ("io.max", "memory.swap.max"):
        assert {path for path, file, _ in rig.host.settings if file == limit} == {"/pod1/c1", "/kata_overhead/s1"}


async def test_each_device_has_its_limit_in_the_state() -> None:
    rig = await started(V1, sandbox_cgroup_only=True)

    await rig.fit(limits(throttleReadBpsDevice=[rate(100), rate(7, minor=16)]))

    settings: Any = rig.cgroups.saved()["Settings"]
    values = [each["Value"] for each in settings if each["File"] == "blkio.throttle.read_bps_device"]
    assert values == ["8:0 100", "8:16 7"]


async def test_a_limit_on_a_device_that_is_gone_fails_the_container_and_a_weight_does_not() -> None:
    rig = await started(V1, sandbox_cgroup_only=True)
    rig.host.refused = dict.fromkeys(("blkio.bfq.weight", "blkio.throttle.read_bps_device"), "ENODEV (no such device)")

    await rig.fit(limits(weight=100))
    with pytest.raises(FailedPrecondition, match=r"read_bps_device .* to .8:0 100.: ENODEV"):
        await rig.fit(limits(throttleReadBpsDevice=[rate(100)]))


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"blockIO": []}, ""),
        ({"blockIO": 7}, "linux.resources.blockIO"),
        (limits(weight=1001), "weight: expected `int` <= 1000"),
        (limits(weight="100"), "weight is not a whole number"),
        (limits(throttleReadBpsDevice=[rate(-1)]), "throttleReadBpsDevice[0].rate"),
        (limits(throttleReadBpsDevice=[rate(1 << 70)]), "throttleReadBpsDevice[0].rate"),
        (limits(throttleWriteIOPSDevice=[{"major": 8}]), "throttleWriteIOPSDevice[0]"),
        (limits(throttleReadIOPSDevice={"major": 8}), "throttleReadIOPSDevice"),
        ({"cpu": {"realtimeRuntime": 1000, "realtimePeriod": 1_000_000}}, "realtimeRuntime: a VM's vCPUs"),
    ],
)
async def test_an_invalid_or_impossible_limit_is_refused_by_name(resources: dict[str, Any], said: str) -> None:
    rig = await started(V1)
    if not said:
        await rig.fit(resources)
        return
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        await rig.fit(resources)
