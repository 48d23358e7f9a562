"""The facts of a spec's sources: kinds, file systems, emptyDirs, direct volumes' records."""

import base64
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.host.mounts.table import mount_root
from pyshim.model.errors import InvalidArgument
from pyshim.model.volumes import EmptyDir, SourceKind
from pyshim.resources.volumes.host.sources import direct_volume, record_directory, source_facts


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A kubelet's emptyDir in memory, of 3 MiB."""
    path = tmp_path / "pods/u1/volumes/kubernetes.io~empty-dir/cache"
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m,mode=0777,gid=77", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.root
def test_an_empty_dir_in_memory_is_known_by_path_and_file_system(tmpfs: Path) -> None:
    facts = source_facts(str(tmpfs))

    assert facts.kind is SourceKind.DIRECTORY
    assert (facts.fs_type, facts.size_bytes, facts.mode, facts.gid) == ("tmpfs", 3 << 20, 0o777, 77)
    assert facts.empty_dir == EmptyDir(path=str(tmpfs), sub_path="", in_memory=True)


@pytest.mark.root
def test_a_sub_path_of_it_is_known_by_what_is_mounted_there(tmpfs: Path, tmp_path: Path) -> None:
    (tmpfs / "a" / "b c").mkdir(parents=True)
    part = tmp_path / "pods/u1/volume-subpaths/cache/app/0"
    part.mkdir(parents=True)
    subprocess.run(["mount", "--bind", tmpfs / "a" / "b c", part], check=True)
    try:
        assert mount_root(str(part)) == "/a/b c"
        assert source_facts(str(part)).empty_dir == EmptyDir(path=str(tmpfs), sub_path="a/b c", in_memory=True)
    finally:
        subprocess.run(["umount", part], check=True)


@pytest.mark.root
@pytest.mark.parametrize("sub_path", [".", "a"])
def test_a_sub_path_of_one_on_disk_is_distinguished_from_other_directories(tmp_path: Path, sub_path: str) -> None:
    volume = tmp_path / "pods/u1/volumes/kubernetes.io~empty-dir/cache"
    part = tmp_path / "pods/u1/volume-subpaths/cache/app/0"
    for path in (volume / "a", part):
        path.mkdir(parents=True)
    subprocess.run(["mount", "--bind", volume / sub_path, part], check=True)
    try:
        found = source_facts(str(part)).empty_dir
        assert found is not None
        assert (found.path, found.in_memory) == (str(volume), False)
        assert found.sub_path
    finally:
        subprocess.run(["umount", part], check=True)


@pytest.mark.parametrize("root", ["disk", "/dev/shm"])
def test_a_directory_named_like_an_empty_dir_is_one_on_disk_wherever_it_lies(tmp_path: Path, root: str) -> None:
    """A node may have all of its /var in memory: only a tmpfs of its own makes the volume one in memory."""
    with tempfile.TemporaryDirectory(dir=root if root.startswith("/") else tmp_path) as top:
        check_directory(Path(top))


def check_directory(tmp_path: Path) -> None:
    path = tmp_path / "kubernetes.io~empty-dir" / "data"
    path.mkdir(parents=True)

    assert source_facts(str(path)).empty_dir == EmptyDir(path=str(path), sub_path="", in_memory=False)
    assert source_facts(str(path.parent)).empty_dir is None
    assert source_facts(str(tmp_path)).empty_dir is None


@pytest.mark.parametrize("path", ["/dev/block/0:0", "/dev/block/4095:1048575", "/no/such"])
def test_what_is_not_there_is_missing(path: str) -> None:
    assert source_facts(path).kind is SourceKind.MISSING


def test_a_block_device_is_found_by_number() -> None:
    devices = sorted(os.listdir("/sys/dev/block"))
    present = [number for number in devices if source_facts(f"/dev/block/{number}").kind is SourceKind.BLOCK]

    if not present:
        pytest.skip("/dev/block names no block device here")
    for number in present:
        found = os.stat(source_facts(f"/dev/block/{number}").device_path)
        assert f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}" == number


def record(root: Path, volume: str, content: bytes | None) -> None:
    """Without `content`, a directory in the record's place."""
    file = root / base64.urlsafe_b64encode(volume.encode()).decode() / "mountInfo.json"
    file.parent.mkdir(parents=True)
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)


def test_a_direct_volume_is_known_by_its_record(tmp_path: Path) -> None:
    info = {
        "volume-type": "block",
        "device": "/dev/vg/lv",
        "fstype": "ext4",
        "metadata": {"fsGroup": "7"},
        "options": ["noatime"],
    }
    record(tmp_path, "/var/lib/kubelet/x?>", json.dumps(info).encode())

    volume = source_facts("/var/lib/kubelet/x?>", direct_volumes=str(tmp_path)).direct

    assert volume is not None
    assert (volume.volume_type, volume.device, volume.fs_type) == ("block", "/dev/vg/lv", "ext4")
    assert (volume.options, dict(volume.metadata)) == (("noatime",), {"fsGroup": "7"})
    assert volume.record_dir == record_directory("/var/lib/kubelet/x?>", root=str(tmp_path))
    assert source_facts("/var/lib/kubelet/y", direct_volumes=str(tmp_path)).direct is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "not JSON"),
        (b"[" * 30000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"device": 7}', "device is not a string"),
        (b'{"device": "a\\u0000b"}', "device is not text that the kernel accepts"),
        (b'{"options": "ro"}', "options is not a list"),
        (b'{"metadata": {"fsGroup": 7}}', "metadata is not an object of strings"),
        (b" " * 70_000, "larger than"),
        (None, "Is a directory"),
    ],
)
def test_a_broken_record_is_named(tmp_path: Path, content: bytes | None, problem: str) -> None:
    record(tmp_path, "/v", content)

    with pytest.raises(InvalidArgument, match=f"mountInfo.json': {problem}"):
        source_facts("/v", direct_volumes=str(tmp_path))


def test_a_path_too_long_for_a_record_has_none(tmp_path: Path) -> None:
    assert direct_volume("/" + "x" * 300, root=str(tmp_path)) is None
