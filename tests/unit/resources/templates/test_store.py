"""The directory of templates: whole ones are found, and nothing else is."""

import json
import os
import time
from pathlib import Path

import pytest

from pyshim.host.file_answers import file_identity
from pyshim.model.errors import FailedPrecondition, NotFound, ResourceExhausted, ShimError, Unavailable
from pyshim.resources.templates import store as module
from pyshim.resources.templates.plan import MachineFacts, StoredTemplate
from pyshim.resources.templates.store import MOST_TEMPLATES, TemplateDamaged, TemplateStore, machine_facts, write_record
from tests.fakes.vm_config import vm_config, with_boot, with_memory

K1, K2, NEW = (digit * 32 for digit in "12f")
VM = with_memory(vm_config(), boot_mib=1)
NO_FACTS = MachineFacts(files=(), cpu="", host_kernel="")


def make(store: TemplateStore, key: str, facts: MachineFacts = NO_FACTS) -> str:
    with store.locked(), store.making(key, 1) as directory:
        for name in ("memory", "state"):
            with open(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(b"x" * (1 << 20))
        write_record(directory, key, VM, facts)
    return store.find(key)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "templates"


@pytest.fixture
def store(root: Path) -> TemplateStore:
    return TemplateStore(str(root))


def test_a_template_is_found_until_it_is_discarded(store: TemplateStore, root: Path) -> None:
    with pytest.raises(NotFound):
        store.find(K1)
    directory = make(store, K1)

    assert directory == f"{root}/{K1}"
    assert {oct(path.stat().st_mode & 0o777) for path in Path(directory).iterdir()} == {"0o600"}
    assert oct(root.stat().st_mode & 0o777) == "0o700"
    (found,) = store.all()
    assert isinstance(found, StoredTemplate)
    assert (found.template.key, found.template.memory_mib, found.template.vcpus) == (K1, 1, 1)
    assert found.used_bytes >= 2 << 20

    store.discard(K1)
    store.discard(K1)
    with pytest.raises(NotFound):
        store.find(K1)


def test_all_templates_go_together(store: TemplateStore, root: Path) -> None:
    make(store, K1)
    make(store, K2)

    assert store.discard_all() == 2
    assert not root.exists()
    assert store.discard_all() == 0


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: os.truncate(path / "memory", 4096), "other sizes"),
        (lambda path: os.truncate(path / "state", 5), "other sizes"),
        (lambda path: (path / "state").unlink(), "a file of it is missing"),
        (lambda path: (path / "template.json").write_text("{"), "template.json"),
        (lambda path: _flip(path / "template.json"), r"template.json': not JSON: not UTF-8 at byte 8"),
        (lambda path: _flip(path / "state"), "'state' has another content"),
        (lambda path: _rewrite(path, state_sha256=""), "'state' has another content"),
        (lambda path: _rewrite(path, made_ns=time.time_ns() + 3600 * 10**9), "the clock was set back"),
        (lambda path: os.chmod(path / "memory", 0o646), "others can open 'memory'"),
        (lambda path: os.chmod(path / "state", 0o640), "others can open 'state'"),
        (lambda path: os.chown(path / "state", 12345, -1), "others can open 'state'"),
        (lambda path: os.rename(path, path.parent / "moved"), "there is none"),
    ],
)
def test_a_damaged_template_is_named_and_removed(store: TemplateStore, root: Path, damage: object, reason: str) -> None:
    path = Path(make(store, K1))
    damage(path)  # type: ignore[operator]

    with pytest.raises(ShimError, match=reason):
        store.find(K1)

    assert not path.exists()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8] = 0xFF
    path.write_bytes(data)


def _rewrite(path: Path, **members: object) -> None:
    record = json.loads((path / "template.json").read_text())
    (path / "template.json").write_text(json.dumps(record | members))


def test_one_under_another_name_is_not_of_that_machine(store: TemplateStore, root: Path) -> None:
    os.rename(make(store, K1), root / K2)

    assert [type(each) for each in store.all()] == [TemplateDamaged]
    with pytest.raises(TemplateDamaged):
        store.find(K2)


