"""The plan of each kind of mount and root, and of volumes where nothing is shared."""

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError, Unimplemented
from pyshim.model.guest import GuestContainer, Storage
from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.oci import OciSpec
from pyshim.model.plans import ContainerPlan, SharePlan
from pyshim.model.task import RootfsMount
from pyshim.model.vm import GuestLocation
from pyshim.model.volumes import Bind, DirectVolume, EmptyDir, FsGroup, SourceFacts, SourceKind
from pyshim.pod.plan.container import container_plan, without_image
from pyshim.resources.volumes.plan.disk_volumes import direct_volume_point, disk_id
from pyshim.resources.volumes.plan.disks import with_disks
from pyshim.resources.volumes.plan.guest_pull import root_pulled_in_guest
from pyshim.resources.volumes.plan.share import share_plan
from pyshim.resources.volumes.plan.virtual_volume import virtual_volume
from pyshim.resources.volumes.plan.volumes import VolumesPlan, volume_sources, volumes_plan
from tests.fakes.inputs import config, configured, spec
from tests.unit.pod.conftest import Stack

EMPTY_DIRS = "/var/lib/kubelet/pods/u1/volumes/kubernetes.io~empty-dir"
DIRECTORY = SourceFacts(kind=SourceKind.DIRECTORY)


def share(*bind_mounts: str) -> SharePlan:
    return share_plan(SandboxId("s1"), configured(runtime={"sandbox_bind_mounts": list(bind_mounts)}), vm_dir="/vm")


SHARE = share()


