"""Root file systems of EROFS layers, as containerd's snapshotter leaves them to the shim."""

import struct

import pytest

from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError, Unimplemented
from pyshim.model.ids import ContainerId
from pyshim.model.task import RootfsMount
from pyshim.resources.volumes.plan.disks import digest
from pyshim.resources.volumes.plan.layers import LayerVerity, check_layer, layer_verity, verity_options
from pyshim.resources.volumes.plan.root_disks import GuestRoot, root_disks
from tests.fakes.inputs import config, configured

S = "/var/lib/containerd/io.containerd.snapshotter.v1.erofs/snapshots"
RWLAYER = RootfsMount(type="ext4", source=f"{S}/9/rwlayer.img", target="", options=("rw", "loop"))
HOST_UPPER = (f"workdir={S}/9/work", f"upperdir={S}/9/fs")
MAKE = "io.katacontainers.volume.overlayfs.create_directory="
DISK_UPPER = (
    "X-containerd.mkdir.path={{ mount 0 }}/upper:0755",
    "X-containerd.mkdir.path={{ mount 0 }}/work:0755",
    "workdir={{ mount 0 }}/work",
    "upperdir={{ mount 0 }}/upper",
)


def layer(number: int, *options: str) -> RootfsMount:
    return RootfsMount(type="erofs", source=f"{S}/{number}/layer.erofs", target="", options=("ro", "loop", *options))


def overlay(*options: str, type_: str = "format/mkdir/overlay") -> RootfsMount:
    return RootfsMount(type=type_, source="overlay", target="", options=options)


def point(mount: RootfsMount) -> str:
    return f"/run/layers/{digest(mount.source)}"


def planned(*rootfs: RootfsMount, name: str = "c1", mode: str = "shared-fs", **hypervisor: object) -> GuestRoot:
    found = root_disks(rootfs, configured(hypervisor, {"emptydir_mode": mode}), ContainerId(name))
    assert found is not None
    return found


def test_layers_are_read_only_disks_below_an_overlay_that_writes_to_the_guests_memory() -> None:
    layers = [layer(number) for number in (3, 2, 1)]

    root = planned(*layers, overlay(*HOST_UPPER, "lowerdir={{ overlay 0 2 }}", "index=off"))

    assert [(use.disk.path, use.disk.read_only) for use in root.disks] == [(each.source, True) for each in layers]
    storages = [use.storage for use in root.disks if use.storage]
    assert [(each.fs_type, each.options, each.mount_point) for each in storages] == [
        ("erofs", ("ro",), point(each)) for each in layers
    ]
    (merged,) = root.storages
    assert (merged.driver, merged.source, merged.fs_type) == ("overlayfs", "overlay", "overlay")
    lower = ":".join(point(each) for each in layers)
    upper, work = "/run/kata-containers/c1/upper", "/run/kata-containers/c1/work"
    assert merged.options == (f"lowerdir={lower}", "index=off", f"upperdir={upper}", f"workdir={work}")
    assert merged.driver_options == (f"{MAKE}{upper}", f"{MAKE}{work}")
    assert merged.mount_point == root.mount_point == "/run/kata-containers/c1/rootfs"


def test_a_file_for_writes_is_the_disk_that_the_overlay_writes_to() -> None:
    root = planned(RWLAYER, layer(1), overlay(*DISK_UPPER, "lowerdir={{ mount 1 }}"))

    upper, lower = root.disks
    assert (upper.disk.path, upper.disk.read_only, lower.disk.read_only) == (RWLAYER.source, False, True)
    assert upper.storage is not None
    assert (upper.storage.fs_type, upper.storage.options, upper.storage.driver_options) == ("ext4", (), ())
    at = point(RWLAYER)
    assert root.storages[0].driver_options == (f"{MAKE}{at}/upper", f"{MAKE}{at}/work")
    assert root.storages[0].options == (f"workdir={at}/work", f"upperdir={at}/upper", f"lowerdir={point(layer(1))}")


def test_a_file_for_writes_is_made_new_with_a_key_of_the_guests_where_empty_dirs_are() -> None:
    root = planned(RWLAYER, layer(1), overlay(*DISK_UPPER, "lowerdir={{ mount 1 }}"), mode="block-encrypted")

    options = [use.storage.driver_options for use in root.disks if use.storage]
    assert options == [("encryption_key=ephemeral", "create_filesystem"), ()]


