"""States and the register on disk: read as written, whole or refused, never another's."""

import json
import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.task import ExitStatus
from pyshim.state.schema import CHECKSUM, KEY, ShimRecord, StateDamaged, StateTooNew
from pyshim.state.store import MAX_BYTES, StateStore, _sealed
from tests.unit.state.states import container, state, written


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(root=str(tmp_path / "sbs"))


def test_no_sandbox_or_container_has_the_name_of_a_file_written_aside(tmp_path: Path) -> None:
    store = StateStore(root=str(tmp_path / "sbs"), register=str(tmp_path / "register"))
    for number, name in enumerate(("sb1.new", "sb1"), start=1):
        store.enter(name, ShimRecord(pid=number, start_ticks=1, socket="", namespace="k8s.io"))

    assert sorted(store.entered_ids()) == ["sb1", "sb1.new"]
    entry = store.entered("sb1.new")
    assert entry is not None
    assert entry.pid == 1


def document(store: StateStore) -> dict:  # type: ignore[type-arg]
    """The file's document, without its checksum."""
    with open(f"{store.root}/sb1/persist.json", encoding="utf-8") as file:
        found = json.load(file)
    assert len(found[KEY].pop(CHECKSUM)) == 64
    return found  # type: ignore[no-any-return]


def rewrite(store: StateStore, text: str | bytes) -> None:
    Path(f"{store.root}/sb1/persist.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def test_each_container_has_a_file_of_its_own_until_it_is_gone(store: StateStore) -> None:
    store.save(state(container("c1"), container("c2")))
    with open(f"{store.root}/sb1/c2/persist.json", encoding="utf-8") as file:
        assert json.load(file)["BundlePath"] == "/bundles/c2"

    store.save(state(container("c1")))

    assert sorted(os.listdir(f"{store.root}/sb1")) == ["c1", "persist.json"]


def test_a_sandbox_that_comes_again_has_its_containers_files_again(store: StateStore) -> None:
    wanted = state(container("c1"))
    store.save(wanted)
    store.remove("sb1")

    store.save(wanted)

    assert sorted(os.listdir(f"{store.root}/sb1")) == ["c1", "persist.json"]


def test_only_the_files_of_containers_that_changed_are_written_again(store: StateStore) -> None:
    def files() -> dict[str, int]:
        return {name: os.stat(f"{store.root}/sb1/{name}/persist.json").st_ino for name in ("c1", "c2")}

    store.save(state(container("c1"), container("c2")))
    had = files()

    store.save(state(container("c1"), container("c2", ExitStatus(status=1, exited_at_ns=5))))

    has = files()
    assert has["c1"] == had["c1"]
    assert has["c2"] != had["c2"]


@pytest.mark.parametrize("text", ["/srv/\udcff", "\udc80"])
def test_half_of_a_character_is_written_and_read(store: StateStore, text: str) -> None:
    """A path that is not UTF-8 has one, and an annotation can: JSON's escapes spell it."""
    wanted = state(replace(container("c1"), annotations={text: text}, mounts=({"Source": text},)))

    store.save(wanted)

    assert store.load("sb1") == wanted
    assert json.loads(Path(f"{store.root}/sb1/c1/persist.json").read_bytes())["Mounts"] == [{"Source": text}]


def test_values_of_katas_keys_are_written_again_when_they_change(store: StateStore) -> None:
    had = state(container("c1"))
    store.save(had)
    assert had.snapshot is not None
    wanted = replace(had, snapshot=replace(had.snapshot, vmm_pid=13))

    store.save(wanted)

    assert document(store) == written(wanted)
    assert document(store)["HypervisorState"]["Pid"] == 13
    with open(f"{store.root}/sb1/c1/persist.json", encoding="utf-8") as file:
        assert json.load(file)["Process"]["Pid"] == 13


def test_a_container_that_comes_again_has_its_file_again(store: StateStore) -> None:
    store.save(state(container("c1")))
    store.save(state())
    assert not os.path.exists(f"{store.root}/sb1/c1")

    store.save(state(container("c1")))

    assert os.path.exists(f"{store.root}/sb1/c1/persist.json")


def test_containers_files_that_could_not_be_written_are_tried_again(store: StateStore) -> None:
    wanted = state(container("c1"))
    store.save(state())
    obstacle = Path(f"{store.root}/sb1/c1")
    obstacle.write_text("in the way")
    with pytest.raises(FailedPrecondition):
        store.save(wanted)
    obstacle.unlink()

    store.save(wanted)

    assert Path(f"{store.root}/sb1/c1/persist.json").exists()


def test_only_its_owner_can_read_it(store: StateStore) -> None:
    before = os.umask(0)
    try:
        store.save(state(container("c1")))
    finally:
        os.umask(before)

    for directory, _, names in os.walk(store.root):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        assert all(stat.S_IMODE(os.stat(f"{directory}/{name}").st_mode) == 0o600 for name in names)


def test_a_failed_write_leaves_the_old_state_whole(store: StateStore) -> None:
    store.save(state(planned=False))
    os.mkdir(f"{store.root}/sb1/.persist.json~")

    with pytest.raises(FailedPrecondition, match=r"write state .*sb1"):
        store.save(state(container("c1")))

    assert store.load("sb1") == state(planned=False)


def test_no_state_is_not_found(store: StateStore) -> None:
    with pytest.raises(NotFound, match=r"sb1/persist\.json"):
        store.load("sb1")


@pytest.mark.parametrize("sandbox_id", ["", ".", "..", "a/b", "../sb1", "a\0b"])
def test_an_id_that_is_a_path_is_refused(store: StateStore, sandbox_id: str) -> None:
    with pytest.raises(FailedPrecondition, match="not a sandbox id"):
        store.remove(sandbox_id)


def damaged(change: str) -> bytes:
    found = json.loads(json.dumps(GOOD))
    exec(change, {"d": found, "p": found["Pyshim"]})
    return sealed(found)


def sealed(document: object) -> bytes:
    return _sealed(json.dumps(document).encode().removesuffix(b"}}"))


GOOD = {
    "PersistVersion": 2,
    "State": "running",
    "Pyshim": {
        "Version": 4,
        "SandboxID": "sb1",
        "Shim": {"Pid": 1, "StartTicks": 2, "Socket": "", "Namespace": "n"},
        "Ledger": [{"Kind": "mount", "Key": "/m", "Detail": {}}],
        "Snapshot": None,
    },
}


def test_katas_own_keys_may_be_missing(store: StateStore) -> None:
    store.save(state())
    rewrite(store, sealed(GOOD))

    assert store.load("sb1").ledger == (LedgerEntry(kind=ResourceKind.MOUNT, key="/m"),)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        pytest.param(b"", "not JSON", id="empty"),
        pytest.param(json.dumps(GOOD)[:-20].encode(), "not JSON", id="cut off"),
        pytest.param(b"\xff\xfe", "not JSON", id="not text"),
        pytest.param(b"[" * 100_000, "not JSON", id="nested without end"),
        pytest.param(b"[]", "not a JSON object", id="a list"),
        pytest.param(b'{"PersistVersion": 2, "Pyshim": 3}', "Pyshim is not an object", id="our key is not an object"),
        pytest.param(damaged("del p['Ledger']"), "Ledger", id="no ledger"),
        pytest.param(damaged("p['Ledger'] = {}"), "Ledger is not a list", id="ledger is not a list"),
        pytest.param(damaged("p['Ledger'][0]['Kind'] = 'moon'"), "unknown kind 'moon'", id="unknown kind"),
        pytest.param(damaged("p['Ledger'][0]['Key'] = 7"), "Key is not a string", id="key is a number"),
        pytest.param(damaged("p['Shim']['Pid'] = '1'"), "Pid is not a whole number", id="pid is a string"),
        pytest.param(damaged("p['Shim']['Pid'] = True"), "Pid is not a whole number", id="pid is a truth"),
        pytest.param(damaged("p['SandboxID'] = 'other'"), "state of 'other'", id="another sandbox's"),
        pytest.param(damaged("del d['PersistVersion']"), "PersistVersion is missing", id="no version"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_file_and_place(store: StateStore, body: bytes, text: str) -> None:
    store.save(state())
    rewrite(store, body)

    with pytest.raises(StateDamaged, match=text) as caught:
        store.load("sb1")

    assert "sb1/persist.json" in str(caught.value)


@pytest.mark.parametrize("change", ["d['PersistVersion'] = 3", "p['Version'] = 5"])
def test_a_newer_version_is_refused(store: StateStore, change: str) -> None:
    store.save(state())
    rewrite(store, damaged(change))

    with pytest.raises(StateTooNew, match="reads up to 2/4"):
        store.load("sb1")


def test_a_huge_file_is_not_read(store: StateStore) -> None:
    store.save(state())
    os.truncate(f"{store.root}/sb1/persist.json", MAX_BYTES + 1)

    with pytest.raises(StateDamaged, match="larger than"):
        store.load("sb1")


def test_removing_takes_everything_and_again_is_harmless(tmp_path: Path) -> None:
    store = StateStore(root=str(tmp_path / "sbs"), register=str(tmp_path / "register"))
    store.enter("sb1", state().shim)
    store.save(state(container("c1")))
    Path(f"{store.root}/sb1/shim-monitor.sock").touch()

    store.remove("sb1")
    store.remove("sb1")

    assert (store.sandbox_ids(), store.entered_ids()) == ((), ())


def test_sandboxes_are_listed(store: StateStore) -> None:
    assert store.sandbox_ids() == ()

    store.save(state())

    assert store.sandbox_ids() == ("sb1",)


def test_a_state_that_has_grown_too_large_is_refused_before_anything_is_written(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(state())
    before = document(store)
    monkeypatch.setattr("pyshim.state.store.MAX_BYTES", 100)

    with pytest.raises(FailedPrecondition, match="bytes are above 100"):
        store.save(state(container("c1")))

    assert document(store) == before
    assert os.listdir(f"{store.root}/sb1") == ["persist.json"]
