"""Copied volumes: what is sent, in which order, and what happens when the source changes."""

import asyncio
import stat
from collections.abc import Callable, Iterator

import pytest

from pyshim.concurrency.tasks import TaskOwner
from pyshim.model.errors import FailedPrecondition, ShimError, Unavailable
from pyshim.model.ids import GuestPath
from pyshim.model.volumes import CopiedPiece, TreeEntry, VolumeCopy
from pyshim.resources.volumes.copying import PIECE_BYTES, VolumeCopies
from tests.fakes.host import FakeHost

SOURCE = "/volume"
VOLUME = VolumeCopy(source=SOURCE, guest_path=GuestPath("/guest/v"), follows=True)
DIRECTORY, FILE, LINK = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o640, stat.S_IFLNK | 0o777


class RecordingAgent:
    """Keeps every piece; `refuses` makes the call for a path fail."""

    def __init__(self) -> None:
        self.pieces: list[CopiedPiece] = []
        self.refuses = ""

    async def copy_file(self, piece: CopiedPiece) -> None:
        if self.refuses and piece.path.endswith(self.refuses):
            raise Unavailable(f"copy '{piece.path}': the guest refuses")
        self.pieces.append(piece)

    def sent(self) -> list[str]:
        """The paths since the last call of this."""
        names = [piece.path.removeprefix("/guest/v") for piece in self.pieces]
        self.pieces.clear()
        return names


