"""The plan of one container: volumes, root file system, and the spec the guest gets."""

from collections.abc import Callable, Mapping

import pytest

from pyshim.model.errors import FailedPrecondition, InvalidArgument, Unimplemented
from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.oci import OciSpec
from pyshim.model.plans import ContainerPlan
from pyshim.model.task import RootfsMount
from pyshim.model.volumes import SourceFacts, SourceKind
from pyshim.pod.plan.container import container_plan, rootfs_mount, without_image
from pyshim.pod.plan.guest_spec import guest_process
from pyshim.resources.volumes.plan.share import share_plan
from pyshim.resources.volumes.plan.volumes import volume_sources
from tests.fakes.inputs import config, spec
from tests.unit.resources.volumes.test_plan import bind

SHARED = "/run/kata-containers/shared/containers"
MOUNTS = "/run/kata-containers/shared/sandboxes/s1/mounts"
Planner = Callable[..., ContainerPlan]


@pytest.fixture
def plan() -> Planner:
    def make(
        spec: OciSpec,
        sources: Mapping[str, SourceFacts] | None = None,
        rootfs: tuple[RootfsMount, ...] = (),
        sysctls: Mapping[str, str] | None = None,
    ) -> ContainerPlan:
        return container_plan(
            container_id=ContainerId("c1"),
            bundle=HostPath("/b"),
            rootfs=rootfs,
            spec=spec,
            config=config(),
            share=share_plan(SandboxId("s1"), config(), vm_dir="/vm"),
            sources=sources or dict.fromkeys(volume_sources(spec), SourceFacts(kind=SourceKind.DIRECTORY)),
            hostname=spec.hostname,
            sysctls=sysctls or {},
            terminal=False,
            stdin=True,
        )

    return make


def test_a_bind_mount_is_shared_under_a_name_of_its_own(plan: Planner) -> None:
    planned = plan(spec(mounts=[bind("/data", "/srv/a", "ro"), bind("/data2", "/srv/a")]))

    read_only, writable = (each.mount for each in planned.binds)
    assert read_only.source == writable.source == "/srv/a"
    assert read_only.target != writable.target
    assert "ro" in read_only.options
    assert "ro" not in writable.options
    storages = planned.guest.storages
    assert [each.source for each in storages] == [m.target.replace(MOUNTS, SHARED) for m in (read_only, writable)]
    assert [mount["source"] for mount in planned.guest.spec["mounts"]] == [each.mount_point for each in storages]


def test_every_share_mount_stays_beneath_the_share(plan: Planner) -> None:
    hostile = plan(spec(mounts=[bind("/x", "/srv/../.."), bind("/y", "/a\nb"), bind("/z", "/" + "\u00fc" * 250)]))

    assert len(hostile.binds) == 3
    for mount in (each.mount for each in hostile.binds):
        assert mount.target.startswith(f"{MOUNTS}/volume-")
        assert "/.." not in mount.target
        assert mount.beneath == MOUNTS
        assert len(mount.target.rpartition("/")[2].encode()) <= 255


def test_the_guests_own_trees_are_not_shared(plan: Planner) -> None:
    planned = plan(spec(mounts=[bind("/host-sys", "/sys/kernel"), bind("/dev/shm", "/run/shm")]))

    assert planned.binds == ()
    assert [mount["source"] for mount in planned.guest.spec["mounts"]] == [
        "/sys/kernel",
        "/run/kata-containers/sandbox/shm",
    ]
    assert {"nosuid", "nodev", "noexec"} <= {*planned.guest.spec["mounts"][1]["options"]}


def test_a_missing_volume_is_named(plan: Planner) -> None:
    with pytest.raises(FailedPrecondition, match=r"'/gone' on '/data'"):
        plan(spec(mounts=[bind("/data", "/gone")]), {"/gone": SourceFacts(kind=SourceKind.MISSING)})


