"""Host trees as they are copied into a guest."""

import os
import stat
from pathlib import Path

import pytest

from pyshim.host import files
from pyshim.host.files import list_tree, read_piece
from pyshim.model.errors import FailedPrecondition, ResourceExhausted
from tests.fakes.open_files import same_open_files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "b/c").mkdir(parents=True)
    (root / "b/c/file").write_bytes(b"0123456789")
    (root / "a").symlink_to("b/c/file")
    (root / "out").symlink_to("/etc")
    os.mkfifo(root / "pipe")
    (root / "b").chmod(0o750)
    return root


def test_directories_come_before_what_is_in_them_and_only_what_can_be_copied_comes(tree: Path) -> None:
    entries = list_tree(str(tree))

    assert [entry.path for entry in entries] == ["", "a", "b", "b/c", "b/c/file", "out"]
    by_path = {entry.path: entry for entry in entries}
    assert (by_path["a"].target, by_path["out"].target) == ("b/c/file", "/etc")
    assert (by_path["b/c/file"].size_bytes, stat.S_IMODE(by_path["b"].mode)) == (10, 0o750)
    assert by_path["b"].is_directory
    assert by_path["a"].is_link


def test_a_single_file_is_a_tree_of_one(tree: Path) -> None:
    (entry,) = list_tree(str(tree / "b/c/file"))

    assert (entry.path, entry.size_bytes) == ("", 10)
    assert read_piece(str(tree / "b/c/file"), "", 8, 100) == b"89"


def test_the_root_may_be_a_link(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree)

    assert [entry.path for entry in list_tree(str(tmp_path / "link"))][1:3] == ["a", "b"]
    assert read_piece(str(tmp_path / "link"), "b/c/file", 0, 3) == b"012"


@pytest.mark.parametrize("path", ["a", "out/passwd", "../tree/b/c/file", "/etc/passwd"])
def test_no_link_and_no_name_leads_out(tree: Path, path: str) -> None:
    with pytest.raises(OSError, match="Errno"):
        read_piece(str(tree), path, 0, 10)


def test_what_is_no_longer_a_file_is_not_read(tree: Path) -> None:
    with pytest.raises(FailedPrecondition, match="no longer a regular file"):
        read_piece(str(tree), "pipe", 0, 10)


def test_a_tree_too_large_is_refused_by_its_name(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_TREE_BYTES", 9)

    with pytest.raises(ResourceExhausted, match=f"copy '{tree}' into the guest"):
        list_tree(str(tree))


def test_a_tree_too_deep_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / "/".join("d" * (files.MAX_DEPTH + 2))
    deep.mkdir(parents=True)

    with pytest.raises(ResourceExhausted, match="nested more than"):
        list_tree(str(tmp_path))


def test_no_descriptor_is_left_open(tree: Path) -> None:
    with same_open_files():
        list_tree(str(tree))
        read_piece(str(tree), "b/c/file", 0, 1)