def bind(destination: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": source, "options": ["rbind", *options]}


def planned(
    config: Config, spec: OciSpec, sources: Mapping[str, SourceFacts], bound: tuple[Bind, ...] = ()
) -> VolumesPlan:
    facts = {**dict.fromkeys(volume_sources(spec), DIRECTORY), **sources}
    return volumes_plan(
        container_id=ContainerId("c1"), spec=spec, config=config, share=SHARE, sources=facts, bound=bound
    )


def memory_dir(path: str, sub_path: str = "", **more: Any) -> SourceFacts:
    return SourceFacts(
        kind=SourceKind.DIRECTORY,
        fs_type="tmpfs",
        size_bytes=1 << 20,
        mode=0o777,
        empty_dir=EmptyDir(path=path, sub_path=sub_path, in_memory=True),
        **more,
    )


def test_an_empty_dir_in_memory_is_a_tmpfs_of_the_sandbox() -> None:
    source = f"{EMPTY_DIRS}/cache"

    plan = planned(config(), spec(mounts=[bind("/cache", source, "ro")]), {source: memory_dir(source, gid=7)})

    (storage,) = plan.storages
    assert (storage.driver, storage.fs_type, storage.source) == ("ephemeral", "tmpfs", "tmpfs")
    assert storage.options == ("size=1048576", "mode=777", "fsgid=7")
    assert storage.shared
    assert plan.mounts[0].source == storage.mount_point
    assert plan.mounts[0].options == ("rbind", "ro")
    assert plan.binds == ()


def test_two_volumes_of_one_name_are_two() -> None:
    one, two = f"{EMPTY_DIRS}/cache", f"{EMPTY_DIRS.replace('u1', 'u2')}/cache"

    plan = planned(
        config(), spec(mounts=[bind("/a", one), bind("/b", two)]), {one: memory_dir(one), two: memory_dir(two)}
    )

    assert len({storage.mount_point for storage in plan.storages}) == 2


def test_a_sub_path_of_memory_is_made_in_its_volume() -> None:
    volume, part = f"{EMPTY_DIRS}/cache", "/var/lib/kubelet/pods/u1/volume-subpaths/cache/app/0"

    plan = planned(config(), spec(mounts=[bind("/part", part)]), {part: memory_dir(volume, "a/b")})

    top, inner = plan.storages
    assert (inner.driver, inner.mount_point) == ("local", f"{top.mount_point}/a/b")
    assert plan.mounts[0].source == inner.mount_point


def test_an_ordinary_tmpfs_of_the_host_is_shared() -> None:
    facts = SourceFacts(kind=SourceKind.DIRECTORY, fs_type="tmpfs", size_bytes=1 << 20)

    plan = planned(config(), spec(mounts=[bind("/run/x", "/run/x")]), {"/run/x": facts})

    assert [storage.fs_type for storage in plan.storages] == ["bind"]
    assert [bind.mount.source for bind in plan.binds] == ["/run/x"]


@pytest.mark.parametrize("stays", [True, False])
def test_an_empty_dir_on_disk_is_where_the_configuration_says(stays: bool) -> None:
    source = f"{EMPTY_DIRS}/data"
    facts = SourceFacts(
        kind=SourceKind.DIRECTORY, mode=0o777, empty_dir=EmptyDir(path=source, sub_path="", in_memory=False)
    )

    plan = planned(
        configured(runtime={"disable_guest_empty_dir": stays}), spec(mounts=[bind("/data", source)]), {source: facts}
    )

    assert [bind.mount.source for bind in plan.binds] == ([source] if stays else [])
    assert [storage.driver for storage in plan.storages] == (["virtio-fs"] if stays else ["local"])


@pytest.mark.parametrize(
    ("limits", "size_bytes", "expected"),
    [
        ([{"pageSize": "2MB", "limit": 6 << 20}, {"pageSize": "1GB", "limit": 1 << 30}], 0, 6 << 20),
        ([], 4 << 20, 4 << 20),
        ([{"pageSize": "odd", "limit": 1}, "x"], 4 << 20, 4 << 20),
    ],
    ids=["limit", "file-system", "nonsense"],
)
def test_huge_pages_are_as_many_as_the_limit_or_the_hosts_mount_says(
    limits: list[Any], size_bytes: int, expected: int
) -> None:
    facts = SourceFacts(kind=SourceKind.DIRECTORY, fs_type="hugetlbfs", page_bytes=2 << 20, size_bytes=size_bytes)

    plan = planned(
        config(), spec(mounts=[bind("/huge", "/h")], linux={"resources": {"hugepageLimits": limits}}), {"/h": facts}
    )

    assert plan.storages[0].options == ("pagesize=2097152", f"size={expected}")


def test_huge_pages_without_a_number_are_refused() -> None:
    facts = SourceFacts(kind=SourceKind.DIRECTORY, fs_type="hugetlbfs", page_bytes=2 << 20)

    with pytest.raises(InvalidArgument, match="mount huge pages on '/huge'"):
        planned(config(), spec(mounts=[bind("/huge", "/h")]), {"/h": facts})


@pytest.mark.parametrize("plugin", ["configmap", "secret", "projected", "downward-api"])
def test_what_the_kubelet_rewrites_is_followed(plugin: str) -> None:
    source = f"/var/lib/kubelet/pods/u1/volumes/kubernetes.io~{plugin}/x"

    plan = planned(config(), spec(mounts=[bind("/etc/x", source, "ro")]), {})

    (storage,) = plan.storages
    assert storage.driver == "watchable-bind"
    assert storage.source.endswith(plan.binds[0].mount.target.rpartition("/")[2])
    assert plan.mounts[0].source == storage.mount_point
    # kata-agent refuses another place: `invalid watchable tmpfs root`.
    assert storage.mount_point.rpartition("/")[0] == "/run/kata-containers/shared/containers/watchable"


def test_a_source_that_the_host_lacks_is_named() -> None:
    missing = {"/none": SourceFacts(kind=SourceKind.MISSING)}

    with pytest.raises(FailedPrecondition, match=r"mount volume '/none' on '/data': ENOENT"):
        planned(config(), spec(mounts=[bind("/data", "/none")]), missing)


@pytest.mark.parametrize(("source", "is_shared"), [("/sys", False), ("/dev/shm/x", False), ("/devices", True)])
def test_kernel_trees_are_the_guests_own(source: str, is_shared: bool) -> None:
    plan = planned(config(), spec(mounts=[bind("/data", source)]), {})

    assert [each.mount.source for each in plan.binds] == ([source] if is_shared else [])
    assert (plan.mounts[0].source == source) is not is_shared


def test_a_single_file_or_a_writable_payload_is_not_followed() -> None:
    source = "/var/lib/kubelet/pods/u1/volumes/kubernetes.io~configmap/x"
    file = SourceFacts(kind=SourceKind.FILE)

    assert planned(config(), spec(mounts=[bind("/etc/x", source, "ro")]), {source: file}).storages == ()
    (storage,) = planned(config(), spec(mounts=[bind("/etc/x", source)]), {}).storages
    assert storage.driver == "virtio-fs"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "rprivate"),
        (("rprivate",), "rprivate"),
        (("rslave",), "rslave"),
        (("rshared",), "rslave"),
        (("rslave", "private"), "rprivate"),
    ],
)
def test_a_share_is_never_in_its_sources_peer_group(words: tuple[str, ...], expected: str) -> None:
    plan = planned(config(), spec(mounts=[bind("/data", "/srv", *words)]), {})

    assert plan.binds[0].mount.options == ("rbind", expected)


@pytest.mark.parametrize(
    ("words", "mounts_below", "on_host", "in_guest"),
    [
        pytest.param(("ro",), False, ("rbind", "ro", "rprivate"), ("rbind", "ro"), id="a plain directory"),
        pytest.param(("ro",), True, ("rbind", "ro", "rprivate"), ("rbind",), id="with mounts below"),
        pytest.param(("rro",), True, ("rbind", "rro", "rprivate"), ("rbind", "ro"), id="recursive"),
        pytest.param(("ro", "rslave"), False, ("rbind", "ro", "rslave"), ("rbind", "rslave"), id="with mounts to come"),
    ],
)
def test_read_only_is_of_the_topmost_mount_unless_asked_for_all(
    words: tuple[str, ...], mounts_below: bool, on_host: tuple[str, ...], in_guest: tuple[str, ...]
) -> None:
    """The guest sees the share as one mount, and its `ro` would be of everything below."""
    facts = SourceFacts(kind=SourceKind.DIRECTORY, mounts_below=(7,) if mounts_below else ())

    plan = planned(config(), spec(mounts=[bind("/data", "/srv", *words)]), {"/srv": facts})

    assert plan.binds[0].mount.options == on_host
    assert plan.binds[0].mount.for_guest_only is mounts_below
    assert plan.mounts[0].options == in_guest


