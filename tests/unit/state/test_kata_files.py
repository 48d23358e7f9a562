"""Our files have Kata's keys and types, Kata's files are left alone, and files of the last version are read."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.state.schema import KEY, NotOurState, StateDamaged, kata_container, state_from_json
from pyshim.state.store import StateStore
from tests.unit.state.kata_shape import CONTAINER_STATE, SANDBOX_STATE, check
from tests.unit.state.states import container, everything, state, written

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "state"


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def test_the_go_runtimes_files_have_every_key_that_we_know() -> None:
    assert golden("kata-go-sandbox.json").keys() == SANDBOX_STATE.keys()
    assert golden("kata-go-container.json").keys() == CONTAINER_STATE.keys()


def test_the_state_of_a_pod_with_everything_is_the_golden_file_with_katas_keys_and_types(tmp_path: Path) -> None:
    store = StateStore(root=str(tmp_path))
    store.save(everything())
    found = json.loads((tmp_path / "sb1/persist.json").read_text())

    if os.environ.get("PYSHIM_UPDATE_GOLDEN"):
        (GOLDEN / "pyshim-4.json").write_text(json.dumps(found, indent=1) + "\n")
    assert found == golden("pyshim-4.json")
    del found[KEY]
    check(found, SANDBOX_STATE)
    for name in ("c1", "c2"):
        check(json.loads((tmp_path / "sb1" / name / "persist.json").read_text()), CONTAINER_STATE)


def test_the_go_runtimes_state_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "b5c9").mkdir()
    (tmp_path / "b5c9/persist.json").write_bytes((GOLDEN / "kata-go-sandbox.json").read_bytes())

    with pytest.raises(NotOurState):
        StateStore(root=str(tmp_path)).load("b5c9")


def test_which_disk_has_which_index_is_katas_set_of_indices() -> None:
    found = state(container("c1"))
    assert found.snapshot is not None
    document = written(replace(found, snapshot=replace(found.snapshot, hypervisor={"BlockIndexMap": {"0": "disk-a"}})))

    assert document["HypervisorState"]["BlockIndexMap"] == {"0": {}}


def test_the_files_of_a_container_have_katas_keys_before_it_has_started() -> None:
    check(kata_container(container("c1"), 0), CONTAINER_STATE)


# ---- versions


def test_a_state_that_version_3_wrote_is_read_whole(tmp_path: Path) -> None:
    """A shim of that version may still run when its `delete` is of this one."""
    (tmp_path / "sb1").mkdir()
    shutil.copy(GOLDEN / "pyshim-3.json", tmp_path / "sb1/persist.json")

    found = StateStore(root=str(tmp_path)).load("sb1")

    wanted = everything()
    assert wanted.snapshot is not None
    assert found.snapshot is not None
    # Version 3 filled Kata's objects with zero values.
    unfilled = {name: getattr(wanted.snapshot, name) for name in ("hypervisor_config", "endpoints", "devices")}
    without_version = replace(wanted, shim=replace(wanted.shim, version=""))
    assert replace(found, snapshot=replace(found.snapshot, **unfilled)) == without_version
    assert [each["ID"] for each in found.snapshot.devices] == ["blk-1", "vu-1", "vfio-1"]


def test_a_state_that_version_3_wrote_before_its_plan_is_read() -> None:
    document = written(state(planned=False))
    document[KEY]["Version"] = 3

    assert state_from_json(document, "persist.json", sealed=True) == state(planned=False)


@pytest.mark.parametrize("version", [2, 1, 0, -1])
def test_a_version_before_checksums_is_refused_by_name(version: int) -> None:
    document = written(state())
    document[KEY]["Version"] = version

    with pytest.raises(StateDamaged, match=f"version {version}, and versions before 3 have no checksum"):
        state_from_json(document, "persist.json", sealed=False)


@pytest.mark.parametrize(
    "change", ["p['Snapshot'] = 5", "del d['Config']", "d['Network'] = []", "p['Snapshot']['Containers'] = [1]"]
)
def test_a_damaged_state_of_version_3_is_damage(change: str) -> None:
    document = json.loads((GOLDEN / "pyshim-3.json").read_text())
    exec(change, {"d": document, "p": document[KEY]})

    with pytest.raises(StateDamaged):
        state_from_json(document, "persist.json", sealed=True)
