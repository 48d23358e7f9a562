"""A sandbox's cgroups, their members and their settings."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.confinement import CgroupPlan, Member, Role
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import CgroupMode, HostFacts, cpuset_text
from pyshim.model.ids import SandboxId
from pyshim.model.sizing import SizingRecord, dimension
from pyshim.model.units import MIB
from pyshim.resources.cgroups.plan.cgroups import cgroup_plan, parent_cgroup, sandbox_cgroup, slice_directory
from pyshim.resources.cgroups.plan.pinning import pinning
from pyshim.resources.cgroups.plan.settings import cpuset_settings, cpuset_union, device_settings, limit_settings
from tests.fakes.inputs import host


def _config(**runtime: Any) -> Config:
    qemu = {"path": "/bin/qemu", "kernel": "/k", "image": "/i", "virtio_fs_daemon": "/v", "rootfs_type": "erofs"}
    tables = {"hypervisor": {"qemu": qemu}, "agent": {}, "runtime": runtime}
    return build_config(Source(path="/etc/test.toml", directory="/etc", document=tables))


def _record(vcpus: str = "1.5", memory_mib: int = 2048) -> SizingRecord:
    made = [
        dimension(
            base=Fraction(value),
            base_source="default",
            requested=Fraction(0),
            requested_source="none",
            unit=1,
            least=(1, "least"),
            most=(1 << 20, "most"),
        )
        for value in (vcpus, str(memory_mib))
    ]
    return SizingRecord(policy="sum", vcpus=made[0], memory_mib=made[1], warnings=())


def _plan(host: HostFacts, path: str = "/kubepods/pod1/c1", **runtime: Any) -> CgroupPlan:
    return cgroup_plan(sandbox_id=SandboxId("s1"), cgroups_path=path, config=_config(**runtime), host=host)


@pytest.mark.parametrize("mode", [CgroupMode.V1, CgroupMode.V2])
@pytest.mark.parametrize(
    ("only", "paths"),
    [(True, ["/kubepods/pod1/c1"]), (False, ["/kubepods/pod1/c1", "/kata_overhead/s1"])],
    ids=["sandbox_cgroup_only", "apart"],
)
def test_a_remote_vm_has_only_the_shim_in_cgroups(mode: CgroupMode, only: bool, paths: list[str]) -> None:
    tables = {"hypervisor": {"remote": {}}, "agent": {}, "runtime": {"sandbox_cgroup_only": only}}
    config = build_config(Source(path="/etc/test.toml", directory="/etc", document=tables))

    plan = cgroup_plan(
        sandbox_id=SandboxId("s1"), cgroups_path="/kubepods/pod1/c1", config=config, host=host(cgroup_mode=mode)
    )

    assert [group.path for group in plan.groups] == paths
    assert {plan.group(role).path for role in plan.members.values()} == {paths[-1]}
    assert plan.with_device_list == ()


@pytest.mark.parametrize(
    ("given", "path", "unit"),
    [
        ("/kubepods/pod1/c1", "/kubepods/pod1/c1", ""),
        ("/default/c1", "/default/c1", ""),
        ("default/c1", "/vc/default/c1", ""),
        ("c1", "/vc/c1", ""),
        ("", "/vc/s1", ""),
        ("/k8s.io//c1/", "/k8s.io/c1", ""),
        ("/pods/../../c1", "/c1", ""),
        ("/with:colon/c1", "/with:colon/c1", ""),
        (
            "kubepods-besteffort-pod1.slice:cri-containerd:c1",
            "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice/cri-containerd-c1.scope",
            "cri-containerd-c1.scope",
        ),
        (":cri-containerd:c1", "/system.slice/cri-containerd-c1.scope", "cri-containerd-c1.scope"),
        ("-.slice:ctr:c1", "/ctr-c1.scope", "ctr-c1.scope"),
    ],
    ids=str,
)
def test_a_cgroups_path_of_either_form_leads_to_its_cgroup(given: str, path: str, unit: str) -> None:
    found, scope = sandbox_cgroup(given, "s1")

    assert found == path
    assert (scope.unit if scope else "") == unit


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("/", "names the root"),
        ("/a/..", "names the root"),
        ("a:b", "neither a path nor slice:prefix:name"),
        ("a.slice:b:c:d", "neither a path nor slice:prefix:name"),
        ("a.slice::c", "neither a path nor slice:prefix:name"),
        ("a.service:b:c", "'a.service' is not a slice name"),
        ("a--b.slice:b:c", "'a--b.slice' is not a slice name"),
        ("../a.slice:b:c", "is not a slice name"),
        ("a.slice:b:c/d", "is not a unit name"),
        (f"a.slice:b:{'x' * 250}", "is not a unit name"),
        (f"/pod/{'x' * 256}", "longer than 255 bytes"),
        ("/pod/a\nb", "no line breaks"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_broken_cgroups_path_is_refused_by_name(given: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=r"linux\.cgroupsPath") as refused:
        sandbox_cgroup(given, "s1")

    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("given", "parent"),
    [
        ("/kubepods/pod1/c1", "/kubepods/pod1"),
        ("kubepods/pod1/c1", "/vc/kubepods/pod1"),
        ("/c1", "/"),
        ("", "/vc"),
        ("pods-pod1.slice:cri-containerd:c1", "/pods.slice/pods-pod1.slice"),
        ("-.slice:p:c1", "/"),
    ],
)
def test_the_cgroup_above_a_sandboxs_own(given: str, parent: str) -> None:
    assert parent_cgroup(given) == parent


def test_slices_lie_in_each_other() -> None:
    assert slice_directory("a-b-c.slice") == "/a.slice/a-b.slice/a-b-c.slice"
    assert slice_directory("-.slice") == ""


@pytest.mark.parametrize(
    ("mode", "only", "groups", "members"),
    [
        (
            CgroupMode.V1,
            True,
            {"sandbox": "/kubepods/pod1/c1", "devices": "/kubepods/pod1/c1/vmm"},
            {"shim": "sandbox", "virtiofsd": "sandbox", "vmm": "sandbox", "vcpus": "sandbox"},
        ),
        (
            CgroupMode.V1,
            False,
            {"sandbox": "/kubepods/pod1/c1", "overhead": "/kata_overhead/s1", "devices": "/kata_overhead/s1/vmm"},
            {"shim": "overhead", "virtiofsd": "overhead", "vmm": "overhead", "vcpus": "sandbox"},
        ),
        (
            CgroupMode.V2,
            True,
            {"sandbox": "/kubepods/pod1/c1", "devices": "/kubepods/pod1/c1/vmm", "vcpus": "/kubepods/pod1/c1/vcpus"},
            {"shim": "sandbox", "virtiofsd": "sandbox", "vmm": "sandbox", "vcpus": "vcpus"},
        ),
        (
            CgroupMode.V2,
            False,
            {
                "sandbox": "/kubepods/pod1/c1",
                "overhead": "/kata_overhead/s1",
                "devices": "/kata_overhead/s1/vmm",
                "vcpus": "/kubepods/pod1/c1/vcpus",
            },
            {"shim": "overhead", "virtiofsd": "overhead", "vmm": "sandbox", "vcpus": "vcpus"},
        ),
    ],
    ids=["v1 only", "v1 overhead", "v2 only", "v2 overhead"],
)
def test_each_part_of_a_sandbox_is_in_its_cgroup(
    mode: CgroupMode, only: bool, groups: Mapping[str, str], members: Mapping[str, str]
) -> None:
    plan = _plan(host(cgroup_mode=mode), sandbox_cgroup_only=only)

    assert {str(group.role): group.path for group in plan.groups} == groups
    assert {str(member): str(role) for member, role in plan.members.items()} == members


def test_without_cgroups_there_is_nothing_to_do_and_a_note() -> None:
    plan = _plan(host(cgroup_mode=CgroupMode.NONE))

    assert plan.groups == ()
    assert plan.notes == ("this host has no cgroups mounted",)
    assert limit_settings(plan, _config(sandbox_cgroup_limits=True), _record()) == ()


@pytest.mark.parametrize(
    ("systemd", "only", "is_unit"), [(True, True, True), (True, False, False), (False, True, False)], ids=str
)
def test_systemd_is_asked_only_where_it_runs_and_has_all_of_the_sandbox(
    systemd: bool, only: bool, is_unit: bool
) -> None:
    facts = host(systemd=systemd, cgroup_mode=CgroupMode.V2)

    plan = _plan(facts, "kubepods-pod1.slice:cri-containerd:c1", sandbox_cgroup_only=only)

    assert (plan.scope is not None) is is_unit
    assert plan.group(Role.SANDBOX).path == "/kubepods.slice/kubepods-pod1.slice/cri-containerd-c1.scope"
    assert is_unit or any("no systemd unit" in note for note in plan.notes)


def _values(plan: CgroupPlan, **runtime: Any) -> dict[tuple[str, str], str]:
    settings = limit_settings(plan, _config(sandbox_cgroup_limits=True, **runtime), _record())
    return {(str(each.role), each.file): each.value for each in settings}


def test_limits_of_a_sandbox_that_is_all_in_one_v2_cgroup() -> None:
    plan = _plan(host(cgroup_mode=CgroupMode.V2), sandbox_cgroup_only=True)

    assert _values(plan) == {
        # 1.5 CPUs of the record and 1 for the VMM.
        ("sandbox", "cpu.max"): "250000 100000",
        ("sandbox", "cpu.weight"): "98",
        ("sandbox", "memory.high"): str((2048 + 206) * MIB),
        ("sandbox", "memory.max"): str((2048 + 412) * MIB),
        ("sandbox", "io.weight"): "250",
        ("vcpus", "cpu.max"): "150000 100000",
        ("vcpus", "cpu.weight"): "59",
    }


def test_limits_of_vcpus_and_overhead_apart_on_v1() -> None:
    plan = _plan(host(cgroup_mode=CgroupMode.V1))

    assert _values(plan) == {
        ("sandbox", "cpu.cfs_period_us"): "100000",
        ("sandbox", "cpu.cfs_quota_us"): "150000",
        ("sandbox", "cpu.shares"): "1536",
        ("overhead", "cpu.cfs_period_us"): "100000",
        ("overhead", "cpu.cfs_quota_us"): "100000",
        ("overhead", "cpu.shares"): "1024",
        # v1 charges the VMM's memory where the VMM is.
        ("overhead", "memory.soft_limit_in_bytes"): str((2048 + 206) * MIB),
        ("overhead", "memory.limit_in_bytes"): str((2048 + 412) * MIB),
        ("overhead", "blkio.bfq.weight"): "100",
    }


def test_no_limits_unless_asked_for_and_each_says_where_it_comes_from() -> None:
    plan = _plan(host())

    assert limit_settings(plan, _config(), _record()) == ()
    sources = {each.source for each in limit_settings(plan, _config(sandbox_cgroup_limits=True), _record())}
    assert "1.5 CPUs of the sizing record" in sources
    assert "2048 MiB of guest RAM + 206 MiB for the VMM and its servers" in sources


def test_huge_pages_are_not_charged() -> None:
    plan = _plan(host(cgroup_mode=CgroupMode.V2), sandbox_cgroup_only=True)
    qemu = {"path": "/q", "kernel": "/k", "image": "/i", "virtio_fs_daemon": "/v", "enable_hugepages": True}
    tables = {"hypervisor": {"qemu": qemu}, "agent": {}, "runtime": {"sandbox_cgroup_limits": True}}
    config = build_config(Source(path="/etc/test.toml", directory="/etc", document=tables))

    found = {each.file: each.value for each in limit_settings(plan, config, _record())}

    assert found["memory.high"] == str(206 * MIB)


@pytest.mark.parametrize(
    ("containers", "union"),
    [([], ""), (["0-1", "3"], "0-1,3"), (["2", "2"], "2"), (["0-1", ""], ""), ([None, "1"], "")],
    ids=str,
)
def test_cpuset_is_the_union_and_one_container_without_a_set_may_use_all(
    containers: list[str | None], union: str
) -> None:
    resources: list[dict[str, Any]] = [
        {"cpu": {"cpus": text}} if text is not None else {"pids": {}} for text in containers
    ]

    assert cpuset_text(cpuset_union(resources, "cpus")) == union


def test_an_unrestricted_set_is_taken_back() -> None:
    settings = cpuset_settings(_plan(host()), frozenset(), frozenset({0}))

    assert [(each.file, each.value, each.required) for each in settings] == [
        ("cpuset.cpus", "", False),
        ("cpuset.mems", "0", True),
    ]


def test_device_rules_deny_everything_first() -> None:
    settings = device_settings(Role.DEVICES, [("c 10:1 rwm", "a node")])

    assert (settings[0].file, settings[0].value) == ("devices.deny", "a")
    allowed = {each.value for each in settings[1:]}
    assert {"c 1:3 rwm", "c 10:232 rwm", "c 10:200 rwm", "b *:* m", "c 10:1 rwm"} <= allowed


@pytest.mark.parametrize("mode", [CgroupMode.V1, CgroupMode.V2])
@pytest.mark.parametrize("only", [True, False])
def test_programs_that_serve_the_guest_have_a_device_list_and_the_shim_has_none(mode: CgroupMode, only: bool) -> None:
    plan = _plan(host(cgroup_mode=mode), sandbox_cgroup_only=only)

    assert Role.DEVICES in plan.with_device_list
    assert plan.members[Member.SHIM] not in plan.with_device_list
    assert mode is CgroupMode.V1 or plan.members[Member.VCPUS] in plan.with_device_list


@pytest.mark.parametrize(
    ("vcpus", "base", "cpus", "taken", "pairs", "reason"),
    [
        (2, "0", {0, 1}, {}, {0: 0, 1: 1}, "2 vCPUs on a CPU each"),
        (3, "1", {4, 6}, {}, {1: 4, 2: 6}, "1 of the base run on any"),
        (3, "0.5", {4, 6}, {}, {1: 4, 2: 6}, "1 of the base"),
        (3, "0", {4, 6}, {}, {}, "more than 2 CPUs and the base"),
        (1, "1", {0, 1}, {}, {}, "1 vCPUs for 2 CPUs"),
        (2, "1", set(), {}, {}, "not every container has a CPU set"),
        (2, "0", {0, 1}, {1: "other"}, {}, "CPU 1 is pinned by sandbox 'other'"),
        (2, "0", {0, 1}, {5: "other"}, {0: 0, 1: 1}, "2 vCPUs"),
    ],
)
def test_vcpus_are_pinned_where_each_has_a_cpu_of_its_own(
    vcpus: int, base: str, cpus: set[int], taken: dict[int, str], pairs: dict[int, int], reason: str
) -> None:
    found = pinning(vcpus=vcpus, base=Fraction(base), cpus=frozenset(cpus), taken=taken)

    assert found.pairs == pairs
    assert reason in found.reason