def at(place: str, identity: str = "", **more: Any) -> SourceFacts:
    return SourceFacts(kind=SourceKind.DIRECTORY, place=place, identity=identity or place, **more)


@pytest.mark.parametrize(
    ("first", "second", "below"),
    [
        pytest.param(("/srv", at("8:1/srv")), ("/srv", at("8:1/srv")), "", id="the same"),
        pytest.param(("/srv", at("8:1/srv")), ("/srv/a", at("8:1/srv/a/b")), "/a/b", id="below it"),
        pytest.param(("/sub/0", at("8:1/srv")), ("/sub/1", at("8:1/srv")), "", id="by another path"),
        pytest.param(("/srv", at("8:1/srv")), ("/srv", at("8:1/srv", "new")), "", id="under its old name"),
        pytest.param(("/srv", at("8:1/srv")), ("/srv-2", at("8:1/srv-2")), None, id="beside it"),
        pytest.param(("/srv", at("8:1/srv")), ("/srv/a", at("8:2")), None, id="another file system"),
        pytest.param(("/srv/a", at("8:1/srv/a")), ("/srv", at("8:1/srv")), None, id="above it"),
        pytest.param(("/srv", at("8:1/srv")), ("/x", at("8:1/srv/a", mount_flags=1)), None, id="read-only on the host"),
        pytest.param(("/srv", at("8:1/srv", mounts_below=(9,))), ("/srv/a", at("8:1/srv/a")), None, id="of several"),
        pytest.param(("/srv", at("8:1/srv//deleted")), ("/srv", at("8:1/srv", "new")), None, id="removed meanwhile"),
    ],
)
@pytest.mark.parametrize("in_one", [False, True], ids=["two containers", "one container"])
def test_what_lies_in_a_volume_is_reached_by_its_bind(
    first: tuple[str, SourceFacts], second: tuple[str, SourceFacts], below: str | None, in_one: bool
) -> None:
    sources = dict([first, second])
    one, two = bind("/one", first[0]), bind("/two", second[0])
    if in_one:
        plan = bound = planned(config(), spec(mounts=[two, one]), sources)
    else:
        bound = planned(config(), spec(mounts=[one]), dict([first]))
        plan = planned(config(), spec(mounts=[two]), dict([second]), bound.binds)
    in_guest = {mount.destination: mount.source for mount in (*bound.mounts, *plan.mounts)}

    if below is not None and (not in_one or len(sources) == 2):
        assert in_guest["/two"] == in_guest["/one"] + below
        assert (plan.binds, plan.storages) == (bound.binds, bound.storages)
    elif below is None and not in_one:
        assert not set(plan.binds) & set(bound.binds)
        assert in_guest["/two"].rpartition("-")[2] == second[0].rpartition("/")[2] or "-2" in second[0]


@pytest.mark.parametrize("words", [("rslave",), ("rro",)])
def test_a_volume_with_mounts_of_its_own_is_not_reached_by_anothers_bind(words: tuple[str, ...]) -> None:
    sources = {"/srv": at("8:1/srv"), "/srv/a": at("8:1/srv/a")}

    plan = planned(config(), spec(mounts=[bind("/one", "/srv"), bind("/two", "/srv/a", *words)]), sources)

    assert len(plan.binds) == 2


@pytest.mark.parametrize("writer_first", [True, False])
def test_a_reader_and_a_writer_have_one_bind_unless_the_vm_gets_more_rights_by_it(writer_first: bool) -> None:
    """Of an emptyDir always; of other volumes if the VM may write to it already."""
    empty = at("8:1/empty", empty_dir=EmptyDir(path=f"{EMPTY_DIRS}/d", sub_path="", in_memory=False))
    sources = {f"{EMPTY_DIRS}/d": empty, "/srv": at("8:1/srv")}

    bound: tuple[Bind, ...] = ()
    plans = []
    for options in ((), ("ro",)) if writer_first else (("ro",), ()):
        mounts = [bind(source, source, *options) for source in sources]
        plans.append(planned(config(), spec(mounts=mounts), sources, bound))
        bound = plans[-1].binds
    (own_1, other_1), (own_2, other_2) = (tuple(mount.source for mount in plan.mounts) for plan in plans)

    assert own_1 == own_2
    assert (other_1 == other_2) is writer_first
    reader = plans[1 if writer_first else 0]
    assert all("ro" in mount.options for mount in reader.mounts), "the guest refuses it writes"
    assert "ro" not in reader.binds[0].mount.options