def test_a_view_of_several_layers_is_an_overlay_that_takes_no_writes() -> None:
    root = planned(layer(2), layer(1), overlay("lowerdir={{ overlay 0 1 }}"))

    assert root.storages[0].options == (f"lowerdir={point(layer(2))}:{point(layer(1))}",)


@pytest.mark.parametrize("disabled", [False, True])
def test_a_view_of_one_layer_is_a_disk_whatever_the_key_says(disabled: bool) -> None:
    root = planned(layer(1), disable_block_device_use=disabled)

    (use,) = root.disks
    assert use.storage is not None
    assert (use.disk.read_only, use.storage.fs_type, use.storage.options) == (True, "erofs", ("ro",))
    assert root.mount_point == use.storage.mount_point
    assert root.storages == ()


def test_equal_layers_of_two_containers_are_one_disk_and_one_mount() -> None:
    one, other = (
        planned(layer(number), layer(1), overlay(*HOST_UPPER, "lowerdir={{ overlay 0 1 }}"), name=name)
        for number, name in ((2, "one"), (3, "other"))
    )

    assert one.disks[1] == other.disks[1]
    assert one.disks[0].disk.id != other.disks[0].disk.id
    assert one.mount_point != other.mount_point


@pytest.mark.parametrize(("count", "fits"), [(40, True), (127, True), (200, False)])
def test_as_many_layers_are_possible_as_fit_the_options_of_one_mount(count: int, fits: bool) -> None:
    layers = [layer(number) for number in range(count)]
    rootfs = (*layers, overlay(*HOST_UPPER, f"lowerdir={{{{ overlay 0 {count - 1} }}}}"))

    if fits:
        assert len(planned(*rootfs, name="c" * 64).disks) == count
    else:
        with pytest.raises(InvalidArgument, match=f"of 'c1': the overlay of {count} layers needs .* at most 4095"):
            planned(*rootfs)


ONE = "lowerdir={{ mount 0 }}"


@pytest.mark.parametrize(
    ("rootfs", "kind", "named"),
    [
        ((layer(1), layer(2)), InvalidArgument, "erofs, erofs make no overlay"),
        ((overlay(ONE), layer(1)), InvalidArgument, "format/mkdir/overlay, erofs make no overlay"),
        ((overlay(ONE),), InvalidArgument, "make no overlay of layers"),
        ((RWLAYER, overlay(*DISK_UPPER)), InvalidArgument, "ext4, format/mkdir/overlay make no overlay"),
        ((layer(1), overlay(*HOST_UPPER)), InvalidArgument, "each of 1 layers once"),
        ((layer(2), layer(1), overlay(ONE)), InvalidArgument, "each of 2 layers once, the top one first"),
        ((layer(1), layer(1), overlay("lowerdir={{ overlay 0 1 }}")), InvalidArgument, "each of 2 layers once"),
        ((layer(1), overlay("lowerdir={{ mount 1 }}")), InvalidArgument, r"'lowerdir=\{\{ mount 1 \}\}' names a mount"),
        ((layer(1), overlay("lowerdir={{ overlay 1 0 }}")), InvalidArgument, "names a mount that is not in the list"),
        ((layer(1), overlay("lowerdir={{ mounts }}")), Unimplemented, r"\{\{ mounts \}\}' is not understood"),
        ((RWLAYER, layer(1), overlay(*HOST_UPPER, "lowerdir={{ mount 1 }}")), InvalidArgument, "one file for writes"),
        ((RWLAYER, layer(1), overlay("lowerdir={{ mount 1 }}")), InvalidArgument, "one file for writes"),
        ((layer(1), overlay("upperdir={{ mount 0 }}/upper", ONE)), InvalidArgument, "one file for writes"),
        (
            (RootfsMount(type="mkfs/ext4", source="/s/rw.img", target="", options=()), layer(1), overlay(ONE)),
            Unimplemented,
            "type 'mkfs/ext4' of '/s/rw.img'",
        ),
        (
            (RWLAYER, RootfsMount(type="format/mkdir/bind", source="{{ mount 0 }}/upper", target="", options=("rw",))),
            Unimplemented,
            "type 'format/mkdir/bind'",
        ),
        ((RootfsMount(type="xfs", source="/x", target="", options=()), layer(1), overlay(ONE)), Unimplemented, "'/x'"),
        ((layer(1, "X-containerd.dmverity=/v"), overlay(ONE)), Unimplemented, "option 'X-containerd.dmverity' of "),
        ((layer(1, "X-containerd.dmverity=/v"),), Unimplemented, f"option 'X-containerd.dmverity' of '{S}/1/layer"),
        ((layer(1, "device=/blob"), overlay(ONE)), Unimplemented, "option 'device' of "),
        ((layer(1), overlay(ONE, "uidmap=0:1:2")), Unimplemented, "option 'uidmap' of 'overlay'"),
    ],
)
def test_a_list_that_makes_no_root_is_refused_by_name(
    rootfs: tuple[RootfsMount, ...], kind: type[ShimError], named: str
) -> None:
    with pytest.raises(kind, match=f"mount root file system of 'c1': .*{named}"):
        planned(*rootfs)


