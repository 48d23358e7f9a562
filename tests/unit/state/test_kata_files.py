"""Files of Kata's Go runtime are read, and ours are what its reader expects."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.state.errors import NotOurState, StateDamaged
from pyshim.state.kata import completed, kata_container, kata_container_from_json, kata_from_json
from pyshim.state.kata_shape import CONTAINER_STATE, SANDBOX_STATE, filled
from pyshim.state.schema import KEY, state_from_json
from pyshim.state.store import StateStore
from tests.unit.state.states import container, everything, state, written

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "state"


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def test_a_sandbox_that_the_go_runtime_wrote_loads_complete() -> None:
    """The sample is encoding/json's of structs with Kata's fields: nil slices and maps are null."""
    found = kata_from_json(golden("kata-go-sandbox.json"), "persist.json")

    assert found["HypervisorState"]["Pid"] == 4242
    assert found["Config"]["HypervisorConfig"]["NumVCPUsF"] == 1.5
    assert found["HypervisorState"]["Bridges"] == []
    assert found["Devices"][0]["BlockDrive"]["File"] == "/dev/loop1"
    assert "VFIODevs" not in found["Devices"][0]
    assert found["Network"]["Endpoints"][0]["Veth"]["NetPair"]["VirtIface"]["Name"] == "eth0"
    assert found == kata_from_json(found, "again")


def test_a_container_that_the_go_runtime_wrote_loads_complete() -> None:
    found = kata_container_from_json(golden("kata-go-container.json"), "persist.json")

    assert found["Process"]["StartTime"] == "2026-09-01T10:11:12.000131415Z"
    assert found["Mounts"][0]["HostPath"] == ""


def test_the_sample_has_every_key_that_we_know() -> None:
    """Not the pointers it leaves out: those are in other samples of the same reader, our own files among them."""
    assert golden("kata-go-sandbox.json").keys() == SANDBOX_STATE.keys()
    assert golden("kata-go-container.json").keys() == CONTAINER_STATE.keys()


@pytest.mark.parametrize("parent", ["pcie.0", 0], ids=["Kata 4.0 and later", "before"])
def test_the_parent_of_a_bridge_is_read_in_both_its_forms(parent: object) -> None:
    document = golden("kata-go-sandbox.json")
    bridge = {"DeviceAddr": {"2": "d1"}, "Type": "pci", "ID": "pci-bridge-0", "Addr": 2, "ParentID": parent}
    document["HypervisorState"]["Bridges"] = [bridge]

    found = kata_from_json(document, "persist.json")

    assert found["HypervisorState"]["Bridges"] == [{**bridge, "ParentAddr": 0}]


def test_the_state_of_a_pod_with_everything_is_the_golden_file(tmp_path: Path) -> None:
    """Kata 4.x's Go runtime decodes each of its keys: the parent of a bridge is a string."""
    store = StateStore(root=str(tmp_path))
    store.save(everything())
    found = json.loads((tmp_path / "sb1/persist.json").read_text())

    if os.environ.get("PYSHIM_UPDATE_GOLDEN"):
        (GOLDEN / "pyshim-3.json").write_text(json.dumps(found, indent=1) + "\n")
    assert found == golden("pyshim-3.json")
    assert found["HypervisorState"]["Bridges"][0]["ParentID"] == ""
    del found[KEY]
    assert kata_from_json(found, "ours") == found


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("d['HypervisorState']['Pid'] = '1'", "HypervisorState.Pid"),
        ("d['Devices'][0]['ColdPlug'] = 1", r"Devices\[0\].ColdPlug"),
        ("d['Config']['ContainerConfigs'][0]['Annotations'] = []", "Annotations"),
        ("d['HypervisorState']['Bridges'] = [{'ParentID': []}]", "ParentID is not a string"),
        ("d['Network'] = None", "Network is not an object"),
    ],
)
def test_a_value_of_another_type_is_named(change: str, key: str) -> None:
    document = golden("kata-go-sandbox.json")
    exec(change, {"d": document})

    with pytest.raises(StateDamaged, match=rf"{key}.*\(persist\.json\)"):
        kata_from_json(document, "persist.json")


def test_keys_of_a_later_kata_are_kept() -> None:
    document = golden("kata-go-sandbox.json")
    document["Config"]["NewKey"] = {"a": 1}

    assert kata_from_json(document, "f")["Config"]["NewKey"] == {"a": 1}


def test_the_go_runtimes_state_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "b5c9").mkdir()
    (tmp_path / "b5c9/persist.json").write_bytes((GOLDEN / "kata-go-sandbox.json").read_bytes())

    with pytest.raises(NotOurState):
        StateStore(root=str(tmp_path)).load("b5c9")


def test_what_we_write_is_what_a_strict_reader_of_katas_expects() -> None:
    document = written(state(container("c1")))
    del document[KEY]

    assert filled(document, SANDBOX_STATE, "") == document
    of_container = kata_container(container("c1"), 12)
    assert filled(of_container, CONTAINER_STATE, "") == of_container
    # Go's time.Time refuses an empty string.
    assert of_container["Process"]["StartTime"] == "0001-01-01T00:00:00Z"


def test_which_disk_has_which_index_is_katas_set_of_indices() -> None:
    found = state(container("c1"))
    assert found.snapshot is not None
    document = written(replace(found, snapshot=replace(found.snapshot, hypervisor={"BlockIndexMap": {"0": "disk-a"}})))

    assert document["HypervisorState"]["BlockIndexMap"] == {"0": {}}  # type: ignore[index]


# ---- versions


def test_a_state_of_version_1_is_migrated_with_all_it_held() -> None:
    found = state_from_json(golden("pyshim-1.json"), "persist.json")

    assert [entry.key for entry in found.ledger] == ["/run/vc/vm/sb1", "/run/vc/vm/sb1/qmp"]
    assert found.snapshot is not None
    assert [(one.container_id, one.execs) for one in found.snapshot.containers] == [("app", ()), ("old", ())]
    assert found.snapshot.containers[1].exit is not None
    assert found.snapshot.owner == "app"
    assert found.snapshot.hypervisor["UUID"] == "u-1"
    again = written(found)
    assert again[KEY]["Version"] == 3  # type: ignore[index]
    assert state_from_json(again, "again") == replace(found, snapshot=completed(found.snapshot))


def test_a_state_of_version_1_without_a_plan_is_migrated() -> None:
    document = golden("pyshim-1.json")
    document[KEY]["Snapshot"] = None

    found = state_from_json(document, "persist.json")

    assert (found.snapshot, len(found.ledger)) == (None, 2)


@pytest.mark.parametrize("version", [0, -1])
def test_an_unknown_version_is_damage(version: int) -> None:
    document = golden("pyshim-1.json")
    document[KEY]["Version"] = version

    with pytest.raises(StateDamaged, match="never written"):
        state_from_json(document, "persist.json")


@pytest.mark.parametrize("change", ["s['Containers'] = 5", "del s['Containers']", "s['Containers'] = [1]"])
def test_a_damaged_older_state_is_damage(change: str) -> None:
    document = golden("pyshim-1.json")
    exec(change, {"s": document[KEY]["Snapshot"]})

    with pytest.raises(StateDamaged):
        state_from_json(document, "persist.json")
