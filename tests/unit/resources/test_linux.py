import asyncio
import os
import stat
import threading
from pathlib import Path

import pytest

from pyshim.cleanup.undo import undo_entry
from pyshim.host.processes.children import Children
from pyshim.host.threads import thread_to_the_end
from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound, ShimError
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.volumes import SourceKind
from pyshim.resources.linux import LinuxHost


@pytest.fixture
def host() -> LinuxHost:
    return LinuxHost(children=Children(), undo_entry=undo_entry, template_maker="")


def test_a_file_is_read_whole(host: LinuxHost, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")

    assert asyncio.run(host.read_bytes(f"{tmp_path}/file", 5)) == b"12345"


def test_a_file_larger_than_wanted_is_refused(host: LinuxHost, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")

    with pytest.raises(InvalidArgument, match=r"file': larger than 4 bytes"):
        asyncio.run(host.read_bytes(f"{tmp_path}/file", 4))


@pytest.mark.parametrize(
    ("name", "error"),
    [("missing", NotFound), ("fifo", InvalidArgument), ("fifo/below", NotFound), (".", ShimError), ("loop", ShimError)],
)
def test_what_is_no_file_is_an_error_that_names_it_and_is_not_waited_for(
    host: LinuxHost, tmp_path: Path, name: str, error: type[ShimError]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(error, match=f"{tmp_path}/{name}"):
        asyncio.run(host.read_bytes(f"{tmp_path}/{name}", 100))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("directory", SourceKind.DIRECTORY),
        ("file", SourceKind.FILE),
        ("link", SourceKind.DIRECTORY),
        ("fifo", SourceKind.OTHER),
        ("/dev/null", SourceKind.OTHER),
        ("missing", SourceKind.MISSING),
        ("dangling", SourceKind.MISSING),
        ("file/below", SourceKind.MISSING),
    ],
)
def test_a_volumes_source_is_looked_at_with_links_followed(
    host: LinuxHost, tmp_path: Path, path: str, kind: SourceKind
) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("directory")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")

    assert asyncio.run(host.source_facts(os.path.join(tmp_path, path), "")).kind is kind


@pytest.mark.parametrize("exists", [True, False])
def test_a_directory_has_exactly_the_mode_asked_for(host: LinuxHost, tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "a/b"
    if exists:
        path.mkdir(parents=True, mode=0o755)
    before = os.umask(0o077)
    try:
        asyncio.run(host.make_directory(str(path), 0o711))
    finally:
        os.umask(before)

    assert stat.S_IMODE(path.stat().st_mode) == 0o711


def test_a_file_in_a_directorys_place_is_an_error_that_names_it(host: LinuxHost, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(FailedPrecondition, match=f"make directory '{tmp_path}/file'"):
        asyncio.run(host.make_directory(f"{tmp_path}/file", 0o700))


@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_cancelled_change_has_ended_before_its_undo_can_start(tmp_path: Path, cancels: int) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    order: list[str] = []

    def slow() -> None:
        with open(fifo, "rb") as gate:
            gate.read()
        order.append("change")

    task = asyncio.ensure_future(thread_to_the_end(slow))
    gate = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    os.close(gate)
    with pytest.raises(asyncio.CancelledError):
        await task
    order.append("undo")

    assert order == ["change", "undo"]


@pytest.mark.parametrize(
    ("entry", "is_quick"),
    [
        (LedgerEntry(kind=ResourceKind.SOCKET, key="/run/vc/sbs/sb1/shim-monitor.sock"), True),
        (LedgerEntry(kind=ResourceKind.DIRECTORY, key="/run/vc/vm/sb1"), False),
        (LedgerEntry(kind=ResourceKind.REMOTE_VM, key="sb1", detail={"state": "stopped"}), True),
        (LedgerEntry(kind=ResourceKind.REMOTE_VM, key="sb1", detail={"state": "started"}), False),
        (LedgerEntry(kind=ResourceKind.DIRECTORY, key="/run/kata-containers/shared/sandboxes/sb1"), False),
        (LedgerEntry(kind=ResourceKind.MOUNT, key="/run/vc/vm/sb1"), False),
    ],
)
def test_only_what_may_take_long_is_undone_in_a_thread(entry: LedgerEntry, is_quick: bool) -> None:
    threads: list[threading.Thread] = []
    host = LinuxHost(
        children=Children(), undo_entry=lambda entry: threads.append(threading.current_thread()), template_maker=""
    )

    asyncio.run(host.undo(entry))

    assert [thread is threading.main_thread() for thread in threads] == [is_quick]
