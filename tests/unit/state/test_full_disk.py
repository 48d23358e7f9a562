"""A small tmpfs of the test's own, filled for real: what was on disk stays readable."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[3]
Run = Callable[[str], dict[str, object]]

pytestmark = pytest.mark.root

_PRELUDE = """
import json, os, sys
sys.path[:0] = [{project!r}, {here!r}]
from tests.unit.state.states import container, snapshot, state, SHIM
from pyshim.model.errors import ShimError
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.ids import SandboxId
from pyshim.state.records import SandboxRecords
from pyshim.state.store import StateStore
top = {top!r}
store = StateStore(root=top + "/sbs", register=top + "/register")
def full():
    with open(top + "/filler", "ab", buffering=0) as file:
        try:
            while file.write(bytes(512)):
                pass
        except OSError:
            pass
async def undone(entry):
    pass
records = SandboxRecords(store=store, sandbox_id=SandboxId("sb1"), shim=SHIM, undo=undone)
def attempt(work):
    try:
        work()
    except ShimError as error:
        return str(error)
    return ""
entry = lambda key: LedgerEntry(kind=ResourceKind.MOUNT, key=key)
large = [container("c" * 30 + str(number)) for number in range(40)]
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script where `top` is a tmpfs of 64 KiB; what it prints is one JSON object."""

    def in_small_tmpfs(body: str) -> dict[str, object]:
        top = tmp_path / "small"
        top.mkdir()
        script = tmp_path / "script.py"
        here = str(Path(__file__).parent)
        script.write_text(_PRELUDE.format(project=str(PROJECT), here=here, top=str(top)) + body)
        command = f"mount -t tmpfs -o size=64k small '{top}' && exec '{sys.executable}' '{script}'"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found

    return in_small_tmpfs


def test_a_write_that_meets_a_full_disk_half_way_leaves_the_former_state(run: Run) -> None:
    found = run("""
records.ledger.acquire(entry("/a"))
full()
os.truncate(top + "/filler", os.path.getsize(top + "/filler") - 4096)  # room to begin, not to end
refused = attempt(lambda: records.save(snapshot(*large)))
acquired = attempt(lambda: records.ledger.acquire(entry("/b")))
print(json.dumps({
    "refused": refused,
    "ledger": [one.key for one in store.load("sb1").ledger],
    "planned": store.load("sb1").snapshot is not None,
    "files": sorted(os.listdir(top + "/sbs/sb1")),
    "held": [one.key for one in records.ledger.entries()],
}))
""")

    assert str(found["refused"]).endswith("ENOSPC (no space left on device)")
    assert found["ledger"] == ["/a"]
    assert found["planned"] is False
    assert found["files"] == ["persist.json"]
    assert found["held"] == ["/a"]


def test_with_room_again_the_state_is_written_again(run: Run) -> None:
    found = run("""
import asyncio
records.ledger.acquire(entry("/a"))
records.ledger.acquire(entry("/b"))
full()
async def strike_out():
    await records.ledger.release(entry("/a"))
    await asyncio.sleep(0.1)  # by then it was to be written; that it cannot be fails no call
asyncio.run(strike_out())
stale = [one.key for one in store.load("sb1").ledger]
os.unlink(top + "/filler")
records.save(snapshot(container("c1")))
print(json.dumps({"stale": stale, "after": [one.key for one in store.load("sb1").ledger]}))
""")

    assert found == {"stale": ["/a", "/b"], "after": ["/b"]}


def test_a_full_disk_from_the_start_refuses_the_first_intent_and_leaves_nothing_to_undo(run: Run) -> None:
    found = run("""
os.mkdir(top + "/sbs")
full()
refused = attempt(lambda: records.ledger.acquire(entry("/a")))
print(json.dumps({"refused": refused, "held": len(records.ledger.entries()), "known": store.has_record("sb1")}))
""")

    assert "no space left on device" in str(found["refused"])
    assert (found["held"], found["known"]) == (0, False)


def test_on_a_read_only_file_system_the_state_stays_and_each_refusal_says_so(run: Run) -> None:
    found = run("""
records.ledger.acquire(entry("/a"))
os.system(f"mount -o remount,ro '{top}'")
refused = attempt(lambda: records.ledger.acquire(entry("/b")))
removed = attempt(lambda: store.remove("sb1"))
print(json.dumps({
    "refused": refused,
    "removed": removed,
    "ledger": [one.key for one in store.load("sb1").ledger],
}))
""")

    assert str(found["refused"]).endswith("EROFS (read-only file system)")
    assert str(found["removed"]).endswith("EROFS (read-only file system)")
    assert found["ledger"] == ["/a"]