class Rig:
    def __init__(self) -> None:
        self.host = FakeHost()
        self.tasks = TaskOwner()
        self.agent = RecordingAgent()
        self.copies = VolumeCopies(host=self.host, tasks=self.tasks, follow_pause_s=0.01)

    def tree(self, **entries: tuple[int, str]) -> None:
        """The source holds these: name (`__` for a slash) to mode and content, or a link's target."""
        self.host.trees[SOURCE] = [entry("", DIRECTORY)]
        for name, (mode, text) in entries.items():
            path = name.replace("__", "/").replace("DD", "..")
            self.host.files[f"{SOURCE}/{path}"] = text.encode()
            self.host.trees[SOURCE].append(entry(path, mode, text))

    async def use(self, user: str = "c1", volume: VolumeCopy = VOLUME) -> None:
        await self.copies.attach_one(volume, user, self.agent)  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110  (what is waited for is a fake's list)
                await asyncio.sleep(0.005)


def entry(path: str, mode: int, text: str = "", uid: int = 0) -> TreeEntry:
    is_file = stat.S_ISREG(mode)
    return TreeEntry(
        path=path,
        mode=mode,
        uid=uid,
        gid=uid,
        size_bytes=len(text) if is_file else 0,
        target=text if stat.S_ISLNK(mode) else "",
        changed_ns=hash(text) if is_file else 0,
    )


@pytest.fixture
def rig(fast_clock: None, runner: asyncio.Runner) -> Iterator[Rig]:
    rig = Rig()
    yield rig
    runner.run(rig.tasks.close())


async def test_files_come_before_links_and_the_kubelets_link_before_the_names_that_lead_through_it(rig: Rig) -> None:
    rig.tree(
        key=(LINK, "..data/key"), DDdata=(LINK, "..1"), DD1=(DIRECTORY, ""), DD1__key=(FILE, "value"), b=(FILE, "")
    )

    await rig.use()

    assert rig.agent.sent() == ["", "/..1", "/..1/key", "/b", "/..data", "/key"]


async def test_a_piece_says_all_of_a_file(rig: Rig) -> None:
    rig.host.trees[SOURCE] = [entry("", DIRECTORY), entry("f", FILE | stat.S_ISUID, "text", uid=7)]
    rig.host.files[f"{SOURCE}/f"] = b"text"

    await rig.use()

    file = next(piece for piece in rig.agent.pieces if piece.path == "/guest/v/f")
    assert (file.file_size, file.file_mode, file.uid, file.gid) == (4, FILE | stat.S_ISUID, 7, 7)
    assert (file.offset, file.data, file.dir_mode) == (0, b"text", 0o755)
    assert rig.agent.sent() == ["", "/f", ""], "the directory's owner is set again after a file of another owner"


async def test_a_large_file_goes_in_pieces_that_fit_a_frame(rig: Rig) -> None:
    text = "x" * (2 * PIECE_BYTES + 1)
    rig.tree(big=(FILE, text))

    await rig.use()

    pieces = [piece for piece in rig.agent.pieces if piece.path.endswith("big")]
    assert [(piece.offset, len(piece.data)) for piece in pieces] == [
        (0, PIECE_BYTES),
        (PIECE_BYTES, PIECE_BYTES),
        (2 * PIECE_BYTES, 1),
    ]
    assert {piece.file_size for piece in pieces} == {len(text)}


async def test_a_second_user_gets_what_changed_and_nothing_else(rig: Rig) -> None:
    rig.tree(a=(FILE, "1"), b=(FILE, "2"))
    await rig.use("c1")
    rig.agent.sent()

    await rig.use("c2")
    assert rig.agent.sent() == []

    rig.tree(a=(FILE, "1"), b=(FILE, "3"))
    await rig.until(lambda: bool(rig.agent.pieces))
    assert rig.agent.sent() == ["/b"]


async def test_what_is_gone_on_the_host_is_emptied_in_the_guest_after_the_new_version_is_there(rig: Rig) -> None:
    rig.tree(DDdata=(LINK, "..1"), DD1=(DIRECTORY, ""), DD1__key=(FILE, "secret"), key=(LINK, "..data/key"))
    await rig.use()
    rig.agent.sent()

    rig.tree(DDdata=(LINK, "..2"), DD2=(DIRECTORY, ""), DD2__key=(FILE, "newer"), key=(LINK, "..data/key"))
    await rig.until(lambda: any(piece.path.endswith("..1/key") for piece in rig.agent.pieces))

    last = rig.agent.pieces[-1]
    assert (last.path, last.file_size, last.data) == ("/guest/v/..1/key", 0, b"")
    assert rig.agent.sent() == ["/..2", "/..2/key", "/..data", "/..1/key"]


async def test_following_ends_with_the_last_user_and_a_plain_volume_is_never_followed(rig: Rig) -> None:
    rig.tree(a=(FILE, "1"))
    plain = VolumeCopy(source=SOURCE, guest_path=GuestPath("/guest/p"), follows=False)
    await rig.use("c1")
    await rig.use("c2")
    await rig.use("c1", plain)
    await rig.copies.detach(VOLUME, "c1")
    await rig.copies.detach(VOLUME, "c2")
    await rig.copies.detach(VOLUME, "c2")
    await rig.copies.detach(VolumeCopy(source="/x", guest_path=GuestPath("/x"), follows=True), "c1")
    rig.agent.sent()

    rig.tree(a=(FILE, "2"))
    seen = rig.host.faults.seen["list_tree"]
    await asyncio.sleep(0.1)

    assert rig.host.faults.seen["list_tree"] == seen
    assert rig.agent.sent() == []


async def test_a_source_that_fails_is_the_containers_error_but_only_delays_who_follows(rig: Rig) -> None:
    with pytest.raises(ShimError, match=SOURCE):
        await rig.use()

    rig.tree(a=(FILE, "1"))
    await rig.use()
    rig.agent.sent()
    good = rig.host.trees.pop(SOURCE)
    seen = rig.host.faults.seen["list_tree"]
    await rig.until(lambda: rig.host.faults.seen["list_tree"] > seen + 1)
    rig.host.trees[SOURCE] = [*good, entry("b", DIRECTORY)]

    await rig.until(lambda: bool(rig.agent.pieces))
    assert rig.agent.sent() == ["/b"]


async def test_a_file_that_did_not_arrive_is_sent_again(rig: Rig) -> None:
    rig.tree(a=(FILE, "1"))
    rig.agent.refuses = "/a"
    with pytest.raises(Unavailable):
        await rig.use()
    rig.agent.refuses = ""
    rig.agent.sent()

    await rig.use()

    assert rig.agent.sent() == ["/a"]


async def test_a_file_that_became_shorter_is_an_error_that_names_it(rig: Rig) -> None:
    rig.tree(a=(FILE, "long"))
    rig.host.files[f"{SOURCE}/a"] = b"l"

    with pytest.raises(FailedPrecondition, match="'/volume/a' into the guest: it became shorter"):
        await rig.use()
