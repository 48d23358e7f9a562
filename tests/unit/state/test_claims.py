"""Claims of other sandboxes on CPUs, cgroups and cards: read from their states, by one shim at a time."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from pyshim.model.errors import DeadlineExceeded, FailedPrecondition
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.state import records
from pyshim.state.records import claimed_cgroups, exclusive_claim, pinned_cpus
from pyshim.state.store import StateStore
from tests.unit.state.states import state as some_state


def _keep(root: Path, sandbox_id: str, pinned: Mapping[str, int]) -> None:
    state = some_state()
    assert state.snapshot is not None
    snapshot = replace(state.snapshot, sandbox_id=sandbox_id, cgroups={"Pinned": dict(pinned)})  # type: ignore[arg-type]
    StateStore(root=str(root)).save(replace(state, sandbox_id=sandbox_id, snapshot=snapshot))  # type: ignore[arg-type]


def test_others_pins_are_known_and_our_own_left_out(tmp_path: Path) -> None:
    _keep(tmp_path, "one", {"0": 2, "1": 3})
    _keep(tmp_path, "two", {"0": 5})
    (tmp_path / "kata").mkdir()
    (tmp_path / "kata/persist.json").write_text("{}")

    with pinned_cpus("two", str(tmp_path)) as others:
        assert others == {2: "one", 3: "one"}


def test_a_node_without_states_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=f"lock '{tmp_path}/none'"), pinned_cpus("one", f"{tmp_path}/none"):
        pass


@pytest.mark.parametrize("path", ["/pod1/c1", '/system.slice/kata-ü "1".scope'])
def test_a_cgroup_is_its_sandboxs_from_the_intent_on(tmp_path: Path, path: str) -> None:
    for sandbox_id, kind, key in (
        ("one", ResourceKind.CGROUP, path),
        ("two", ResourceKind.CGROUP, f"{path}/vmm"),
        ("three", ResourceKind.DIRECTORY, path),
    ):
        ledger = (LedgerEntry(kind=kind, key=key),)
        StateStore(root=str(tmp_path)).save(replace(some_state(), sandbox_id=sandbox_id, ledger=ledger))  # type: ignore[arg-type]
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/persist.json").write_text(path)
    (tmp_path / "empty").mkdir()

    with claimed_cgroups("new", [path, "/other"], str(tmp_path)) as taken:
        assert taken == {path: "one"}
    with claimed_cgroups("one", [path, "/other"], str(tmp_path)) as taken:
        assert taken == {}


def test_an_exclusive_entry_excludes_other_sandboxes_even_without_its_shim(tmp_path: Path) -> None:
    card = LedgerEntry(kind=ResourceKind.VFIO, key="0000:41:08.0")
    for sandbox_id, kind, key in (
        ("dead", ResourceKind.VFIO, card.key),
        ("other-kind", ResourceKind.SOCKET, "0000:41:08.1"),
    ):
        ledger = (LedgerEntry(kind=kind, key=key),)
        StateStore(root=str(tmp_path)).save(replace(some_state(), sandbox_id=sandbox_id, ledger=ledger))  # type: ignore[arg-type]

    refusal = r"take vfio '0000:41:08\.0': sandbox 'dead' has it \(hint: .*'pyshim cleanup dead'\)"
    with pytest.raises(FailedPrecondition, match=refusal), exclusive_claim("new", card, str(tmp_path)):
        pass
    for sandbox_id, key in (("dead", card.key), ("new", "0000:41:08.1")):
        with exclusive_claim(sandbox_id, replace(card, key=key), str(tmp_path)):
            pass


def test_a_shim_that_decides_for_too_long_is_an_error_of_the_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_SHORT_WAIT_S", 0.1)
    card = LedgerEntry(kind=ResourceKind.VFIO, key="0000:41:08.0")

    with (
        pinned_cpus("one", str(tmp_path)),
        pytest.raises(DeadlineExceeded, match=r"take vfio '0000:41:08\.0': other shims decide for too long"),
        exclusive_claim("two", card, str(tmp_path)),
    ):
        pass


def test_while_one_shim_decides_the_others_wait(tmp_path: Path) -> None:
    done = threading.Event()

    def decide() -> None:
        with pinned_cpus("two", str(tmp_path)):
            done.set()

    with pinned_cpus("one", str(tmp_path)):
        other = threading.Thread(target=decide)
        other.start()
        assert not done.wait(0.1)
        with claimed_cgroups("three", ["/a"], str(tmp_path)) as taken:
            assert taken is None

    assert done.wait(30)
    other.join()
    with claimed_cgroups("three", ["/a"], str(tmp_path)) as taken:
        assert taken == {}