def test_a_sub_path_of_an_empty_dir_is_a_path_below_the_volume() -> None:
    part = "/var/lib/kubelet/pods/u1/volume-subpaths/d/app/0"
    volume = f"{EMPTY_DIRS}/d"
    sources = {
        part: at("8:1/pods/d/a/b", empty_dir=EmptyDir(path=volume, sub_path="pods/d/a/b", in_memory=False)),
        volume: at("8:1/pods/d", empty_dir=EmptyDir(path=volume, sub_path="", in_memory=False)),
    }

    inner = planned(config(), spec(mounts=[bind("/part", part)]), sources)
    whole = planned(config(), spec(mounts=[bind("/whole", volume)]), sources)

    assert inner.mounts[0].source == f"{whole.mounts[0].source}/a/b"
    assert inner.binds == whole.binds


BLOCK = SourceFacts(kind=SourceKind.BLOCK, device_path="/dev/vg/lv")


def test_a_block_device_bound_as_a_file_is_the_guests_node() -> None:
    plan = planned(config(), spec(mounts=[bind("/dev/data", "/dev/vg/link")]), {"/dev/vg/link": BLOCK})

    (use,) = plan.disks
    assert use.disk.path == "/dev/vg/lv"
    assert use.storage is not None
    assert (use.storage.fs_type, plan.mounts[0].source) == ("bind", use.storage.mount_point)


@pytest.mark.parametrize("options", [["ro", "noatime"], ["loop", "rw", "noatime"]], ids=["read-only", "loop"])
def test_a_file_system_on_a_block_device_is_mounted_in_the_guest(options: list[str]) -> None:
    mount = {"destination": "/data", "type": "ext4", "source": "/dev/vg/lv", "options": options}

    plan = planned(config(), spec(mounts=[mount]), {"/dev/vg/lv": BLOCK})

    (use,) = plan.disks
    assert use.disk.read_only is ("ro" in options)
    assert use.storage is not None
    assert use.storage.options == tuple(word for word in options if word not in ("loop", "rw"))
    assert plan.mounts[0].type == "bind"


SERVED = SourceFacts(kind=SourceKind.BLOCK, vhost_user_socket="/store/block/sockets/one")


@pytest.mark.parametrize(
    "members",
    [
        {"mounts": [bind("/dev/data", "/nodes/one")]},
        {"mounts": [{"destination": "/data", "type": "ext4", "source": "/nodes/one", "options": ["ro"]}]},
        {"linux": {"devices": [{"path": "/dev/data", "type": "b", "major": 241, "minor": 0}]}},
    ],
    ids=["node", "file-system", "device"],
)
def test_a_disk_that_a_program_serves_is_plugged_once_by_its_socket(members: dict[str, Any]) -> None:
    sources = {"/nodes/one": SERVED, "/dev/block/241:0": SERVED}

    (use,) = root_plan(config(), spec(**members), (), sources).disks

    assert (use.disk.path, use.disk.id) == ("/store/block/sockets/one", disk_id("/store/block/sockets/one"))
    assert use.disk.vhost_user is not None


def test_a_file_system_on_a_directory_is_refused() -> None:
    mount = {"destination": "/data", "type": "xfs", "source": "/srv", "options": []}

    with pytest.raises(InvalidArgument, match=r"'/srv' \(xfs\) on '/data'"):
        planned(config(), spec(mounts=[mount]), {})


def direct(**changes: Any) -> SourceFacts:
    fields: dict[str, Any] = {
        "volume_path": "/v",
        "record_dir": "/records/L3Y=",
        "volume_type": "block",
        "device": "/dev/vg/lv",
        "fs_type": "ext4",
        "options": ("noatime", "discard"),
        "metadata": {},
        **changes,
    }
    return SourceFacts(kind=SourceKind.DIRECTORY, direct=DirectVolume(**fields))


def test_a_direct_volume_is_a_disk_with_its_file_system() -> None:
    metadata = {"fsGroup": "77", "fsGroupChangePolicy": "OnRootMismatch", "createFilesystem": "true"}

    plan = planned(config(), spec(mounts=[bind("/data", "/v", "ro")]), {"/v": direct(metadata=metadata)})

    (use,) = plan.disks
    assert (use.disk.path, use.disk.discard, use.disk.read_only) == ("/dev/vg/lv", True, False)
    assert use.storage is not None
    assert use.storage.fs_group == FsGroup(group_id=77, only_on_root_mismatch=True)
    assert use.storage.driver_options == ("create_filesystem",)
    assert use.direct.record_dir == "/records/L3Y="
    assert (
        use.storage.mount_point
        == direct_volume_point(use.direct)
        != direct_volume_point(replace(use.direct, volume_path="/w"))
    )
    assert plan.mounts[0].options == ("rbind", "ro")
    assert plan.binds == ()