@pytest.mark.parametrize(
    ("path", "mounted", "root"),
    [
        ("rootfs", True, "/b/rootfs"),
        ("/other", True, "/b/rootfs"),
        ("rootfs", False, "/b/rootfs"),
        ("/srv//root", False, "/srv/root"),
        ("./x/../y", False, "/b/y"),
    ],
)
def test_the_root_is_where_containerd_mounted_it_or_where_the_spec_says(
    plan: Planner, path: str, mounted: bool, root: str
) -> None:
    mounts = (RootfsMount(type="bind", source="/snap", target="", options=("rbind",)),) if mounted else ()

    planned = plan(spec(root={"path": path}), rootfs=mounts)

    assert planned.rootfs == root
    assert planned.share_mounts[0].source == root


@pytest.mark.parametrize("path", ["../other", "..", "a/../../b"])
def test_a_relative_root_that_leaves_the_bundle_is_refused(plan: Planner, path: str) -> None:
    with pytest.raises(InvalidArgument, match="leaves the bundle"):
        plan(spec(root={"path": path}))


@pytest.mark.parametrize(
    "option", ["io.katacontainers.fs-opt.layer=aGk=", "io.katacontainers.fs-opt.block_device=file"]
)
def test_layers_left_to_the_guest_by_a_block_snapshotter_are_refused(plan: Planner, option: str) -> None:
    mounts = (RootfsMount(type="overlay", source="overlay", target="", options=("ro", option)),)

    with pytest.raises(Unimplemented, match=f"option '{option.partition('=')[0]}' of a block snapshotter"):
        plan(spec(), rootfs=mounts)


def test_a_rootfs_mount_with_a_target_stays_below_the_root() -> None:
    inner = RootfsMount(type="bind", source="/x", target="etc", options=())
    outside = RootfsMount(type="bind", source="/x", target="../../etc", options=())

    assert rootfs_mount(inner, HostPath("/b/rootfs")).target == "/b/rootfs/etc"
    with pytest.raises(InvalidArgument, match="leaves the root file system"):
        rootfs_mount(outside, HostPath("/b/rootfs"))


def test_host_only_members_are_trimmed_and_limits_stay(plan: Planner) -> None:
    planned = plan(
        spec(
            hooks={"prestart": [{"path": "/x"}]},
            annotations={"cdi.k8s.io/gpu": "a=b", "kept": "yes"},
            linux={
                "namespaces": [{"type": name, "path": "/n"} for name in ("pid", "network", "mount", "user", "cgroup")],
                "resources": {
                    "cpu": {"quota": 5, "cpus": "0-3", "mems": "0"},
                    "memory": {"limit": 7},
                    "pids": {"limit": 3},
                    "devices": [{"allow": False}],
                },
                "seccomp": {"defaultAction": "SCMP_ACT_ALLOW"},
            },
        )
    )

    guest = planned.guest.spec
    assert "hooks" not in guest
    assert guest["annotations"] == {"kept": "yes"}
    assert guest["linux"]["namespaces"] == [{"type": "mount"}, {"type": "ipc"}, {"type": "uts"}]
    assert guest["linux"]["resources"] == {"cpu": {"quota": 5}, "memory": {"limit": 7}, "pids": {"limit": 3}}
    assert "seccomp" not in guest["linux"]  # disable_guest_seccomp is Kata's default


def test_a_process_without_limits_has_those_of_containerds_unit(plan: Planner) -> None:
    named = {"type": "RLIMIT_NOFILE", "hard": 64, "soft": 32}

    none = plan(spec()).guest.spec["process"]["rlimits"]
    files = plan(spec(process={"args": ["sh"], "cwd": "/", "rlimits": [named]})).guest.spec["process"]["rlimits"]

    assert {limit["type"]: (limit["soft"], limit["hard"]) for limit in none} == {
        "RLIMIT_NOFILE": (1048576, 1048576),
        "RLIMIT_NPROC": (2**64 - 1, 2**64 - 1),
        "RLIMIT_CORE": (2**64 - 1, 2**64 - 1),
    }
    assert [limit for limit in files if limit["type"] == "RLIMIT_NOFILE"] == [named]
    assert len(files) == 3


