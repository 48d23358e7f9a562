"""Every kind of volume a pod can ask for, in one pod: what is written on one side is read on the other."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.cri import v1_pb2 as pb

from .conftest import RunTask
from .framework import loop_devices
from .framework.cri import Pod, refusal
from .framework.kubelet_volumes import PodDirectory, volume
from .framework.waiting import eventually

pytestmark = pytest.mark.vm


# ---- made in the guest


def test_an_empty_dir_in_memory_is_the_guests_and_as_large_as_asked_for(pod: Pod, kubelet: PodDirectory) -> None:
    directory = kubelet.empty_dir("cache", memory="3m", gid=1234)
    first = pod.start(mounts=[volume(directory, "/cache")])
    second = pod.start(mounts=[volume(directory, "/also")])

    first.sh("echo hello > /cache/note")

    assert second.sh("cat /also/note; stat -c '%g %a' /also") == "hello\n1234 2777\n"
    assert "size=3072k" in first.sh("grep ' /cache ' /proc/mounts")
    assert first.exec("sh", "-c", "head -c 4000000 /dev/zero > /cache/much").code != 0
    assert int(first.sh("stat -c %s /cache/much")) < 3 << 20
    assert list(directory.iterdir()) == []


def test_an_empty_dir_in_memory_outlives_its_containers(pod: Pod, kubelet: PodDirectory) -> None:
    directory = kubelet.empty_dir("cache", memory="1m")
    first = pod.start(mounts=[volume(directory, "/cache")])
    first.sh("echo kept > /cache/note")
    first.stop(0)
    first.remove()

    assert pod.start(mounts=[volume(directory, "/cache")]).sh("cat /cache/note") == "kept\n"


def test_a_sub_path_of_an_empty_dir_in_memory_is_a_directory_of_the_guests(pod: Pod, kubelet: PodDirectory) -> None:
    directory = kubelet.empty_dir("cache", memory="1m")
    (directory / "a" / "b").mkdir(parents=True)
    part = kubelet.sub_path("cache", directory / "a" / "b")
    whole = pod.start(mounts=[volume(directory, "/whole")])
    inner = pod.start(mounts=[volume(part, "/part")])

    inner.sh("echo inside > /part/note")

    assert whole.sh("cat /whole/a/b/note") == "inside\n"


def test_an_empty_dir_in_memory_may_be_a_containers_dev_shm(pod: Pod, kubelet: PodDirectory) -> None:
    directory = kubelet.empty_dir("shm", memory="96m")
    container = pod.start(mounts=[volume(directory, "/dev/shm")])

    assert "size=98304k" in container.sh("grep ' /dev/shm ' /proc/mounts")


def test_huge_pages_are_the_guests(pod: Pod, kubelet: PodDirectory) -> None:
    first = pod.start(mounts=[volume(kubelet.empty_dir("huge", hugepages="size=4M,pagesize=2M"), "/huge")])
    second = pod.start(mounts=[volume(kubelet.empty_dir("more", hugepages="size=2M,pagesize=2M"), "/huge")])

    for container, size in ((first, 4 << 20), (second, 2 << 20)):
        mounted = container.sh("grep ' /huge ' /proc/mounts")
        assert "hugetlbfs" in mounted
        assert f"pagesize=2M,size={size}" in mounted
    assert int(first.sh("grep HugePages_Total /proc/meminfo").split()[1]) == 3


# ---- shared


def test_files_and_directories_are_the_same_on_both_sides(pod: Pod, scratch: Path) -> None:
    (scratch / "directory").mkdir()
    (scratch / "file").write_text("from the host\n")
    (scratch / "read-only").write_text("look\n")
    container = pod.start(
        mounts=[
            volume(scratch / "directory", "/data"),
            volume(scratch / "file", "/etc/file"),
            volume(scratch / "read-only", "/etc/read-only", readonly=True),
            volume(scratch / "directory", "/look", readonly=True),
        ]
    )

    assert container.sh("cat /etc/file /etc/read-only") == "from the host\nlook\n"
    container.sh("echo from the guest > /etc/file; mkdir /data/below; echo x > /data/below/y")
    assert (scratch / "file").read_text() == "from the guest\n"
    assert (scratch / "directory/below/y").read_text() == "x\n"
    assert "Read-only" in container.exec("sh", "-c", "echo no > /etc/read-only").err
    assert "Read-only" in container.exec("touch", "/look/below/z").err
    (scratch / "directory/below/later").write_text("later\n")
    assert container.sh("cat /look/below/later") == "later\n"


def test_the_pods_own_files_are_there(pod: Pod, scratch: Path) -> None:
    (scratch / "hosts").write_text("192.0.2.1 elsewhere\n")
    container = pod.start(mounts=[volume(scratch / "hosts", "/etc/hosts")])

    assert container.sh("cat /etc/hosts") == "192.0.2.1 elsewhere\n"
    assert container.sh("cat /etc/hostname") == container.sh("hostname")
    assert container.exec("cat", "/etc/resolv.conf").code == 0


def test_a_sub_path_shows_no_more_than_itself(pod: Pod, kubelet: PodDirectory, scratch: Path) -> None:
    (scratch / "volume" / "part").mkdir(parents=True)
    (scratch / "volume" / "secret").write_text("no\n")
    part = kubelet.sub_path("data", scratch / "volume" / "part")
    container = pod.start(mounts=[volume(part, "/data")])

    container.sh("echo x > /data/y")

    assert container.sh("ls -a /data").split() == [".", "..", "y"]
    assert (scratch / "volume/part/y").read_text() == "x\n"
    assert container.exec("cat", "/data/../secret").code != 0


@pytest.mark.parametrize(
    ("propagation", "seen"),
    [(pb.PROPAGATION_PRIVATE, False), (pb.PROPAGATION_HOST_TO_CONTAINER, True)],
    ids=["private", "host-to-container"],
)
def test_later_mounts_of_the_host_are_seen_only_where_asked_for(
    pod: Pod, scratch: Path, propagation: pb.MountPropagation, seen: bool
) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "top", scratch], check=True)
    try:
        subprocess.run(["mount", "--make-shared", scratch], check=True)
        (scratch / "early").mkdir()
        (scratch / "late").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "early", scratch / "early"], check=True)
        (scratch / "early" / "file").write_text("early\n")
        container = pod.start(mounts=[volume(scratch, "/data", propagation=propagation)])

        assert container.sh("cat /data/early/file") == "early\n"
        subprocess.run(["mount", "-t", "tmpfs", "late", scratch / "late"], check=True)
        (scratch / "late" / "file").write_text("late\n")
        if seen:
            eventually(lambda: container.exec("cat", "/data/late/file").out == "late\n", what="the later mount is seen")
        else:
            assert container.exec("cat", "/data/late/file").code != 0
        container.stop(0)
        container.remove()

        # The shared directories are unmounted, and nothing of the host's with them.
        assert (scratch / "early" / "file").read_text() == "early\n"
        assert (scratch / "late" / "file").read_text() == "late\n"
    finally:
        subprocess.run(["umount", "--recursive", scratch], check=True)


def test_the_host_removes_what_is_mounted_below_a_volume_in_use(pod: Pod, scratch: Path) -> None:
    """With a hostPath of /var/lib/kubelet, other pods' volumes can be unmounted and their directories removed."""
    (scratch / "below").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "below", scratch / "below"], check=True)
    (scratch / "below/file").write_text("x\n")
    container = pod.start(mounts=[volume(scratch, "/data")])
    assert container.sh("cat /data/below/file") == "x\n"

    subprocess.run(["umount", scratch / "below"], check=True)
    (scratch / "below").rmdir()

    assert container.exec("sh", "-c", "echo y > /data/after").code == 0
    assert (scratch / "after").read_text() == "y\n"


