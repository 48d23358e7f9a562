"""Saving and restoring is the identity, whatever the state holds."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pyshim.model.ids import ContainerId, ExecId, HostPath, SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.snapshot import ContainerSnapshot, ExecSnapshot, SandboxSnapshot, SandboxStatus, StreamPositions
from pyshim.model.task import ExitStatus, Status, Stdio
from pyshim.state.kata import completed, container_as_kata_sees, kata_container, kata_sandbox
from pyshim.state.kata_shape import (
    CONTAINER_STATE,
    DEVICE_STATE,
    ENDPOINT,
    HYPERVISOR_CONFIG,
    SANDBOX_STATE,
    ListOf,
    MapOf,
    Maybe,
    OneOf,
    filled,
)
from pyshim.state.schema import CHECKSUM, KEY, SandboxState, ShimRecord, state_from_json
from pyshim.state.store import _StateText
from tests.unit.state.states import written

# What a JSON text can hold; a lone surrogate, as of a path that is no UTF-8, among it.
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
        case OneOf(items):
            return st.one_of(*map(of_shape, items))
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
MOVED = st.builds(StreamPositions, stdin=WHOLES, stdout=WHOLES, stderr=WHOLES)
EXECS = st.builds(
    ExecSnapshot,
    exec_id=TEXTS.map(ExecId),
    status=st.sampled_from(Status),
    stdio=STDIO,
    exit=EXITS,
    moved=MOVED,
    spec=OBJECTS,
)
CONTAINERS = st.builds(
    ContainerSnapshot,
    container_id=TEXTS.map(ContainerId),
    bundle=TEXTS.map(HostPath),
    status=st.sampled_from(Status),
    stdio=STDIO,
    exit=EXITS,
    rootfs=TEXTS.map(HostPath),
    moved=MOVED,
    execs=st.lists(EXECS, max_size=2).map(tuple),
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
    snapshot=st.none() | SNAPSHOTS.map(completed),
    ledger=LEDGERS,
)


@given(STATES)
def test_what_was_saved_is_restored_as_it_was(state: SandboxState) -> None:
    assert state_from_json(written(state), "state") == state


@given(st.lists(STATES, min_size=2, max_size=3), st.data())
def test_the_text_of_a_state_is_its_own_whatever_was_written_before(
    states: list[SandboxState], data: st.DataObject
) -> None:
    text = _StateText()
    # Neighbours that differ in little are what the text keeps parts for.
    for state in states:
        mixed = replace(state, ledger=data.draw(st.sampled_from(states)).ledger)
        if mixed.snapshot is not None:
            containers = [each.snapshot.containers for each in states if each.snapshot is not None]
            mixed = replace(mixed, snapshot=replace(mixed.snapshot, containers=data.draw(st.sampled_from(containers))))
        for each in (state, mixed, state):
            found = json.loads(text.document(each))
            del found[KEY][CHECKSUM]
            assert found == written(each)


@given(STATES)
def test_every_document_has_katas_keys_and_types_and_one_of_ours(state: SandboxState) -> None:
    document = written(state)
    del document[KEY]
    if state.snapshot is None:
        assert document == {"PersistVersion": 2, "State": ""}
        return

    assert filled(document, SANDBOX_STATE, "") == document
    assert document.keys() == SANDBOX_STATE.keys()
    assert document == kata_sandbox(state.snapshot)  # what `as_kata_sees` leaves out is in none of the keys
    for container in state.snapshot.containers:
        of_container = kata_container(container, state.snapshot.vmm_pid)
        assert of_container == kata_container(container_as_kata_sees(container), state.snapshot.vmm_pid)
        assert of_container.keys() == CONTAINER_STATE.keys()
