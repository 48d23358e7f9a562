"""Files and directories the guest agent writes: beneath their root whatever lies there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from guest.agent.errors import InvalidArgument
from guest.agent.files import remove_tree
from guest.agent.storage import copies, table
from guest.agent.storage import copies as files
from protos.agent import agent_pb2


def chunk(share: Path, path: str, data: bytes = b"x", **fields: Any) -> agent_pb2.CopyFileRequest:
    values = {"file_size": len(data), "file_mode": 0o100644, "dir_mode": 0o755, "uid": os.getuid(), "gid": os.getgid()}
    return agent_pb2.CopyFileRequest(path=f"{share}/{path}", data=data, **(values | fields))


@pytest.mark.parametrize("link", ["/etc", "../../outside", "../share/../outside"])
def test_a_symlink_that_leads_out_is_not_followed(tmp_path: Path, link: str) -> None:
    share, outside = tmp_path / "share", tmp_path / "outside"
    share.mkdir()
    outside.mkdir()
    (share / "link").symlink_to(link)

    with pytest.raises(InvalidArgument):
        files.copy_file(chunk(share, "link/new"), str(share))

    assert list(outside.iterdir()) == []
    assert not Path("/etc/new").exists()


def test_a_symlink_that_stays_inside_is_followed_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    files.copy_file(chunk(tmp_path, "link/file"), str(tmp_path))

    assert (tmp_path / "real/file").read_bytes() == b"x"


def test_a_symlink_in_the_files_place_is_replaced_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    share = tmp_path / "share"
    share.mkdir()
    (share / "file").symlink_to(victim)

    files.copy_file(chunk(share, "file"), str(share))

    assert victim.read_text() == "kept"
    assert not (share / "file").is_symlink()


def test_directories_keep_their_content_and_links_and_files_replace_each_other(tmp_path: Path) -> None:
    files.copy_file(chunk(tmp_path, "d", b"", file_mode=0o040750), str(tmp_path))
    files.copy_file(chunk(tmp_path, "d/f"), str(tmp_path))
    files.copy_file(chunk(tmp_path, "d", b"", file_mode=0o040700), str(tmp_path))
    files.copy_file(chunk(tmp_path, "d/l", b"../target", file_mode=0o120777, file_size=9), str(tmp_path))
    files.copy_file(chunk(tmp_path, "d/l", b"now a file"), str(tmp_path))
    files.copy_file(chunk(tmp_path, "e/l", b"link", file_mode=0o120777), str(tmp_path))

    assert (tmp_path / "d/f").read_bytes() == b"x"
    assert (tmp_path / "d").stat().st_mode & 0o7777 == 0o700
    assert (tmp_path / "d/l").read_bytes() == b"now a file"
    assert os.readlink(tmp_path / "e/l") == "link"


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": -1},
        {"file_size": -1},
        {"file_size": 0},
        {"offset": 5},
        {"file_mode": 0o020644},
        {"file_mode": 0o010644},
    ],
    ids=["offset", "size", "longer than size", "chunk past size", "device", "fifo"],
)
def test_a_copy_that_cannot_be_meant_is_refused(tmp_path: Path, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        files.copy_file(chunk(tmp_path, "f", **fields), str(tmp_path))

    assert not (tmp_path / "f").exists()


def test_removing_a_tree_does_not_follow_symlinks(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    tree = tmp_path / "tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/link").symlink_to(outside)

    remove_tree(str(tree))

    assert not tree.exists()
    assert (outside / "kept").exists()


def test_a_copy_is_synchronized_by_difference_and_refuses_what_is_too_big(tmp_path: Path) -> None:
    source, copy = tmp_path / "s", tmp_path / "c"
    (source / "sub").mkdir(parents=True)
    (source / "sub/f").write_text("1")
    seen = copies.synchronize(str(source), str(copy), {})
    untouched = (copy / "sub/f").stat().st_ino
    (source / "g").write_text("2")

    seen = copies.synchronize(str(source), str(copy), seen)
    (source / "sub/f").unlink()
    (source / "sub").rmdir()
    seen = copies.synchronize(str(source), str(copy), seen)

    assert untouched
    assert sorted(path.name for path in copy.iterdir()) == ["g"]
    (source / "big").write_bytes(bytes(2 << 20))
    with pytest.raises(copies.TooBig):
        copies.synchronize(str(source), str(copy), seen)
    assert sorted(path.name for path in copy.iterdir()) == ["g"]


@pytest.mark.root
def test_a_volumes_group_is_set_all_the_way_down_and_read_only_adds_no_write(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o700)
    (tmp_path / "d/f").write_text("x")
    (tmp_path / "d/f").chmod(0o600)
    (tmp_path / "l").symlink_to("/nowhere")

    table.set_group(str(tmp_path), agent_pb2.FSGroup(group_id=4242), read_only=True)

    modes = {path: (tmp_path / path).lstat() for path in ("d", "d/f", "l")}
    assert {found.st_gid for found in modes.values()} == {4242}
    assert modes["d"].st_mode & 0o7777 == 0o2750
    assert modes["d/f"].st_mode & 0o7777 == 0o640