@pytest.mark.parametrize(
    ("terminal", "stdin", "is_null"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_a_process_without_client_or_terminal_has_no_standard_input(terminal: bool, stdin: bool, is_null: bool) -> None:
    assert guest_process({"args": ["sh"]}, terminal=terminal, stdin=stdin).get("noStdin", False) is is_null


def test_rules_for_devices_that_mean_the_same_in_the_guest_reach_it(plan: Planner) -> None:
    fuse = {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}
    other = {"path": "/dev/other", "type": "c", "major": 240, "minor": 1}
    same = [
        {"allow": True, "access": "rwm"},
        {"allow": True, "type": "c", "access": "m"},
        {"allow": True, "type": "c", "major": 10, "minor": 229, "access": "r"},
        {"allow": False, "type": "c", "major": 1, "minor": 8, "access": "rwm"},
        {"allow": True, "type": "c", "major": 240, "minor": 1, "access": "rw"},
    ]
    of_the_host = [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "b", "major": 8, "minor": 0, "access": "rwm"},
        {"allow": True, "type": "c", "major": 10, "minor": 60, "access": "rwm"},
        {"allow": True, "type": "c", "major": 240, "minor": 2, "access": "rwm"},
    ]

    resources = {"resources": {"devices": [*of_the_host, *same]}, "devices": [fuse, other]}

    assert plan(spec(linux=resources)).guest.spec["linux"]["resources"] == {"devices": same}


def test_a_device_of_every_container_is_left_to_the_agent(plan: Planner) -> None:
    """All devices of the host are listed for a privileged container, and kata-agent makes no node twice."""
    full = {"path": "/dev/full", "type": "c", "major": 1, "minor": 7, "fileMode": 0o666, "uid": 0, "gid": 0}
    terminal = {"path": "/dev/tty", "type": "c", "major": 5, "minor": 0, "gid": 5}
    guarded = {"path": "/dev/zero", "type": "c", "major": 1, "minor": 5, "fileMode": 0o600}
    other = {"path": "/dev/null", "type": "c", "major": 1, "minor": 5, "fileMode": 0o666}
    fuse = {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229, "fileMode": 0o666}

    planned = plan(spec(linux={"devices": [full, terminal, guarded, other, fuse]}))

    assert planned.guest.spec["linux"]["devices"] == [guarded, other, fuse]


def test_cgroup_files_reach_the_guest_unless_they_are_about_the_hosts_devices(plan: Planner) -> None:
    unified = {"memory.high": "5", "pids.max": "50"}

    assert plan(spec(linux={"resources": {"unified": unified}})).guest.spec["linux"]["resources"]["unified"] == unified
    for name in ("io.max", "cpuset.cpus", "rdma.max"):
        with pytest.raises(InvalidArgument, match=name):
            plan(spec(linux={"resources": {"unified": {**unified, name: "1"}}}))


OF_CRIO = {"io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.cri-o.SandboxID": "pod"}


@pytest.mark.parametrize(
    ("namespaces", "annotations", "shared"),
    [
        pytest.param([{"type": "pid"}], {}, False, id="its own"),
        pytest.param(
            [{"type": "pid", "path": "/proc/7/ns/pid"}], {}, True, id="the sandbox's, containerd's for hostPID"
        ),
        pytest.param([], {}, False, id="the host's for a container without a pod"),
        pytest.param([], OF_CRIO, True, id="the host's, CRI-O's for hostPID"),
    ],
)
def test_the_agent_makes_the_pid_namespace(
    plan: Planner, namespaces: list[dict[str, str]], annotations: dict[str, str], shared: bool
) -> None:
    """It adds one to every spec, so the spec must have none."""
    planned = plan(spec(linux={"namespaces": [*namespaces, {"type": "ipc"}]}, annotations=annotations))

    assert planned.guest.shared_pid_namespace is shared
    assert planned.guest.spec["linux"]["namespaces"] == [{"type": "ipc"}, {"type": "uts"}]


def test_a_container_on_the_hosts_namespaces_gets_the_pods(plan: Planner) -> None:
    """hostNetwork includes the host's uts namespace: without one the container would show the guest's host name."""
    planned = plan(spec(linux={"namespaces": [{"type": "mount"}]}))

    kinds = [namespace["type"] for namespace in planned.guest.spec["linux"]["namespaces"]]
    assert kinds == ["mount", "ipc", "uts"]


def test_the_pods_sysctls_are_added_and_the_containers_own_win(plan: Planner) -> None:
    planned = plan(spec(linux={"sysctl": {"a.b": "own"}}), sysctls={"a.b": "pod", "c.d": "pod"})

    assert planned.guest.spec["linux"]["sysctl"] == {"a.b": "own", "c.d": "pod"}


def test_a_container_without_its_image_needs_nothing_of_the_host(plan: Planner) -> None:
    bare = without_image(plan(spec(mounts=[bind("/data", "/srv")])))

    assert (bare.rootfs_mounts, bare.share_mounts, bare.share_points, bare.binds, bare.disks) == ((), (), (), (), ())


def test_planning_does_not_change_the_spec(plan: Planner) -> None:
    given = spec(mounts=[bind("/data", "/srv")], linux={"resources": {"cpu": {"cpus": "0"}}})
    before = repr(given)

    plan(given)

    assert repr(given) == before


def test_a_block_device_becomes_a_volume_of_the_vm(plan: Planner) -> None:
    devices = [
        {"path": "/dev/loop7", "type": "b", "major": 7, "minor": 7},
        {"path": "/dev/zero2", "type": "c", "major": 1, "minor": 5},
    ]
    rules = [{"allow": True, "type": "b", "major": 7, "minor": 7, "access": "r"}]

    facts = SourceFacts(kind=SourceKind.BLOCK, device_path="/dev/vg/data")

    planned = plan(spec(linux={"devices": devices, "resources": {"devices": rules}}), {"/dev/block/7:7": facts})

    assert [(use.disk.path, use.container_path, use.disk.read_only) for use in planned.disks] == [
        ("/dev/vg/data", "/dev/loop7", True)
    ]
    # A node without a mode is 0666, as with runc and crun: kata-agent would make one without permissions.
    assert planned.guest.spec["linux"]["devices"] == [{"fileMode": 0o666, **device} for device in devices]


ALL = {"allow": True, "access": "rwm"}
NAMED = {"allow": True, "type": "b", "major": 7, "minor": 7, "access": "rwm"}


@pytest.mark.parametrize(
    ("rules", "path", "key", "plugged"),
    [
        pytest.param([ALL], "/dev/vda", False, False, id="of a privileged container"),
        pytest.param([{**ALL, "type": "a", "major": -1, "minor": -1}], "/dev/vda", False, False, id="in other words"),
        pytest.param([{**ALL, "type": "b"}], "/dev/vda", False, False, id="all block devices"),
        pytest.param([ALL], "/dev/vda", True, True, id="with the key"),
        pytest.param([ALL], "/dev/xvda", False, True, id="at a path of its own"),
        pytest.param([ALL, NAMED], "/dev/vda", False, True, id="with a rule of its own"),
        pytest.param([{**ALL, "allow": False}, NAMED], "/dev/vda", False, True, id="of any other container"),
    ],
)
def test_the_hosts_disks_are_not_plugged_for_a_privileged_container(
    rules: list[dict[str, object]], path: str, key: bool, plugged: bool
) -> None:
    devices = [{"path": path, "type": "b", "major": 7, "minor": 7}, {"path": "/dev/n", "type": "c", "major": 1}]
    given = spec(linux={"devices": devices, "resources": {"devices": rules}})

    planned = container_plan(
        container_id=ContainerId("c1"),
        bundle=HostPath("/b"),
        rootfs=(),
        spec=given,
        config=config(privileged_host_disks=key),
        share=share_plan(SandboxId("s1"), config(), vm_dir="/vm"),
        sources={"/dev/block/7:7": SourceFacts(kind=SourceKind.BLOCK, device_path="/dev/vda")},
        hostname="",
        sysctls={},
        terminal=False,
        stdin=False,
    )

    assert [use.container_path for use in planned.disks] == ([path] if plugged else [])
    assert [device["path"] for device in planned.guest.spec["linux"]["devices"]] == ([path] if plugged else []) + [
        "/dev/n"
    ]
