"""Disks of the vhost-user store: found by number as Kata lays it out, and everything that keeps one from being had."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.model.errors import FailedPrecondition, NotFound, ShimError, Unimplemented
from pyshim.model.volumes import SourceFacts, SourceKind
from pyshim.resources.volumes.host.sources import source_facts
from pyshim.resources.volumes.host.vhost_user import backend_socket

pytestmark = pytest.mark.root


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """`one` is served, `idle` is a node whose program is not there, `file` has a file for a socket."""
    devices, sockets = tmp_path / "block/devices", tmp_path / "block/sockets"
    devices.mkdir(parents=True)
    sockets.mkdir()
    for name, major, minor in (("one", 241, 0), ("idle", 241, 1), ("file", 241, 2), ("a", 241, 3), ("b", 241, 3)):
        os.mknod(devices / name, 0o600 | stat.S_IFBLK, os.makedev(major, minor))
    (devices / "notes.txt").write_text("not a node")
    (devices / "gone").symlink_to("/nowhere")
    (sockets / "file").write_text("")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(sockets / "one"))
        yield tmp_path


def test_a_disk_is_found_by_number_and_by_its_node(store: Path) -> None:
    served = SourceFacts(kind=SourceKind.BLOCK, vhost_user_socket=str(store / "block/sockets/one"))

    assert source_facts("/dev/block/241:0", str(store)) == served
    assert source_facts(str(store / "block/devices/one"), str(store)) == served


def test_without_the_store_the_numbers_mean_nothing_of_the_kind(store: Path) -> None:
    assert source_facts("/dev/block/241:0").vhost_user_socket == ""
    assert source_facts(str(store / "block/devices/one")).vhost_user_socket == ""


@pytest.mark.parametrize(
    ("major", "minor", "kind", "text"),
    [
        (241, 1, FailedPrecondition, "block/sockets/idle': ENOENT"),
        (241, 2, FailedPrecondition, "block/sockets/file' is not a socket"),
        (241, 3, FailedPrecondition, "'a', 'b' all have this number"),
        (241, 9, NotFound, "has no such node"),
        (242, 0, Unimplemented, "a SCSI target cannot be plugged"),
    ],
)
def test_an_unavailable_disk_is_named(major: int, minor: int, kind: type[ShimError], text: str, store: Path) -> None:
    with pytest.raises(kind, match=f"find vhost-user disk {major}:{minor} in '{store}': .*{text}"):
        source_facts(f"/dev/block/{major}:{minor}", str(store))


def test_a_store_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"find vhost-user disk 241:0 in '.*/none': .*ENOENT"):
        backend_socket(str(tmp_path / "none"), 241, 0)