def test_the_service_of_a_remote_vm_gets_the_mount_of_a_direct_volume_as_it_is() -> None:
    remote = replace(config(), hypervisor_name="remote")

    plan = planned(remote, spec(mounts=[bind("/data", "/v", "ro")]), {"/v": direct(metadata={"fsGroup": "1"})})

    assert (plan.disks, plan.binds, plan.copies, plan.storages) == ((), (), (), ())
    (mount,) = [mount for mount in plan.mounts if mount.destination == "/data"]
    assert (mount.source, mount.type) == ("/v", "bind")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"volume_type": "spdkvol"}, Unimplemented, "volume-type 'spdkvol'"),
        ({"device": "vg/lv"}, InvalidArgument, "no absolute device"),
        ({"fs_type": ""}, InvalidArgument, "no fstype"),
        ({"metadata": {"fsGroup": "-1"}}, InvalidArgument, "fsGroup '-1'"),
        ({"metadata": {"fsGroup": "1", "fsGroupChangePolicy": "Never"}}, InvalidArgument, "'Never'"),
    ],
    ids=["type", "relative", "no-fs", "group", "policy"],
)
def test_a_direct_volume_that_cannot_be_meant_is_refused_by_name(
    changes: dict[str, Any], error: type[ShimError], message: str
) -> None:
    with pytest.raises(error, match=f"mount direct volume '/v' on '/data'.*{message}"):
        planned(config(), spec(mounts=[bind("/data", "/v")]), {"/v": direct(**changes)})


def test_a_device_the_host_does_not_have_is_named() -> None:
    given = spec(linux={"devices": [{"path": "/dev/xvda", "type": "b", "major": 7, "minor": 99}]})

    with pytest.raises(FailedPrecondition, match=r"add device '/dev/xvda': the host has no block device 7:99"):
        root_plan(config(), given, (), {"/dev/block/7:99": SourceFacts(kind=SourceKind.MISSING)})


def root_plan(
    config: Config, spec: OciSpec, rootfs: tuple[RootfsMount, ...], sources: Mapping[str, SourceFacts] | None = None
) -> Any:
    return container_plan(
        container_id=ContainerId("c1"),
        bundle=HostPath("/b"),
        rootfs=rootfs,
        spec=spec,
        config=config,
        share=SHARE,
        sources=sources or {},
        hostname="h",
        sysctls={},
        terminal=False,
        stdin=True,
    )


def snapshot(**changes: Any) -> RootfsMount:
    return RootfsMount(**{"type": "ext4", "source": "/dev/mapper/snap-1", "target": "", "options": ("ro",), **changes})


def test_a_root_on_a_block_device_is_plugged_and_never_mounted_on_the_host() -> None:
    plan = root_plan(config(disable_block_device_use=False), spec(), (snapshot(),))

    assert plan.rootfs_mounts == plan.share_mounts == ()
    (use,) = plan.disks
    assert (use.disk.path, use.disk.read_only) == ("/dev/mapper/snap-1", True)
    assert plan.guest.spec["root"]["path"] == use.storage.mount_point == "/run/kata-containers/c1/rootfs"


@pytest.mark.parametrize(
    ("rootfs", "allowed"),
    [
        ((snapshot(),), False),
        ((snapshot(type="overlay", source="overlay"),), True),
        ((snapshot(), snapshot(target="etc")), True),
        ((snapshot(target="x"),), True),
    ],
    ids=["disabled", "overlay", "two", "target"],
)
def test_any_other_root_is_mounted_on_the_host(rootfs: tuple[RootfsMount, ...], allowed: bool) -> None:
    plan = root_plan(config(disable_block_device_use=not allowed), spec(), rootfs)

    assert plan.disks == ()
    assert len(plan.rootfs_mounts) == len(rootfs)


def raw_image(**changes: Any) -> RootfsMount:
    """As nydus' snapshotter gives an image that is one EROFS file."""
    volume = {"volume_type": "image_raw_block", "source": "/i.disk", "fs_type": "erofs", "options": ["ro"], **changes}
    option = "io.katacontainers.volume=" + base64.b64encode(json.dumps(volume).encode()).decode()
    return RootfsMount(
        type="fuse.nydus-overlayfs", source="overlay", target="", options=("upperdir=/u", "workdir=/w", option)
    )


def test_an_image_in_one_file_is_a_disk_below_an_overlay() -> None:
    plan = root_plan(config(), spec(), (raw_image(),))

    (use,) = plan.disks
    assert (use.disk.path, use.disk.read_only, use.storage.fs_type) == ("/i.disk", True, "erofs")
    (overlay,) = plan.guest.storages
    assert overlay.options[:2] == (f"lowerdir={use.storage.mount_point}", "upperdir=/run/kata-containers/c1/upper")
    assert plan.guest.spec["root"]["path"] == overlay.mount_point
    assert plan.rootfs_mounts == plan.share_mounts == ()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"source": "i.disk"}, InvalidArgument, "names no EROFS file"),
        ({"fs_type": "ext4"}, InvalidArgument, "names no EROFS file"),
        ({"dm_verity": {"hash": "ab"}}, Unimplemented, "dm_verity or options of '/i.disk'"),
        ({"options": ["rw"]}, Unimplemented, "dm_verity or options of '/i.disk'"),
        ({"volume_type": "layer_raw_block"}, Unimplemented, "volume type 'layer_raw_block' is not supported"),
    ],
)
def test_an_image_in_one_file_that_cannot_be_a_disk_is_named(
    changes: dict[str, Any], error: type[ShimError], message: str
) -> None:
    with pytest.raises(error, match=f"create container 'c1': .*{message}"):
        root_plan(config(), spec(), (raw_image(**changes),))