def test_an_old_template_is_not_used(store: TemplateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    make(store, K1)
    now_ns = time.time_ns()
    monkeypatch.setattr(module.time, "time_ns", lambda: now_ns + 31 * 86_400 * 10**9)

    with pytest.raises(TemplateDamaged, match="31 days old"):
        store.find(K1)


def test_what_is_known_of_failed_attempts_goes_with_the_template_or_after_its_hour(
    store: TemplateStore, root: Path
) -> None:
    for key in (K1, K2):
        make(store, key)
        store.note_trial(key, "no room")
    store.discard(K1)
    assert [path.name for path in root.glob("*.tried")] == [f"{K2}.tried"]

    assert list(store.discard_useless(dry_run=False)) == []
    os.utime(root / f"{K2}.tried", (0, 0))
    assert len(list(store.discard_useless(dry_run=True))) == 1
    assert len(list(store.discard_useless(dry_run=False))) == 1

    assert sorted(path.name for path in root.iterdir()) == [K2]


def test_a_failed_making_leaves_nothing_and_what_was_there(store: TemplateStore, root: Path) -> None:
    make(store, K1)

    def fail() -> None:
        with store.locked(), store.making(K1, 1) as directory:
            Path(directory, "memory").write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert sorted(path.name for path in root.iterdir()) == [K1]
    store.find(K1)


def test_what_a_killed_maker_left_is_gone_with_the_next(store: TemplateStore, root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "making").mkdir()
    (root / "making/memory").write_bytes(b"half")

    make(store, K1)

    assert sorted(path.name for path in root.iterdir()) == [K1]


def test_of_two_makers_one_makes_it(store: TemplateStore) -> None:
    with store.locked() as lock:
        copy = os.dup(lock.fileno())
        with pytest.raises(Unavailable, match="another process makes one"):
            make(TemplateStore(store._root), K1)

    with pytest.raises(Unavailable):  # whoever has a copy of the descriptor has the lock
        make(store, K1)
    os.close(copy)
    make(store, K1)


def test_one_that_could_not_be_made_is_not_asked_for_again_so_soon(store: TemplateStore, root: Path) -> None:
    store.note_trial(K1)  # there is no directory for it: nothing happens
    make(store, K2)
    assert not store.was_tried(K1)

    store.note_trial(K1, "no room")

    assert store.was_tried(K1)
    assert [str(each) for each in store.all() if isinstance(each, TemplateDamaged)] == [
        f"make template {K1!r}: no room"
    ]
    far_s = 2 * int(time.time())  # the clock was set back after the trial
    for when_s in (0, far_s):
        os.utime(root / f"{K1}.tried", (when_s, when_s))
        assert not store.was_tried(K1)
    store.note_trial(K1)
    make(store, K1)
    assert not store.was_tried(K1)
    store.note_trial(NEW)
    assert store.discard_all() == 2
    assert not root.exists()


def test_templates_are_bounded_in_bytes(store: TemplateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 5 << 20)  # each has 2 MiB and its record
    for key in (K1, K2, NEW):
        make(store, key)

    assert {each.template.key for each in store.all() if isinstance(each, StoredTemplate)} == {K2, NEW}
    monkeypatch.setattr(module, "MOST_BYTES", 1)
    make(store, K1)
    assert {each.template.key for each in store.all() if isinstance(each, StoredTemplate)} == {K1}


def test_no_template_is_begun_without_room_for_it(store: TemplateStore) -> None:
    with pytest.raises(ResourceExhausted, match="are free"), store.locked(), store.making(K1, 1 << 40):
        pytest.fail("begun")


def test_a_root_that_is_no_directory_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    os.chmod(tmp_path / "real", 0o755)

    for root in ("link", "real"):
        with pytest.raises(FailedPrecondition), TemplateStore(str(tmp_path / root)).locked():
            pytest.fail("begun")
        assert os.listdir(tmp_path / "real") == []


def test_files_of_others_below_the_root_stay(store: TemplateStore, root: Path) -> None:
    make(store, K1)
    for place in (root / "file", root / K1 / "file", root / K2):
        place.write_text("of others")

    assert store.discard_all() == 2

    assert sorted(path.relative_to(root).as_posix() for path in root.rglob("*")) == sorted(
        [K1, f"{K1}/file", K2, "file"]
    )


def test_the_one_used_least_recently_makes_room(store: TemplateStore, root: Path) -> None:
    keys = [f"{number:032x}" for number in range(MOST_TEMPLATES)]
    for age, key in enumerate(reversed(keys)):
        record = Path(make(store, key), "template.json")
        os.utime(record, (age, age))
    store.find(keys[7])  # the oldest so far

    make(store, NEW)

    assert sorted(each.template.key for each in store.all() if isinstance(each, StoredTemplate)) == sorted(
        {*keys, NEW} - {keys[6]}
    )


def test_facts_change_with_the_files(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel"
    kernel.write_bytes(b"1")
    vm = with_boot(vm_config(hypervisor_path="/bin/true"), kernel=str(kernel), initrd=None, image=None)
    before = machine_facts(vm)

    assert machine_facts(vm) == before
    kernel.write_bytes(b"22")
    assert machine_facts(vm) != before
    kernel.unlink()
    with pytest.raises(FailedPrecondition, match="kernel"):
        machine_facts(vm)


def test_what_no_vm_can_continue_from_is_found_and_removed(store: TemplateStore, root: Path, tmp_path: Path) -> None:
    kernel = tmp_path / "vmlinux"
    kernel.write_bytes(b"one")
    facts = MachineFacts(files=((str(kernel), file_identity(kernel.stat())),), cpu="", host_kernel="")
    make(store, K1, facts)
    make(store, K2)
    (root / "making").mkdir()
    assert [each.template.key for each in store.all() if isinstance(each, StoredTemplate)] == [K1, K2]

    kernel.write_bytes(b"another")

    said = [
        f"make template in '{root}': the process that made it has gone",
        f"use template {K1!r}: it was made with another {str(kernel)!r}",
    ]
    with store.locked():
        assert list(TemplateStore(str(root)).discard_useless(dry_run=False)) == []
    assert list(store.discard_useless(dry_run=True)) == said
    assert list(store.discard_useless(dry_run=False)) == said
    assert list(store.discard_useless(dry_run=False)) == []
    assert sorted(path.name for path in root.iterdir()) == [K2]
