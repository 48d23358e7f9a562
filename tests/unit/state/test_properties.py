"""Saving and restoring is the identity, whatever the state holds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.sandbox import ContainerSnapshot, SandboxSnapshot, SandboxStatus
from pyshim.model.task import ExitStatus, Status, Stdio
from pyshim.state.schema import KEY, SandboxState, ShimRecord, kata_container, state_from_json
from pyshim.state.store import StateStore
from tests.unit.state.kata_shape import (
    CONTAINER_STATE,
    DEVICE_STATE,
    ENDPOINT,
    HYPERVISOR_CONFIG,
    SANDBOX_STATE,
    ListOf,
    MapOf,
    Maybe,
    check,
)
from tests.unit.state.states import written

# All that a JSON text can hold, with lone surrogates, as of a path that is not UTF-8.
TEXTS = st.text(max_size=12) | st.just("\udcff/x")
WHOLES = st.integers(0, 2**53)
JSON = st.recursive(
    st.none() | st.booleans() | WHOLES | TEXTS,
    lambda below: st.lists(below, max_size=2) | st.dictionaries(TEXTS, below, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(TEXTS, JSON, max_size=3)


def of_shape(shape: Any) -> st.SearchStrategy[Any]:
    """Values of a shape, keys left out here and there."""
    match shape:
        case None:
            return JSON
        case Maybe(item):
            return st.none() | of_shape(item)
        case ListOf(item):
            return st.lists(of_shape(item), max_size=2)
        case MapOf(item):
            return st.dictionaries(TEXTS, of_shape(item), max_size=2)
        case dict():
            return st.fixed_dictionaries({}, optional={key: of_shape(below) for key, below in shape.items()})
        case bool():
            return st.booleans()
        case int():
            return WHOLES
        case float():
            return st.floats(0, 1024, width=32)
    return TEXTS


STDIO = st.builds(Stdio, stdin=TEXTS, stdout=TEXTS, stderr=TEXTS, terminal=st.booleans())
EXITS = st.none() | st.builds(ExitStatus, status=st.integers(0, 255), exited_at_ns=WHOLES)
CONTAINERS = st.builds(
    ContainerSnapshot,
    container_id=TEXTS.map(ContainerId),
    bundle=TEXTS.map(HostPath),
    status=st.sampled_from(Status),
    stdio=STDIO,
    exit=EXITS,
    rootfs=TEXTS.map(HostPath),
    annotations=st.dictionaries(TEXTS, TEXTS, max_size=2),
    resources=OBJECTS,
    device_maps=st.lists(OBJECTS, max_size=1).map(tuple),
    mounts=st.lists(OBJECTS, max_size=1).map(tuple),
)
SANDBOX_IDS = st.just(SandboxId("sb1"))
SNAPSHOTS = st.builds(
    SandboxSnapshot,
    sandbox_id=SANDBOX_IDS,
    status=st.sampled_from(SandboxStatus),
    config_source=TEXTS,
    hypervisor_type=TEXTS,
    hypervisor=OBJECTS,
    hypervisor_config=of_shape(HYPERVISOR_CONFIG),
    vmm_pid=WHOLES,
    agent_address=TEXTS,
    netns_path=TEXTS,
    sizing=OBJECTS,
    containers=st.lists(CONTAINERS, max_size=2).map(tuple),
    failure=TEXTS,
    owner=st.none() | TEXTS.filter(bool).map(ContainerId),
    endpoints=st.lists(of_shape(ENDPOINT), max_size=1).map(tuple),
    devices=st.lists(of_shape(DEVICE_STATE), max_size=1).map(tuple),
    sandbox_config=st.just({"SharePidNs": True}),
)
LEDGERS = st.lists(
    st.builds(
        LedgerEntry,
        kind=st.sampled_from(ResourceKind),
        key=TEXTS,
        detail=st.dictionaries(TEXTS, TEXTS | WHOLES, max_size=3),
    ),
    max_size=4,
).map(tuple)
STATES = st.builds(
    SandboxState,
    sandbox_id=SANDBOX_IDS,
    shim=st.builds(ShimRecord, pid=WHOLES, start_ticks=WHOLES, socket=TEXTS, namespace=TEXTS, pid_namespace=WHOLES),
    snapshot=st.none() | SNAPSHOTS,
    ledger=LEDGERS,
)


@given(STATES)
def test_a_saved_state_is_restored_unchanged(tmp_path_factory: pytest.TempPathFactory, state: SandboxState) -> None:
    store = StateStore(root=str(tmp_path_factory.mktemp("sbs")))
    own = replace(state, snapshot=state.snapshot and replace(state.snapshot, containers=()))

    store.save(own)

    assert store.load("sb1") == own


@given(STATES)
def test_every_state_is_restored_from_its_document(state: SandboxState) -> None:
    assert state_from_json(written(state), "state", sealed=True) == state


@given(STATES)
def test_every_document_has_katas_keys_and_types_and_one_of_ours(state: SandboxState) -> None:
    document = written(state)
    del document[KEY]
    if state.snapshot is None:
        assert document == {"PersistVersion": 2, "State": ""}
        return

    # The driver's and the resources' records are passed on unchanged.
    passed = {"HypervisorState": document.pop("HypervisorState"), **document["Config"].pop("HypervisorConfig")}
    assert passed["HypervisorState"].keys() >= {"Type", "Pid"}
    check(document, SANDBOX_STATE)
    assert [each["ID"] for each in document["Config"]["ContainerConfigs"]] == [
        each.container_id for each in state.snapshot.containers
    ]
    for container in state.snapshot.containers:
        check({**kata_container(container, state.snapshot.vmm_pid), "DeviceMaps": [], "Mounts": []}, CONTAINER_STATE)