def test_plugged_disks_are_mounted_before_everything_else() -> None:
    source = f"{EMPTY_DIRS}/cache"
    given = spec(
        mounts=[bind("/cache", source), bind("/data", "/v")],
        linux={"devices": [{"path": "/dev/xvda", "type": "b", "major": 7, "minor": 1}]},
    )
    sources = {source: memory_dir(source), "/v": direct(), "/dev/block/7:1": BLOCK}
    plan = root_plan(config(disable_block_device_use=False), given, (snapshot(),), sources)
    places = [GuestLocation(pci_path=f"02/0{number}") for number in range(1, 4)]

    guest: GuestContainer = with_disks(plan.guest, list(zip(plan.disks, places, strict=True)))

    assert [(storage.driver, storage.source) for storage in guest.storages] == [
        ("blk", "02/01"),
        ("blk", "02/02"),
        ("ephemeral", "tmpfs"),
    ]
    assert [(device.id, device.container_path) for device in guest.devices] == [("02/03", "/dev/xvda")]


@pytest.mark.parametrize(
    ("enabled", "extra", "words"),
    [
        (True, [], ("--xattr",)),
        (True, ["--thread-pool-size=1"], ("--thread-pool-size=1", "--xattr")),
        (True, ["-o", "no_xattr"], ("-o", "no_xattr")),
        (False, ["--thread-pool-size=1"], ("--thread-pool-size=1",)),
    ],
)
def test_extended_attributes_are_shared_unless_an_argument_or_the_key_decides(
    enabled: bool, extra: list[str], words: tuple[str, ...]
) -> None:
    keys = {"virtio_fs_xattr": enabled, "virtio_fs_extra_args": extra}

    plan = share_plan(SandboxId("s1"), configured(keys), vm_dir="/vm").virtiofsd

    assert plan is not None
    assert plan.extra_args == words


@pytest.mark.parametrize(
    ("texts", "problem"),
    [(("srv",), "'srv' is not an absolute path"), (("/",), "'/' is not"), (("/a/x", "/b/x:rw"), "called 'x'")],
)
def test_sandbox_bind_mounts_that_cannot_be_are_named(texts: tuple[str, ...], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=f"sandbox_bind_mounts: .*{problem}"):
        share(*texts)


def test_sandbox_bind_mounts_are_read_only_unless_said_otherwise() -> None:
    mounts = share("/srv/a", "/srv/b:ro", "/srv/c:rw", "/srv/d:e").bind_mounts

    assert [(mount.source, "ro" in mount.options) for mount in mounts] == [
        ("/srv/a", True),
        ("/srv/b", True),
        ("/srv/c", False),
        ("/srv/d:e", True),
    ]
    assert {mount.target.rpartition("/")[0] for mount in mounts} == {f"{SHARE.mounts_dir}/sandbox-mounts"}


WATCHABLE = "/run/kata-containers/shared/sandboxes/c1/mounts/watchable"


async def test_the_directory_of_watched_volumes_is_in_the_share_before_the_guest_is_set_up(stack: Stack) -> None:
    """The guest has the share read-only, and kata-agent mounts over this directory."""
    made: list[bool] = []
    stack.on_connected = lambda: made.append(WATCHABLE in stack.host.directories)

    await stack.create("c1", ["sleep"])

    assert made == [True]


FORCED = {"experimental_force_guest_pull": True}
NAMED = {"io.kubernetes.cri.image-name": "docker.io/library/busybox:1"}
CID = ContainerId("c1")


def overlay(*options: str) -> tuple[RootfsMount, ...]:
    return (RootfsMount(type="overlay", source="overlay", target="", options=("lowerdir=/a:/b", *options)),)


def volume(**members: Any) -> str:
    return "io.katacontainers.volume=" + base64.b64encode(json.dumps(members).encode()).decode()


def pulled(config: Config, spec: OciSpec, rootfs: tuple[RootfsMount, ...] = ()) -> Storage | None:
    return root_pulled_in_guest(virtual_volume(rootfs or overlay(), CID), spec, config, CID)


def test_a_forced_pull_goes_by_the_pods_own_name_for_the_image() -> None:
    storage = pulled(configured(runtime=FORCED), spec(annotations=NAMED))

    assert storage is not None
    assert (storage.driver, storage.fs_type) == ("image_guest_pull", "overlay")
    assert storage.source == "docker.io/library/busybox:1"
    assert storage.mount_point == "/run/kata-containers/c1/rootfs"
    assert storage.driver_options == ('image_guest_pull={"metadata":' + json.dumps(NAMED, separators=(",", ":")) + "}",)