def test_read_only_is_of_the_volume_and_not_of_the_mounts_below_it(pod: Pod, scratch: Path) -> None:
    (scratch / "below").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "below", scratch / "below"], check=True)
    try:
        container = pod.start(mounts=[volume(scratch, "/data", readonly=True)])

        assert container.exec("sh", "-c", "echo x > /data/file").code != 0
        assert container.exec("sh", "-c", "echo x > /data/below/file").code == 0
        container.stop(0)
        container.remove()

        assert (scratch / "below/file").read_text() == "x\n"
        assert not (scratch / "file").exists()
    finally:
        subprocess.run(["umount", scratch / "below"], check=True)


# ---- payloads that change


@pytest.mark.parametrize("plugin", ["configmap", "secret", "projected", "downward-api"])
def test_an_update_is_seen_whole_and_removed_keys_go(pod: Pod, kubelet: PodDirectory, plugin: str) -> None:
    payload = kubelet.payload(plugin, "config")
    payload.write({"a": "one", "b": "one", "gone": "one"})
    container = pod.start(mounts=[volume(payload.path, "/etc/config", readonly=True)])
    assert container.sh("cd /etc/config && cat a b gone && ls") == "oneoneonea\nb\ngone\n"
    # Reads both through one resolved `..data`: whatever version it is, it is one version.
    mixed = """
        for i in $(seq 400); do
            d=$(readlink /etc/config/..data) && x=$(cat /etc/config/$d/a /etc/config/$d/b 2>/dev/null) || continue
            [ "$x" = oneone ] || [ "$x" = twotwo ] || echo "mixed: $x"
            [ "$x" = twotwo ] && break
            sleep 0.05
        done"""

    payload.write({"a": "two", "b": "two", "new": "two"})

    assert container.sh(mixed) == ""
    eventually(
        lambda: container.exec("sh", "-c", "cd /etc/config && cat a b new && ls").out == "twotwotwoa\nb\nnew\n",
        what="the new version, without the old key",
    )


