"""The guest agent's crun configuration from a spec, and who a container's user is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oci_messages import a_spec

from guest.agent.container import spec
from guest.agent.errors import InvalidArgument
from protos.agent import agent_pb2, oci_pb2


def config_of(message: oci_pb2.Spec, **fields: Any) -> Any:
    given: dict[str, Any] = {"rootfs": "/b/rootfs", "cgroup": "/g", "pid_namespace": "", "hooks": {}}
    given |= {"guest": guest("0-3"), "limits_devices": True}
    return spec.oci_config(message, **(given | fields))


def guest(online_cpus: str, *page_sizes: str) -> spec.GuestFacts:
    return spec.GuestFacts(online_cpus, frozenset(page_sizes))


# -- spec ------------------------------------------------------------------------------------------------------------


def test_the_bundles_root_and_cgroup_replace_the_specs() -> None:
    config = config_of(a_spec(CgroupsPath="/host/path"))

    assert config["root"] == {"path": "/b/rootfs", "readonly": False}
    assert config["linux"]["cgroupsPath"] == "/g"


def test_namespaces_lose_host_paths_and_those_that_are_the_pods() -> None:
    kinds = ("network", "ipc", "uts", "mount", "pid", "user")
    given = [oci_pb2.LinuxNamespace(Type=kind, Path=f"/proc/1/ns/{kind}") for kind in kinds]

    config = config_of(a_spec(Namespaces=given))

    assert config["linux"]["namespaces"] == [{"type": "mount"}, {"type": "pid"}, {"type": "cgroup"}, {"type": "user"}]


def test_a_shared_pid_namespace_is_joined() -> None:
    config = config_of(a_spec(), pid_namespace="/proc/9/ns/pid")

    assert {"type": "pid", "path": "/proc/9/ns/pid"} in config["linux"]["namespaces"]


def test_annotations_that_give_crun_orders_are_dropped() -> None:
    message = a_spec()
    message.Annotations.update({"run.oci.hooks.stdout": "/etc/x", "io.kubernetes.x": "y"})

    assert config_of(message)["annotations"] == {"io.kubernetes.x": "y"}


def test_host_security_labels_are_dropped() -> None:
    process = oci_pb2.Process(Args=["a"], ApparmorProfile="docker-default", SelinuxLabel="x:y:z")

    assert not {"apparmorProfile", "selinuxLabel"} & set(spec.oci_process(process))


def test_a_process_keeps_what_the_caller_gave_under_the_specs_names() -> None:
    process = oci_pb2.Process(
        Args=["a"],
        OOMScoreAdj=-5,
        Rlimits=[oci_pb2.POSIXRlimit(Type="RLIMIT_CORE")],
        Capabilities=oci_pb2.LinuxCapabilities(Bounding=["CAP_KILL"]),
        ConsoleSize=oci_pb2.Box(Height=5),
    )

    assert spec.oci_process(process) == {
        "cwd": "/",
        "args": ["a"],
        "oomScoreAdj": -5,
        "rlimits": [{"type": "RLIMIT_CORE", "hard": 0, "soft": 0}],
        "capabilities": {"bounding": ["CAP_KILL"]},
        "user": {"uid": 0, "gid": 0, "additionalGids": []},
    }


def test_linux_keeps_what_the_caller_gave_under_the_specs_names() -> None:
    linux = config_of(
        a_spec(
            UIDMappings=[oci_pb2.LinuxIDMapping(HostID=7, Size=9)],
            Devices=[oci_pb2.LinuxDevice(Path="/dev/x", Type="c")],
            MaskedPaths=["/m"],
            RootfsPropagation="shared",
            IntelRdt=oci_pb2.LinuxIntelRdt(L3CacheSchema="x"),
        )
    )["linux"]

    assert linux["uidMappings"] == [{"hostID": 7, "containerID": 0, "size": 9}]
    numbers = {"major": 0, "minor": 0, "fileMode": 0o666, "uid": 0, "gid": 0}
    assert linux["devices"] == [{"path": "/dev/x", "type": "c", **numbers}]
    assert (linux["maskedPaths"], linux["rootfsPropagation"]) == (["/m"], "shared")
    assert "intelRdt" not in linux


def test_limits_of_devices_and_pages_are_of_cgroup_v2() -> None:
    disk = {"Major": 8, "Minor": 0}
    resources = oci_pb2.LinuxResources(
        BlockIO=oci_pb2.LinuxBlockIO(
            Weight=100,
            LeafWeight=5,
            WeightDevice=[oci_pb2.LinuxWeightDevice(**disk, Weight=7, LeafWeight=3)],
            ThrottleReadIOPSDevice=[oci_pb2.LinuxThrottleDevice(**disk, Rate=11)],
        ),
        HugepageLimits=[oci_pb2.LinuxHugepageLimit(Pagesize="2MB", Limit=1)],
    )

    assert spec.oci_resources(resources, guest("0")) == {
        "blockIO": {
            "weight": 100,
            "weightDevice": [{"major": 8, "minor": 0, "weight": 7}],
            "throttleReadIOPSDevice": [{"major": 8, "minor": 0, "rate": 11}],
        },
        "hugepageLimits": [{"pageSize": "2MB", "limit": 1}],
    }


def test_limits_without_a_file_in_cgroup_v2_and_zeros_are_left_out() -> None:
    resources = oci_pb2.LinuxResources(
        Memory=oci_pb2.LinuxMemory(Limit=100, Swap=-1, Kernel=5, Swappiness=60, DisableOOMKiller=True),
        CPU=oci_pb2.LinuxCPU(Shares=2, RealtimeRuntime=5, Cpus="2-9"),
        Network=oci_pb2.LinuxNetwork(ClassID=4),
    )

    assert spec.oci_resources(resources, guest("0-3")) == {
        "memory": {"limit": 100, "swap": -1},
        "cpu": {"shares": 2, "cpus": "2,3"},
    }


def test_a_cpuset_the_guest_has_nothing_of_is_left_out() -> None:
    assert spec.oci_resources(oci_pb2.LinuxResources(CPU=oci_pb2.LinuxCPU(Cpus="8-9")), guest("0-3")) == {}


def test_cgroup_files_are_cruns_to_write() -> None:
    resources = oci_pb2.LinuxResources(Pids=oci_pb2.LinuxPids(Limit=50), Unified={"memory.high": "83886080"})

    assert spec.oci_resources(resources, guest("0")) == {
        "pids": {"limit": 50},
        "unified": {"memory.high": "83886080"},
    }


def test_a_limit_of_zero_for_pages_that_the_guest_lacks_is_left_out() -> None:
    """A kubelet sets one for each size of the host's. One that allows some stays, and crun names it."""
    limits = [("2MB", 0), ("1GB", 0), ("16MB", 1 << 24)]
    resources = oci_pb2.LinuxResources(
        HugepageLimits=[oci_pb2.LinuxHugepageLimit(Pagesize=size, Limit=limit) for size, limit in limits]
    )

    found = spec.oci_resources(resources, guest("0", "2MB"))["hugepageLimits"]

    assert [each["pageSize"] for each in found] == ["2MB", "16MB"]