def test_a_snapshotter_may_ask_for_it() -> None:
    option = volume(volume_type="image_guest_pull", source="quay.io/a:b", image_pull={"metadata": {"k": "v"}})

    storage = pulled(configured(), spec(), overlay(option))

    assert storage is not None
    assert (storage.source, storage.driver_options) == ("quay.io/a:b", ('image_guest_pull={"metadata":{"k":"v"}}',))


def test_a_pods_sandbox_has_the_guests_own_image() -> None:
    annotations = {"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "c1"}

    storage = pulled(configured(runtime=FORCED), spec(annotations=annotations))

    assert storage is not None
    assert storage.source == "pause"


def test_nothing_is_pulled_unless_it_is_asked_for() -> None:
    assert pulled(configured(), spec(annotations=NAMED)) is None


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ((), FailedPrecondition, "needs the image's name in annotation"),
        (("io.katacontainers.volume=%",), InvalidArgument, "not base64 of JSON"),
        (("io.katacontainers.volume=QUJD",), InvalidArgument, "not base64 of JSON"),
        ((volume(volume_type="image_nydus_fs"),), Unimplemented, "volume type 'image_nydus_fs' is not supported"),
        ((volume(volume_type="image_guest_pull"),), InvalidArgument, "names no image"),
        ((volume(volume_type="image_guest_pull", source="a"),) * 2, InvalidArgument, "2 volumes of its root"),
        ((volume(volume_type="image_guest_pull", source="a", image_pull=[1]),), InvalidArgument, "names no image"),
    ],
)
def test_what_cannot_be_pulled_is_said(options: tuple[str, ...], kind: type[Exception], named: str) -> None:
    with pytest.raises(kind, match=named):
        pulled(configured(runtime=FORCED), spec(), overlay(*options))


def container_of(config: Config, spec: OciSpec, kinds: dict[str, SourceKind]) -> ContainerPlan:
    return container_plan(
        container_id=CID,
        bundle=HostPath("/bundle"),
        rootfs=overlay(),
        spec=spec,
        config=config,
        share=share_plan(SandboxId("s1"), configured({"shared_fs": "none"}), vm_dir="/vm"),
        sources={path: SourceFacts(kind=kind) for path, kind in kinds.items()},
        hostname="h",
        sysctls={},
        terminal=False,
        stdin=True,
    )


CONFIGMAP = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~configmap/v"


def test_without_a_share_volumes_are_copied_and_the_host_mounts_nothing() -> None:
    kinds = {CONFIGMAP: SourceKind.DIRECTORY, "/etc/file": SourceKind.FILE, "/srv": SourceKind.DIRECTORY}
    mounts = [
        bind(at, source, "ro")
        for at, source in (("/config", CONFIGMAP), ("/file", "/etc/file"), ("/again", "/etc/file"), ("/srv", "/srv"))
    ]

    plan = container_of(configured({"shared_fs": "none"}, FORCED), spec(annotations=NAMED, mounts=mounts), kinds)

    assert (plan.rootfs_mounts, plan.share_mounts, plan.share_points, plan.binds) == ((), (), (), ())
    assert [(copy.source, copy.follows) for copy in plan.copies] == [
        (CONFIGMAP, True),
        ("/etc/file", False),
        ("/srv", False),
    ]
    sources = [mount["source"] for mount in plan.guest.spec["mounts"]]
    assert sources == [plan.copies[number].guest_path for number in (0, 1, 1, 2)]
    assert all(source.startswith("/run/kata-containers/shared/containers/copy-") for source in sources)
    assert plan.guest.spec["root"]["path"] == "/run/kata-containers/c1/rootfs"
    assert plan.guest.storages[0].driver == "image_guest_pull"
    assert without_image(plan).copies == ()


@pytest.mark.parametrize(
    ("point", "mounts", "expected"),
    [
        ("/dev/termination-log", [bind("/dev/termination-log", "/pods/u/c/1")], "/pods/u/c/1"),
        ("/m/", [bind("/m", "/pods/u/c/1"), bind("/other", "/etc/file")], "/pods/u/c/1"),
        ("/m", [bind("/m", "/etc/file", "ro"), bind("/m", "/pods/u/c/1")], "/pods/u/c/1"),
        ("/m", [bind("/m", "/pods/u/c/1"), bind("/m", "/etc/file", "ro")], ""),
        ("/m", [bind("/other", "/etc/file")], ""),
        ("", [bind("/", "/etc/file")], ""),
    ],
    ids=["default", "as-a-path", "last-of-two", "never-read-only", "no-mount", "no-path"],
)
def test_the_termination_message_is_the_copied_file_that_the_container_sees(
    point: str, mounts: list[dict[str, Any]], expected: str
) -> None:
    annotations = {**NAMED, "io.kubernetes.container.terminationMessagePath": point}
    kinds = {mount["source"]: SourceKind.FILE for mount in mounts}

    plan = container_of(configured({"shared_fs": "none"}, FORCED), spec(annotations=annotations, mounts=mounts), kinds)

    assert plan.termination_message == expected
    assert without_image(plan).termination_message == ""