def test_a_config_map_of_ten_thousand_entries(pod: Pod, kubelet: PodDirectory) -> None:
    payload = kubelet.payload("configmap", "huge")
    payload.write({f"key-{number}": str(number) for number in range(10_000)})
    container = pod.start(mounts=[volume(payload.path, "/etc/config", readonly=True)])

    assert container.sh("ls /etc/config | wc -l; cat /etc/config/key-9999").split() == ["10000", "9999"]
    payload.write({"key-1": "changed"})
    eventually(lambda: container.exec("sh", "-c", "cat /etc/config/*").out == "changed", what="the new version is seen")


def test_a_file_renamed_over_is_seen_in_a_directory_and_not_in_a_file_mount(pod: Pod, scratch: Path) -> None:
    """As with runc: a mount of a single file is a mount of its inode."""
    (scratch / "file").write_text("old\n")
    container = pod.start(mounts=[volume(scratch, "/data"), volume(scratch / "file", "/file")])
    (scratch / "new").write_text("new\n")

    (scratch / "new").rename(scratch / "file")

    eventually(lambda: container.sh("cat /data/file") == "new\n", what="the new file is seen")
    assert container.sh("cat /file") == "old\n"


# ---- disks


@pytest.fixture
def loop_device(scratch: Path) -> Iterator[tuple[str, Path]]:
    """A block device of the host's, and its file."""
    image = scratch / "disk.img"
    with image.open("wb") as file:
        file.truncate(24 << 20)
    with loop_devices.loop_device(image) as device:
        yield device, image


def test_a_raw_block_volume_is_a_device_under_its_own_name(pod: Pod, loop_device: tuple[str, Path]) -> None:
    device, image = loop_device
    content = os.urandom(4096)
    with open(device, "wb") as disk:
        disk.write(content)
    container = pod.start(devices=[pb.Device(host_path=device, container_path="/dev/xvda", permissions="rwm")])

    assert container.sh("blockdev --getsize64 /dev/xvda").strip() == str(image.stat().st_size)
    assert container.sh("head -c 4096 /dev/xvda | sha256sum").split()[0] == hashlib.sha256(content).hexdigest()
    container.sh("echo written by the guest | dd of=/dev/xvda bs=512 seek=16 conv=notrunc,fsync 2>/dev/null")
    with open(device, "rb") as file:
        file.seek(16 * 512)
        assert file.read(20) == b"written by the guest"


def test_a_mounted_disk_is_refused_and_named_and_plugged_once_it_is_free(
    pod: Pod, loop_device: tuple[str, Path], scratch: Path
) -> None:
    device, _ = loop_device
    subprocess.run(["mkfs.ext4", "-q", device], check=True)
    (scratch / "point").mkdir()
    asked = [pb.Device(host_path=device, container_path="/dev/xvda", permissions="rwm")]
    subprocess.run(["mount", device, scratch / "point"], check=True)
    try:
        assert f"'{device}': EBUSY (the host has mounted or claimed it)" in refusal(lambda: pod.start(devices=asked))
    finally:
        subprocess.run(["umount", scratch / "point"], check=True)

    assert pod.start(devices=asked).exec("blockdev", "--getsize64", "/dev/xvda").code == 0


def test_the_hosts_disks_stay_there_when_a_container_is_privileged(run: RunTask, loop_device: tuple[str, Path]) -> None:
    """`ctr run --privileged` lists every device of the host in the spec, and allows all."""
    device, image = loop_device
    before = image.read_bytes()
    script = f"ls /sys/block; test -e {device} && echo overwritten > {device}; true"

    disks = run("sh", "-c", script, options=["--privileged"]).out.split()

    assert disks == run("ls", "/sys/block").out.split()
    assert image.read_bytes() == before