@pytest.mark.parametrize(("size", "name"), [(64 << 10, "64KB"), (2 << 20, "2MB"), (1 << 30, "1GB"), (16 << 30, "16GB")])
def test_sizes_of_pages_are_named_as_the_files_of_cgroups(size: int, name: str) -> None:
    assert spec.page_size_name(size) == name


BUILT_IN = [
    {"allow": False, "access": "rwm"},
    {"allow": True, "type": "c", "access": "m"},
    {"allow": True, "type": "b", "access": "m"},
    {"allow": True, "type": "c", "major": 10, "minor": 200, "access": "rwm"},
]


def test_without_device_rules_those_of_the_spec_and_of_its_mounts_are_allowed() -> None:
    device = oci_pb2.LinuxDevice(Path="/dev/x", Type="b", Major=254, Minor=16)
    nodes = [spec.Node("c", 1, 11), spec.Node("c", 10, 200)]

    rules = config_of(a_spec(Devices=[device]), nodes=nodes)["linux"]["resources"]["devices"]

    assert rules == [
        *BUILT_IN,
        {"allow": True, "type": "b", "major": 254, "minor": 16, "access": "rwm"},
        {"allow": True, "type": "c", "major": 1, "minor": 11, "access": "rwm"},
    ]


def test_a_device_with_a_rule_of_its_own_is_allowed_no_more_than_that() -> None:
    device = oci_pb2.LinuxDevice(Path="/dev/fuse", Type="c", Major=10, Minor=229)
    rule = oci_pb2.LinuxDeviceCgroup(Allow=True, Type="c", Major=10, Minor=229, Access="r")

    message = a_spec(Devices=[device], Resources=oci_pb2.LinuxResources(Devices=[rule]))

    assert config_of(message)["linux"]["resources"]["devices"] == [
        *BUILT_IN,
        {"allow": True, "type": "c", "major": 10, "minor": 229, "access": "r"},
    ]


def test_a_privileged_container_may_open_every_device() -> None:
    message = a_spec()
    message.Process.Capabilities.Bounding.extend(f"CAP_SYS_{name}" for name in ("ADMIN", "MODULE", "RAWIO"))
    assert {"allow": True, "access": "rwm"} not in config_of(message)["linux"]["resources"]["devices"]

    message.Process.Capabilities.Bounding.append("CAP_MKNOD")

    assert config_of(message)["linux"]["resources"]["devices"] == [{"allow": True, "access": "rwm"}]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"Allow": True, "Access": "rwm"}, {"allow": True, "type": "a", "access": "rwm"}),
        ({"Allow": True, "Type": "a", "Major": -1, "Minor": -1}, {"allow": True, "type": "a", "access": "rwm"}),
        (
            {"Allow": True, "Type": "c", "Major": 1, "Minor": 3, "Access": "r"},
            {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "r"},
        ),
        (
            {"Allow": True, "Type": "c", "Major": 136, "Minor": -1, "Access": "rw"},
            {"allow": True, "type": "c", "major": 136, "access": "rw"},
        ),
        (
            {"Allow": False, "Type": "b", "Major": 8, "Minor": 0, "Access": "m"},
            {"allow": False, "type": "b", "major": 8, "minor": 0, "access": "m"},
        ),
    ],
    ids=["all", "any by -1", "one", "any minor", "minor 0"],
)
def test_a_device_rule_keeps_its_meaning(rule: dict[str, Any], expected: dict[str, Any]) -> None:
    message = a_spec(Resources=oci_pb2.LinuxResources(Devices=[oci_pb2.LinuxDeviceCgroup(**rule)]))

    assert config_of(message)["linux"]["resources"]["devices"] == [*BUILT_IN, expected]


