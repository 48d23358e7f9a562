"""Which CPUs other sandboxes pin: out of their states, one shim at a time."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from states import state as some_state

from pyshim.model.errors import FailedPrecondition
from pyshim.state.pins import pinned_elsewhere
from pyshim.state.store import StateStore


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

    with pinned_elsewhere("two", str(tmp_path)) as others:
        assert others.taken == {2: "one", 3: "one"}


def test_a_node_without_states_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=f"lock '{tmp_path}/none'"):
        pinned_elsewhere("one", f"{tmp_path}/none")
