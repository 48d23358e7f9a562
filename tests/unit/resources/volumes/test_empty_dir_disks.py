"""emptyDir volumes that are disks."""

import pytest

from pyshim.model.errors import Unimplemented
from pyshim.model.mounts import SourceKind
from pyshim.model.vm import GuestLocation
from pyshim.model.volumes import EmptyDir, SourceFacts
from pyshim.resources.volumes.plan.disks import with_disks
from tests.fakes.inputs import configured, spec
from tests.unit.resources.volumes.test_plan import EMPTY_DIRS, bind, planned

from .test_guest_pull import FORCED, NAMED

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
    assert plan.host_mounts == ()


def test_all_containers_of_the_pod_have_the_same_disk() -> None:
    config = configured(runtime={"emptydir_mode": "block-plain"})
    first, second = (planned(config, spec(mounts=[bind(at, SOURCE)]), {SOURCE: FACTS}) for at in ("/a", "/b"))

    assert first.disks == second.disks
    assert first.mounts[0].source == second.mounts[0].source


def test_an_empty_dir_in_memory_stays_one() -> None:
    in_memory = SourceFacts(
        kind=SourceKind.DIRECTORY,
        fs_type="tmpfs",
        mode=0o777,
        empty_dir=EmptyDir(path=SOURCE, sub_path="", in_memory=True),
    )
    config = configured(runtime={"emptydir_mode": "block-encrypted"})

    plan = planned(config, spec(mounts=[bind("/cache", SOURCE)]), {SOURCE: in_memory})

    assert plan.disks == ()
    assert plan.storages[0].driver == "ephemeral"


def test_the_disk_is_mounted_before_the_directory_on_it_is_made() -> None:
    from .test_guest_pull import planned as container

    config = configured({"shared_fs": "none"}, {**FORCED, "emptydir_mode": "block-encrypted"})
    # The facts of test_guest_pull's plans say nothing of emptyDirs: a disk of its own is put before its storages.
    plan = container(config, spec(annotations=NAMED), {})
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
    assert [mount.source for mount in plan.host_mounts] == [part]