@pytest.mark.parametrize(
    "rootfs",
    [
        (),
        (overlay("lowerdir=/a:/b", type_="overlay"),),
        (RootfsMount(type="bind", source="/a", target="", options=("rbind",)), overlay("lowerdir=/a", type_="overlay")),
        (RootfsMount(type="erofs", source="/dev/mapper/a", target="", options=("ro",)),),
    ],
    ids=["none", "overlay", "two", "device"],
)
def test_any_other_root_is_left_to_the_host(rootfs: tuple[RootfsMount, ...]) -> None:
    assert root_disks(rootfs, config(), ContainerId("c1")) is None


def superblock(blocks: int, magic: int = 0xE0F5E1E2) -> bytes:
    return struct.pack("<I8xB23xI", magic, 12, blocks).ljust(128, b"\0")


@pytest.mark.parametrize(
    ("head", "size_bytes", "problem"),
    [
        (superblock(2), 8191, "truncated, 8191 of 8192 bytes"),
        (superblock(2, magic=1), 8192, "not an EROFS file system"),
        (superblock(2)[:100], 1124, "not an EROFS file system"),
        (b"", 0, "not an EROFS file system"),
        (superblock(2), 8192, ""),
        (superblock(2), 9000, ""),
    ],
    ids=["end", "magic", "head", "empty", "whole", "more"],
)
def test_a_layer_that_lacks_a_part_is_named(head: bytes, size_bytes: int, problem: str) -> None:
    if not problem:
        check_layer("/l.erofs", head, size_bytes)
        return
    with pytest.raises(FailedPrecondition, match=f"plug layer '/l.erofs': {problem}"):
        check_layer("/l.erofs", head, size_bytes)


def verity_superblock(salt: bytes = b"\1\2") -> bytes:
    head = struct.pack("<8sII16s32sIIQH6x", b"verity\0\0", 1, 1, bytes(16), b"sha256", 4096, 4096, 3, len(salt))
    return head + salt.ljust(256, b"\0") + bytes(512 - len(head) - 256)


def test_a_layer_is_verified_by_what_stands_beside_it_and_behind_its_data() -> None:
    verity = layer_verity("/l.dmverity", b'{"roothash": "ab12", "hashoffset": 12288, "more": 1}')

    assert verity_options("/l", verity, verity_superblock()) == (
        "X-kata.dmverity-enabled=true",
        "X-kata.dmverity.roothash=ab12",
        "X-kata.dmverity.hashoffset=12288",
        "X-kata.dmverity.no-superblock=false",
        "X-kata.dmverity.salt=0102",
        "X-kata.dmverity.blocksize=4096",
        "X-kata.dmverity.hashsize=4096",
        "X-kata.dmverity.algorithm=sha256",
        "X-kata.dmverity.hashtype=1",
    )


@pytest.mark.parametrize("hashes", [b"", verity_superblock()[:400], bytes(512)])
def test_a_layer_without_its_hashes_is_named(hashes: bytes) -> None:
    verity = LayerVerity(root_hash="ab", hash_offset_bytes=4096)

    with pytest.raises(FailedPrecondition, match="plug layer '/l': no dm-verity hashes at byte 4096"):
        verity_options("/l", verity, hashes)


@pytest.mark.parametrize(
    "document",
    [
        *(b"", b"[]", b"\xff", b'{"roothash": 1, "hashoffset": 1}', b'{"roothash": "ab"}'),
        *(b'{"roothash": "ab,ro", "hashoffset": 1}', b'{"roothash": "ab", "hashoffset": -1}'),
    ],
)
def test_a_file_without_a_root_hash_is_named(document: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"read root hash '/l\.dmverity': "):
        layer_verity("/l.dmverity", document)
