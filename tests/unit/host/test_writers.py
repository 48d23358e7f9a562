"""Who can write a file that root executes: owners and modes of the file and of all that leads to it."""

import os
from pathlib import Path

import pytest

from pyshim.host.writers import writable_below, writable_by_others

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "b" / "program"
    path.parent.mkdir(parents=True)
    path.touch(mode=0o755)
    return path


def test_what_root_alone_can_write_is_fine(program: Path) -> None:
    assert writable_by_others([str(program), str(program.parent), "/nowhere/at/all"]) == ()


@pytest.mark.parametrize("place", ["program", "b", "a"])
@pytest.mark.parametrize(("mode", "writer"), [(0o757, "everyone"), (0o1755, ""), (0o755, "")])
def test_the_mode_of_every_place_on_the_way_counts(program: Path, place: str, mode: int, writer: str) -> None:
    (path,) = [each for each in (program, *program.parents) if each.name == place]
    path.chmod(mode)

    assert writable_by_others([str(program)]) == ((f"'{path}' by {writer}",) if writer else ())


@needs_root
@pytest.mark.parametrize(
    ("user", "group", "mode", "writer"),
    [(1000, 0, 0o500, "its owner, user 1000"), (0, 100, 0o775, "group 100"), (0, 0, 0o775, ""), (0, 100, 0o755, "")],
)
def test_owner_and_group_of_every_place_count(program: Path, user: int, group: int, mode: int, writer: str) -> None:
    os.chown(program.parent, user, group)
    program.parent.chmod(mode)

    assert writable_by_others([str(program)]) == ((f"'{program.parent}' by {writer}",) if writer else ())


def test_links_are_followed_and_each_place_is_named_once(program: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "link").symlink_to("../a/./b/program")
    (tmp_path / "first").symlink_to(tmp_path / "open" / "link")
    program.chmod(0o766)

    found = writable_by_others([str(tmp_path / "first"), str(program)])

    assert found == (f"'{tmp_path}/open' by everyone", f"'{program}' by everyone")


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    assert writable_by_others([str(tmp_path / "a")]) == ()


@needs_root
def test_a_link_of_another_user_in_a_directory_open_to_all_can_be_replaced(program: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    (tmp_path / "open" / "link").symlink_to(program)
    os.lchown(tmp_path / "open" / "link", 1000, 0)

    assert writable_by_others([str(tmp_path / "open" / "link")]) == (f"'{tmp_path}/open/link' by its owner, user 1000",)


def test_whole_trees_are_looked_through(program: Path, tmp_path: Path) -> None:
    program.chmod(0o666)
    (tmp_path / "a" / "link").symlink_to("/nowhere")

    assert writable_below([str(tmp_path)]) == (f"'{program}' by everyone",)