def test_seccomp_keeps_arguments_and_tells_errno_zero_from_none() -> None:
    argument = oci_pb2.LinuxSeccompArg(Index=1, Value=2, ValueTwo=3, Op="SCMP_CMP_EQ")
    rules = [
        oci_pb2.LinuxSyscall(Names=["x"], Action="SCMP_ACT_ERRNO", errnoret=0, Args=[argument]),
        oci_pb2.LinuxSyscall(Names=["y"], Action="SCMP_ACT_ALLOW"),
    ]

    found = config_of(a_spec(Seccomp=oci_pb2.LinuxSeccomp(DefaultAction="SCMP_ACT_LOG", Syscalls=rules)))["linux"][
        "seccomp"
    ]

    assert found["syscalls"][0]["errnoRet"] == 0
    assert found["syscalls"][0]["args"] == [{"index": 1, "value": 2, "valueTwo": 3, "op": "SCMP_CMP_EQ"}]
    assert "errnoRet" not in found["syscalls"][1]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", "/cid"),
        ("/", "/cid"),
        ("/kubepods/pod1/c", "/kubepods/pod1/c"),
        ("relative/c", "/relative/c"),
        ("/../../x", "/x"),
        ("/a/./b/..", "/a/b"),
        ("system.slice:crio:abc", "/system.slice/crio-abc.scope"),
        (
            "kubepods-burstable-pod1.slice:cri-containerd:abc",
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-abc.scope",
        ),
        ("::name", "/name"),
    ],
)
def test_a_cgroup_path_stays_below_the_root(path: str, expected: str) -> None:
    assert spec.guest_cgroup(path, "cid") == expected


@pytest.mark.parametrize(("text", "numbers"), [("", set()), ("0", {0}), ("0-2,5", {0, 1, 2, 5}), ("3-3\n", {3})])
def test_cpu_lists_are_read(text: str, numbers: set[int]) -> None:
    assert spec.cpu_set(text) == numbers


@pytest.mark.parametrize("text", ["x", "1-", "-1", "1-x", "0-99999999", "0-99999"])
def test_a_cpu_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        spec.cpu_set(text)


# -- users -----------------------------------------------------------------------------------------------------------


def test_a_passwd_that_is_a_symlink_out_of_the_root_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("app:x:77:88::/:/bin/sh\n")
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    (root / "etc/passwd").symlink_to(outside)
    user = oci_pb2.User()

    with pytest.raises(InvalidArgument, match="'app'"):
        spec.apply_string_user(user, agent_pb2.StringUser(uid="app"), str(root))


def test_numbers_need_no_passwd_and_groups_are_looked_up(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/group").write_text("wheel:x:10:\n")
    user = oci_pb2.User(UID=1, AdditionalGids=[5])

    spec.apply_string_user(user, agent_pb2.StringUser(uid="99", gid="wheel", additionalGids=["wheel"]), str(tmp_path))

    assert (user.UID, user.GID, user.AdditionalGids) == (99, 10, [5, 10])


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"uid": "app"}, "user 'app': not in the container's /etc/passwd"),
        ({"uid": "1", "gid": "wheel"}, "group 'wheel': not in the container's /etc/group"),
        ({"uid": "1", "additionalGids": ["wheel"]}, "group 'wheel': not in"),
        ({"uid": "4294967296"}, "user id '4294967296': not a number below"),
        ({"uid": "odd"}, "user id '7x': not a number below"),
    ],
)
def test_a_user_or_group_that_is_none_is_named(tmp_path: Path, wanted: dict[str, Any], named: str) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("odd:x:7x:8::/:/bin/sh\n")

    with pytest.raises(InvalidArgument, match=named):
        spec.apply_string_user(oci_pb2.User(), agent_pb2.StringUser(**wanted), str(tmp_path))


@pytest.mark.parametrize(("group", "gid"), [("", 88), ("5", 5)])
def test_a_user_by_name_has_the_primary_group_unless_one_is_wanted(tmp_path: Path, group: str, gid: int) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("app:x:77:88::/:/bin/sh\n")
    user = oci_pb2.User()

    spec.apply_string_user(user, agent_pb2.StringUser(uid="app", gid=group), str(tmp_path))

    assert (77, gid) == (user.UID, user.GID)
