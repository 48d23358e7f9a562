"""A guest plants links in its volumes, a host puts other things than files there: nothing outside is ever reached."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from protos.cri import v1_pb2 as pb

from .framework.cri import Cri, Pod, refusal
from .framework.kubelet_volumes import volume
from .framework.waiting import eventually

pytestmark = pytest.mark.vm


@pytest.fixture
def shared(scratch: Path) -> Path:
    path = scratch / "shared"
    path.mkdir()
    return path


@pytest.fixture
def victim(scratch: Path) -> Iterator[Path]:
    """A directory of the host's that no guest was given; it must be the same afterwards."""
    path = scratch / "victim"
    path.mkdir()
    (path / "secret").write_text("host's\n")
    yield path
    assert [entry.name for entry in path.iterdir()] == ["secret"]
    assert (path / "secret").read_text() == "host's\n"
    assert (path / "secret").stat().st_nlink == 1


def test_links_and_dots_that_a_guest_plants_lead_nowhere(pod: Pod, shared: Path, victim: Path) -> None:
    container = pod.start(mounts=[volume(shared, "/data")])
    up = "../" * 20
    container.sh(
        f"cd /data && ln -s {victim} absolute && ln -s {up}{victim} relative && ln -s {victim}/secret file"
        " && mkdir -p a/b && ln -s .. a/b/up && ln -s loop loop"
    )

    for path in ("absolute/secret", "relative/secret", "file", f"a/b/up/../..{victim}/secret", "loop"):
        assert "host's" not in container.exec("sh", "-c", f"cat /data/{path}").out
        container.exec("sh", "-c", f"echo owned > /data/{path}")
    assert container.exec("ln", "/data/file", "/data/hard").code in (0, 1)
    container.exec("sh", "-c", f"ln {victim}/secret /data/hard2")
    assert (shared / "absolute").is_symlink()
    assert not (shared / "hard2").exists()


def test_a_planted_link_does_not_move_the_mount_point_of_another_container(
    pod: Pod, shared: Path, victim: Path
) -> None:
    """The second container's mounts, and the clean-up of both, must not follow what the first one left."""
    first = pod.start(mounts=[volume(shared, "/data")])
    first.sh(f"cd /data && mkdir sub && ln -s {victim} sub/mount && ln -s {victim} mount")
    planted = [volume(shared, "/data"), volume(shared / "sub", "/data/mount/inner")]
    assert refusal(lambda: pod.start(mounts=planted)), "the link leads nowhere, so there is no such mount point"
    second = pod.start(mounts=[volume(shared, "/data"), volume(shared / "sub", "/inner")])

    assert "host's" not in second.exec("sh", "-c", "cat /data/mount/secret /data/sub/mount/secret").out
    first.stop(0)
    first.remove()
    second.stop(0)
    second.remove()
    assert sorted(entry.name for entry in shared.iterdir()) == ["mount", "sub"]


def test_a_guest_that_swaps_directories_and_links_meanwhile_reaches_nothing_outside(
    pod: Pod, shared: Path, victim: Path
) -> None:
    """In its volume and in its root file system, while the host mounts and removes what other containers have."""
    (shared / "sub").mkdir()
    (shared / "sub" / "file").write_text("found\n")
    attacker = pod.start(mounts=[volume(shared, "/data")])
    swap = (
        "mkdir -p d/mount && echo inner > d/secret && ln -s {to} l && (while :; do"
        " mv -T d e && mv -T l d && mv -T d l && mv -T e d && echo >> swaps; done) > /dev/null 2>&1 &"
    )
    reach = (
        "(while :; do cat d/secret | grep -q host && touch reached; echo owned >> d/secret; done) > /dev/null 2>&1 &"
    )
    attacker.sh(f"cd /data && {swap.format(to=victim)}")
    attacker.sh(f"cd /data && {reach}")
    attacker.sh(f"mkdir /churn && cd /churn && {swap.format(to=shared.parent)}")

    for _ in range(3):
        other = pod.start(mounts=[volume(shared, "/data"), volume(shared / "sub", "/inner")])
        assert other.sh("cat /inner/file") == "found\n"
        # A mount point within what is swapped: there or refused, never at another place.
        with suppress(grpc.RpcError):
            pod.start(mounts=[volume(shared, "/data"), volume(shared / "sub", "/data/d/mount")]).stop(0)
        other.stop(0)
        other.remove()
    attacker.stop(0)
    attacker.remove()

    assert (shared / "swaps").stat().st_size > 0
    assert not (shared / "reached").exists()
    assert (shared / "sub" / "file").read_text() == "found\n"


