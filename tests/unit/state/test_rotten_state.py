"""A state whose file was damaged is refused: what it names on the host would be undone."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.state.schema import CHECKSUM, KEY, StateDamaged
from pyshim.state.store import StateStore
from tests.unit.state.states import everything, written


@pytest.fixture
def store(tmp_path: Path) -> StateStore:
    return StateStore(root=str(tmp_path))


def test_every_flipped_bit_is_refused(store: StateStore) -> None:
    """One bit of every fifth byte, and every bit of the last 90, which hold the checksum."""
    store.save(everything())
    path = Path(f"{store.root}/sb1/persist.json")
    good = path.read_bytes()
    places = [(position, bit) for position in range(len(good)) for bit in range(8)]
    believed = []

    with open(path, "r+b", buffering=0) as file:
        for position, bit in (*places[::45], *places[-720:]):
            os.pwrite(file.fileno(), bytes((good[position] ^ 1 << bit,)), position)
            try:
                store.load("sb1")
            except ShimError:
                pass
            else:
                believed.append((position, bit))
            os.pwrite(file.fileno(), good[position : position + 1], position)

    assert believed == []
    assert store.load("sb1").ledger == everything().ledger


def rewrite(store: StateStore, document: object) -> None:
    Path(f"{store.root}/sb1/persist.json").write_text(json.dumps(document, separators=(",", ":")))


@pytest.mark.parametrize("checksum", [{CHECKSUM: "0" * 64}, {}], ids=["with one in another place", "without any"])
@pytest.mark.parametrize("version", [3, 4])
def test_a_file_without_its_checksum_at_the_end_is_refused(
    store: StateStore, version: int, checksum: dict[str, str]
) -> None:
    store.save(everything())
    document = written(everything())
    document[KEY] = {**checksum, **document[KEY], "Version": version}
    rewrite(store, document)

    with pytest.raises(StateDamaged, match="does not end in its checksum"):
        store.load("sb1")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_fifo_or_directory_in_the_files_place_is_refused_and_not_waited_for(
    store: StateStore, make: Callable[[str], None]
) -> None:
    os.mkdir(f"{store.root}/sb1")
    make(f"{store.root}/sb1/persist.json")

    with pytest.raises(StateDamaged, match="not a regular file"):
        store.load("sb1")
    assert not store.names_us("sb1")


def test_a_file_that_cannot_be_opened_is_named(store: StateStore) -> None:
    os.mkdir(f"{store.root}/sb1")
    os.symlink("persist.json", f"{store.root}/sb1/persist.json")

    with pytest.raises(FailedPrecondition, match=r"read state '.*/sb1/persist\.json': Too many levels"):
        store.load("sb1")


def test_a_fifo_in_the_registers_place_is_not_waited_for(tmp_path: Path) -> None:
    store = StateStore(root=str(tmp_path / "sbs"), register=str(tmp_path / "register"))
    os.mkdir(tmp_path / "register")
    os.mkfifo(tmp_path / "register/sb1")

    assert store.entered("sb1") is None
