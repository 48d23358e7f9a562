"""Trees and the cpio archive made of them, read back with the system's own cpio reader."""

import stat
import subprocess
from pathlib import Path

import pytest

from guest.image.cpio import cpio_archive
from guest.image.errors import BuildError
from guest.image.tree import Entry, Tree, merged_path


@pytest.mark.parametrize(
    ("path", "merged"),
    [
        ("lib/x86_64-linux-gnu/libc.so.6", "usr/lib/x86_64-linux-gnu/libc.so.6"),
        ("/bin/sh", "usr/bin/sh"),
        ("./sbin/mke2fs", "usr/sbin/mke2fs"),
        ("usr/bin/crun", "usr/bin/crun"),
        ("lib", "lib"),
        ("library/x", "library/x"),
    ],
)
def test_paths_read_as_on_a_merged_usr_system(path: str, merged: str) -> None:
    assert merged_path(path) == merged


def test_parents_are_made_and_come_before_their_children() -> None:
    tree = Tree()
    tree.add_file("a/b/c", b"x")
    tree.add_file("a/b-c", b"y")

    assert [path for path, _ in tree.items()] == ["a", "a/b", "a/b/c", "a/b-c"]


def test_the_same_entry_twice_is_no_conflict_another_one_is() -> None:
    tree = Tree()
    tree.add_file("lib/a", b"x")
    tree.add_file("usr/lib/a", b"x")

    with pytest.raises(BuildError, match="usr/lib/a"):
        tree.add_file("lib/a", b"other")


@pytest.mark.parametrize("path", ["", "/", "a/../b", "../x"], ids=repr)
def test_paths_that_leave_the_tree_are_refused(path: str) -> None:
    with pytest.raises(BuildError, match="not a path below the root"):
        Tree().add_file(path, b"")


def test_nothing_is_added_below_a_file() -> None:
    tree = Tree()
    tree.add_file("a", b"")

    with pytest.raises(BuildError, match="a is not a directory"):
        tree.add_file("a/b", b"")


def test_write_to_keeps_content_modes_links_and_the_one_time(tmp_path: Path) -> None:
    tree = Tree()
    tree.add_file("usr/bin/tool", b"#!", 0o755)
    tree.add_link("bin", "usr/bin")
    tree.add_directory("tmp", 0o1777)

    tree.write_to(tmp_path, 1_000_000_000)

    assert (tmp_path / "bin/tool").read_bytes() == b"#!"
    assert stat.S_IMODE((tmp_path / "usr/bin/tool").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "tmp").stat().st_mode) == 0o1777
    assert {path.lstat().st_mtime for path in [tmp_path, *tmp_path.rglob("*")]} == {1_000_000_000}


def test_write_to_refuses_device_nodes(tmp_path: Path) -> None:
    tree = Tree()
    tree.add_character_device("dev/console", 5, 1)

    with pytest.raises(BuildError, match="dev/console"):
        tree.write_to(tmp_path, 0)


def test_busybox_unpacks_the_archive_to_the_same_tree(tmp_path: Path) -> None:
    busybox = Path("/bin/busybox")
    if not busybox.exists():
        pytest.skip("/bin/busybox is missing (package busybox-static)")
    tree = Tree()
    tree.add_directory("empty", 0o700)
    tree.add_file("etc/odd", b"12345", 0o640)
    tree.add_file("init", bytes(range(256)), 0o755)
    tree.add_link("link", "etc/odd")

    subprocess.run(
        [busybox, "cpio", "-idm"], input=cpio_archive(tree, 86400), cwd=tmp_path, check=True, capture_output=True
    )

    found = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*")}
    assert sorted(found) == sorted(path for path, _ in tree.items())
    assert found["init"].read_bytes() == bytes(range(256))
    assert stat.S_IMODE(found["etc/odd"].stat().st_mode) == 0o640
    assert found["link"].readlink() == Path("etc/odd")
    assert found["etc/odd"].stat().st_mtime == 86400


def test_members_are_padded_and_numbered_apart() -> None:
    tree = Tree()
    tree.add("dev/console", Entry(stat.S_IFCHR | 0o600, b"", (5, 1)))
    tree.add_file("f", b"abc")

    archive = cpio_archive(tree, 0)

    assert len(archive) % 4 == 0
    # magic, inode, mode: the first three fields of every header
    headers = [archive[at : at + 110] for at in range(0, len(archive), 4) if archive.startswith(b"070701", at)]
    assert [int(header[6:14], 16) for header in headers] == [1, 2, 3, 0]
    assert (int(headers[1][78:86], 16), int(headers[1][86:94], 16)) == (5, 1)
