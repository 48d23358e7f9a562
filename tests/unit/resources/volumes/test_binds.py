"""Volumes in the share: bound once for all users, named in the ledger before, and unmounted with the last user."""

import asyncio

import pytest

from pyshim.concurrency.undo import Undo
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.ids import HostPath
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.volumes import Bind, HostMount, TargetKind
from pyshim.resources.volumes.binds import Binds
from tests.fakes.host import FakeHost, Faults
from tests.fakes.ledger import FakeLedger


def bind(name: str) -> Bind:
    mount = HostMount(
        type="bind",
        source=f"/srv/{name}",
        target=HostPath(f"/m/{name}"),
        target_kind=TargetKind.LIKE_SOURCE,
        options=("rbind", "rprivate"),
        propagation=None,
        beneath=HostPath("/m"),
    )
    return Bind(mount=mount, place=f"8:1/srv/{name}", mount_flags=0, is_directory=True, is_one_mount=True)


A, B, C = (bind(name) for name in "abc")


class Rig:
    def __init__(self, faults: Faults | None = None) -> None:
        self.host = FakeHost(faults)
        self.ledger = FakeLedger(lambda entry: self._undo(entry))
        self.binds = Binds(host=self.host, ledger=self.ledger)
        self.broken: list[str] = []

    def _undo(self, entry: LedgerEntry) -> None:
        if entry.key in self.broken:
            self.broken.remove(entry.key)
            raise FailedPrecondition(f"release {entry.key}: EBUSY")
        if entry.kind is ResourceKind.MOUNT:
            self.host.mounts = [target for target in self.host.mounts if target != entry.key]

    async def attach(self, user: str, *binds: Bind) -> Undo:
        undo = Undo(user)
        try:
            await self.binds.attach(binds, user, undo)
        except ShimError:
            await undo.run()
            raise
        return undo


async def test_a_volume_is_bound_once_and_stays_until_its_last_user_goes() -> None:
    rig = Rig()
    first = await rig.attach("c1", A, B)
    second = await rig.attach("c2", B, C)
    assert rig.host.mounts == ["/m/a", "/m/b", "/m/c"]

    assert await first.run() is None
    assert rig.host.mounts == ["/m/b", "/m/c"]
    assert rig.binds.all() == (B, C)

    again = await rig.attach("c1", B)
    assert await second.run() is None
    assert await again.run() is None
    assert (rig.host.mounts, rig.ledger.held, rig.binds.all()) == ([], {}, ())
    assert await again.run() is None


async def test_intents_are_written_together_before_the_first_mount_and_undone_in_reverse() -> None:
    rig = Rig()
    seen: list[int] = []
    rig.host.before_effect = lambda _effect, _target: seen.append(len(rig.ledger.held))

    undo = await rig.attach("c1", A, B)
    await undo.run()

    assert seen == [4, 4]
    released = [(entry.key, entry.kind) for verb, entry in rig.ledger.history if verb == "release"]
    for target in ("/m/a", "/m/b"):
        assert released.index((target, ResourceKind.MOUNT)) < released.index((target, ResourceKind.DIRECTORY))


async def test_a_mount_that_fails_takes_nothing_from_other_users_and_may_be_tried_again() -> None:
    rig = Rig(Faults({"mount": 2}))
    first = await rig.attach("c1", A)

    with pytest.raises(ShimError):
        await rig.attach("c2", A, B)

    assert rig.host.mounts == ["/m/a"]
    second = await rig.attach("c3", A, B)
    assert rig.host.mounts == ["/m/a", "/m/b"]
    assert [await first.run(), await second.run()] == [None, None]
    assert rig.ledger.held == {}


async def test_two_containers_that_are_created_at_once_have_one_bind() -> None:
    rig = Rig()

    await asyncio.gather(rig.attach("c1", A, B, C), rig.attach("c2", C, B, A))

    assert sorted(rig.host.mounts) == ["/m/a", "/m/b", "/m/c"]


async def test_an_unmount_that_fails_holds_up_no_other_and_is_tried_again() -> None:
    rig = Rig()
    undo = await rig.attach("c1", A, B, C)
    rig.broken = ["/m/b"]

    assert str(await undo.run()) == "release /m/b: EBUSY"
    assert rig.host.mounts == ["/m/b"]
    assert await undo.run() is None
    assert rig.host.mounts == []


async def test_slow_unmounts_happen_at_the_same_time() -> None:
    rig = Rig()
    undo = await rig.attach("c1", A, B, C)
    all_begun = asyncio.Barrier(3)
    release = rig.ledger.release

    async def slow_release(entry: LedgerEntry) -> None:
        if entry.kind is ResourceKind.MOUNT:
            await all_begun.wait()
        await release(entry)

    rig.ledger.release = slow_release  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        assert await undo.run() is None
