"""Every write of a pod's state fails once, and fails from then on, as the kernel makes it fail: no descriptor is free,
or the file may not grow.

The pod serves on or refuses the call whose intent it cannot write, and after containerd's clean-up the machine is as it
was before. A disk that is really full is in tests/unit/state and integration/test_full_disk.py.
"""

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyshim.state.schema import SandboxState
from pyshim.state.store import StateStore
from tests.fakes.clock import run_fast_forward
from tests.fakes.machine import Machine, MachineStore
from tests.unit.failpoints.pod_life import PodLife

LIMITS = {"EMFILE": resource.RLIMIT_NOFILE, "EFBIG": resource.RLIMIT_FSIZE}


@contextlib.contextmanager
def exhausted(limit: int) -> Iterator[None]:
    """This process may have no more of what `limit` bounds."""
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


class TightStore(MachineStore):
    """Writes real files, of which those that `fails` names by their number, from 1, meet the exhausted `limit`."""

    def __init__(self, machine: Machine, directory: Path, limit: int, fails: Callable[[int], bool]) -> None:
        super().__init__(machine)
        self._files = StateStore(root=str(directory))
        self._limit, self._fails = limit, fails
        self.writes = 0

    def save(self, state: SandboxState) -> None:
        self.writes += 1
        with exhausted(self._limit) if self._fails(self.writes) else contextlib.nullcontext():
            self._files.save(state)
        super().save(state)

    def remove(self, sandbox_id: str) -> None:
        self._files.remove(sandbox_id)
        super().remove(sandbox_id)


def lived(directory: Path, how: str, fails: Callable[[int], bool]) -> tuple[int, list[str]]:
    """The number of writes of the state, and the errors of a pod's life. The machine is as before."""

    async def body() -> tuple[int, list[str]]:
        stores: list[TightStore] = []

        def store(machine: Machine) -> TightStore:
            stores.append(TightStore(machine, directory, LIMITS[how], fails))
            return stores[-1]

        life = PodLife(store=store)
        await life.live()
        await life.clean_up()
        await life.close()
        assert life.machine.left() == []
        return sum(one.writes for one in stores), life.errors

    return run_fast_forward(body())


@pytest.mark.parametrize("how", list(LIMITS))
def test_a_write_that_fails_once_refuses_its_call_by_name_and_leaves_nothing(tmp_path: Path, how: str) -> None:
    count, errors = lived(tmp_path, how, lambda _: False)
    assert errors == []

    refused = 0
    for nth in range(1, count + 1):
        _, errors = lived(tmp_path, how, lambda number, nth=nth: number == nth)  # type: ignore[misc]
        assert all("write state" in error and how in error for error in errors), f"write {nth}: {errors}"
        refused += bool(errors)

    assert 0 < refused < count


@pytest.mark.slow
@pytest.mark.parametrize("how", list(LIMITS))
def test_when_nothing_more_can_be_written_what_was_made_is_undone(tmp_path: Path, how: str) -> None:
    count, _ = lived(tmp_path, how, lambda _: False)

    for nth in range(1, count + 1):
        _, errors = lived(tmp_path, how, lambda number, nth=nth: number >= nth)  # type: ignore[misc]
        assert all("write state" in error for error in errors), f"from write {nth} on: {errors}"