def test_what_the_guest_mounts_in_a_volume_stays_in_the_guest(cri: Cri, shared: Path, victim: Path) -> None:
    with cri.pod(privileged=True) as pod:
        security = pb.LinuxContainerSecurityContext(privileged=True)
        mount = volume(shared, "/data", propagation=pb.PROPAGATION_BIDIRECTIONAL)
        container = pod.start(mounts=[mount], security=security)
        container.sh("mkdir /data/top && mount -t tmpfs none /data/top && touch /data/top/in-the-guest")
        container.sh("mkdir /data/proc && mount --bind /proc /data/proc")

        assert list((shared / "top").iterdir()) == []
        assert list((shared / "proc").iterdir()) == []
        assert not os.path.ismount(shared / "top")
    assert (shared / "top").is_dir()


def test_devices_that_a_guest_makes_are_no_doors_for_it(cri: Cri, shared: Path) -> None:
    """A node of the host's disk, made by root in the guest: the guest's own numbers, and none without `dev`."""
    with cri.pod(privileged=True) as pod:
        container = pod.start(
            mounts=[volume(shared, "/data")], security=pb.LinuxContainerSecurityContext(privileged=True)
        )
        made = container.exec("sh", "-c", "mknod /data/kmsg c 1 11 && mknod /data/disk b 7 0")
        read = container.exec("sh", "-c", "head -c 1 /data/disk")

    assert made.code != 0 or read.code != 0
    for node in shared.iterdir():
        node.unlink()


def test_a_huge_directory_does_not_hold_up_the_pods_end(pod: Pod, shared: Path) -> None:
    container = pod.start(mounts=[volume(shared, "/data")])
    container.sh("mkdir /data/many && cd /data/many && seq 3000 | xargs touch && mkdir -p deep/$(seq -s/ 60)")

    assert len(os.listdir(shared / "many")) == 3001
    container.stop(0)
    container.remove()
    assert len(os.listdir(shared / "many")) == 3001


def test_fifos_sockets_and_devices_of_the_host_are_seen_and_open_nothing_of_it(pod: Pod, shared: Path) -> None:
    os.mkfifo(shared / "fifo")
    os.mknod(shared / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(shared / "disk", stat.S_IFBLK | 0o666, os.makedev(7, 0))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(shared / "socket"))
        listener.listen()
        container = pod.start(mounts=[volume(shared, "/data"), volume(shared / "fifo", "/fifo")])

        kinds = container.sh("cd /data && stat -c '%n %F' *").splitlines()
        assert sorted(kinds) == ["disk block special file", "fifo fifo", "null character special file", "socket socket"]
        # Both ends of the pipe are the guest's.
        assert container.sh("(echo through > /data/fifo &) ; timeout 20 cat /data/fifo") == "through\n"
        assert container.exec("sh", "-c", "head -c 1 /data/disk").code != 0
        assert container.exec("sh", "-c", "echo x | timeout 5 nc local:/data/socket").code != 0
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    "name", ["new\nline", "x" * 255, "\u00fc" * 127, " leading", "back\\slash", "comma,colon:", "-o"], ids=ascii
)
def test_odd_names_of_sources_and_files(pod: Pod, shared: Path, name: str) -> None:
    (shared / name).mkdir()
    (shared / name / name).write_text("found\n")
    container = pod.start(mounts=[volume(shared / name, "/data"), volume(shared / name / name, "/file")])

    assert container.sh("cat /data/* /data/.[!.]* 2>/dev/null; cat /file") == "found\nfound\n"
    container.sh("echo back > /file")
    assert (shared / name / name).read_text() == "back\n"


def test_a_source_that_is_not_there_is_named(pod: Pod, shared: Path) -> None:
    """containerd makes a missing directory; a link to nowhere is what it leaves to the runtime."""
    (shared / "dangling").symlink_to("nowhere/at/all")

    assert "dangling" in refusal(lambda: pod.start(mounts=[volume(shared / "dangling", "/data")]))


def test_a_source_that_vanishes_takes_its_files_along_and_nothing_else(pod: Pod, shared: Path) -> None:
    (shared / "volume").mkdir()
    (shared / "volume" / "file").write_text("here\n")
    container = pod.start(mounts=[volume(shared / "volume", "/data")])
    assert container.sh("cat /data/file") == "here\n"

    (shared / "volume" / "file").unlink()
    (shared / "volume").rmdir()

    eventually(lambda: container.exec("cat", "/data/file").code != 0, what="the file is gone in the guest")
    assert container.exec("touch", "/data/new").code != 0
    assert container.sh("echo alive") == "alive\n"
    container.stop(0)
    container.remove()
