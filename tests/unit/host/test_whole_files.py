"""A file that is replaced whole, whatever happens meanwhile."""

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.host.files import replace_file


@pytest.fixture(params=[0, 0o077], ids=["umask 000", "umask 077"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("many_writers", [False, True])
@pytest.mark.parametrize("mode", [0o600, 0o755])
def test_a_file_holds_the_new_content_and_nothing_is_beside_it(tmp_path: Path, mode: int, many_writers: bool) -> None:
    file = tmp_path / "answers"
    for content in (b"first" * 100_000, b"", b"second"):
        replace_file(str(file), content, mode=mode, durable=False, many_writers=many_writers)

        assert file.read_bytes() == content
        assert stat.S_IMODE(file.stat().st_mode) == mode
        assert os.listdir(tmp_path) == ["answers"]


@pytest.mark.parametrize(("durable", "synced"), [(True, [b"new"]), (False, [])])
def test_only_a_durable_file_is_synced_and_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, synced: list[bytes]
) -> None:
    file, seen = tmp_path / "state", []
    file.write_bytes(b"old")

    def fsync(fd: int) -> None:
        assert file.read_bytes() == b"old"
        seen.append(Path(f"/proc/self/fd/{fd}").read_bytes())

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(str(file), b"new", mode=0o600, durable=durable)

    assert (seen, file.read_bytes()) == (synced, b"new")


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_failure_leaves_what_was_there_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    file = tmp_path / "state"
    file.write_bytes(b"old")

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space"):
            replace_file(str(file), b"new", mode=0o600, durable=True)

    assert (file.read_bytes(), os.listdir(tmp_path)) == (b"old", ["state"])


def test_what_a_killed_writer_left_aside_is_written_over(tmp_path: Path) -> None:
    file = tmp_path / "state"
    pid = os.fork()
    if pid == 0:
        os.rename = lambda *_args: os.kill(os.getpid(), signal.SIGKILL)
        replace_file(str(file), b"killed" * 1000, mode=0o600, durable=True)
    os.waitpid(pid, 0)
    assert os.listdir(tmp_path) == [".state~"]

    replace_file(str(file), b"new", mode=0o600, durable=True)

    assert (file.read_bytes(), os.listdir(tmp_path)) == (b"new", ["state"])


def test_a_link_in_its_way_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"theirs")
    (tmp_path / ".state~").symlink_to(outside)

    with pytest.raises(OSError, match="symbolic links"):
        replace_file(str(tmp_path / "state"), b"new", mode=0o600, durable=True)

    assert outside.read_bytes() == b"theirs"


def test_of_many_writers_each_reader_finds_one_whole(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    writers = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            for _ in range(50):
                replace_file(str(file), b"%d" % number * 50_000, mode=0o600, durable=False, many_writers=True)
            os._exit(0)
        writers.append(pid)
    wholes = {b"%d" % number * 50_000 for number in range(4)}
    while writers:
        assert not file.exists() or file.read_bytes() in wholes
        if os.waitpid(writers[-1], os.WNOHANG)[0]:
            writers.pop()

    assert file.read_bytes() in wholes
    assert os.listdir(tmp_path) == ["answers"]