def test_a_socket_cannot_be_copied() -> None:
    config = configured({"shared_fs": "none"}, FORCED)

    with pytest.raises(FailedPrecondition, match=r"'/run/x\.sock' on '/s'.*copies directories and files only"):
        container_of(
            config, spec(annotations=NAMED, mounts=[bind("/s", "/run/x.sock", "ro")]), {"/run/x.sock": SourceKind.OTHER}
        )


def test_a_root_that_cannot_reach_the_guest_is_refused_with_the_ways_out() -> None:
    with pytest.raises(FailedPrecondition, match=r"block snapshotter.*experimental_force_guest_pull"):
        container_of(configured({"shared_fs": "none"}), spec(), {})


SOURCE = f"{EMPTY_DIRS}/cache"
FACTS = SourceFacts(
    kind=SourceKind.DIRECTORY,
    size_bytes=1 << 30,
    mode=0o777,
    gid=7,
    empty_dir=EmptyDir(path=SOURCE, sub_path="", in_memory=False),
)


@pytest.mark.parametrize(
    ("mode", "driver_options", "options", "discard"),
    [
        ("block-encrypted", ("encryption_key=ephemeral", "create_filesystem"), (), False),
        ("block-plain", ("create_filesystem",), ("discard",), True),
    ],
)
def test_the_volume_is_a_directory_on_a_disk_that_outlives_containers(
    mode: str, driver_options: tuple[str, ...], options: tuple[str, ...], discard: bool
) -> None:
    config = configured(runtime={**FORCED, "emptydir_mode": mode, "disable_guest_empty_dir": True})

    plan = planned(config, spec(annotations=NAMED, mounts=[bind("/cache", SOURCE)]), {SOURCE: FACTS})

    (use,) = plan.disks
    assert (use.disk.path, use.make_bytes, use.disk.discard) == (f"{SOURCE}/disk.img", 1 << 30, discard)
    assert use.storage is not None
    assert (use.storage.driver_options, use.storage.options) == (driver_options, options)
    assert (use.storage.fs_type, use.storage.shared) == ("ext4", True)
    (directory,) = plan.storages
    assert directory.mount_point == f"{use.storage.mount_point}/volume"
    assert (directory.driver, directory.options) == ("local", ("mode=777", "fsgid=7"))
    assert plan.mounts[0].source == directory.mount_point
    assert plan.binds == ()


def test_all_containers_of_the_pod_have_the_same_disk() -> None:
    config = configured(runtime={"emptydir_mode": "block-plain"})
    first, second = (planned(config, spec(mounts=[bind(at, SOURCE)]), {SOURCE: FACTS}) for at in ("/a", "/b"))

    assert first.disks == second.disks
    assert first.mounts[0].source == second.mounts[0].source


def test_an_empty_dir_in_memory_stays_one() -> None:
    config = configured(runtime={"emptydir_mode": "block-encrypted"})

    plan = planned(config, spec(mounts=[bind("/cache", SOURCE)]), {SOURCE: memory_dir(SOURCE)})

    assert plan.disks == ()
    assert plan.storages[0].driver == "ephemeral"


def test_the_disk_is_mounted_before_the_directory_on_it_is_made() -> None:

    config = configured({"shared_fs": "none"}, {**FORCED, "emptydir_mode": "block-encrypted"})
    # The facts of those plans say nothing of emptyDirs: a disk of its own is put before its storages.
    plan = container_of(config, spec(annotations=NAMED), {})
    (use,) = planned(config, spec(mounts=[bind("/cache", SOURCE)]), {SOURCE: FACTS}).disks

    guest = with_disks(plan.guest, [(use, GuestLocation(pci_path="02/01"))])

    assert [storage.driver for storage in guest.storages] == ["blk", "image_guest_pull"]
    assert guest.storages[0].source == "02/01"


@pytest.mark.parametrize("mode", ["block-encrypted", "block-plain"])
def test_the_directory_of_the_disks_file_is_not_shared_as_a_sub_path(mode: str) -> None:
    """With subPath "." a guest could put a link to another file of the host in the place of `disk.img`."""
    part = "/var/lib/kubelet/pods/u1/volume-subpaths/cache/app/0"
    facts = SourceFacts(
        kind=SourceKind.DIRECTORY, mode=0o777, empty_dir=EmptyDir(path=SOURCE, sub_path=".", in_memory=False)
    )
    config = configured(runtime={"emptydir_mode": mode})

    with pytest.raises(Unimplemented, match=f"mount volume '{part}' on '/part': a subPath of an emptyDir .*'{mode}'"):
        planned(config, spec(mounts=[bind("/part", part)]), {part: facts})

    plan = planned(configured(), spec(mounts=[bind("/part", part)]), {part: facts})
    assert [bind.mount.source for bind in plan.binds] == [part]
