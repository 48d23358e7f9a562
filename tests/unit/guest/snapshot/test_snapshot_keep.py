"""Keeping a process: the tracer on a real one, and the form in which it is written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from guest.snapshot.process import HEADER_BYTES, Mapping, Process, parse
from guest.snapshot.tracer import STACK_GUARD

CHECKOUT = Path(__file__).resolve().parents[4]
# On one CPU: the dynamic loader keeps which one it asked for its features.
KEEP = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.path.insert(0, sys.argv[1])
from guest.snapshot.tracer import keep
keep([sys.executable, "-I", "-S", "-c", sys.argv[3]], {"LC_ALL": "C.UTF-8"}, sys.argv[2])
"""
STOPS = "import os, time; drawn = os.urandom(32); now = time.monotonic(); os.kill(os.getpid(), 19)"

PROCESS = Process(
    {"rax": 0, "rip": 2**47 - 1, "fs_base": 5},
    (Mapping(4096, 8192, 5, 0, "/a file", None), Mapping(2**47 - 8192, 2**47, 3, 0, "[stack]", b"ab" * 4096)),
)


def kept(disk: Path, program: str) -> subprocess.CompletedProcess[str]:
    if os.geteuid() != 0:
        pytest.skip("a namespace of process ids is root's to make")
    disk.write_bytes(bytes(64 << 20))
    argv = [sys.executable, "-I", "-S", "-c", KEEP, CHECKOUT, disk, program]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def test_a_stopped_process_is_kept_and_twice_the_same(tmp_path: Path) -> None:
    processes = []
    for name in ("one", "two"):
        done = kept(tmp_path / name, STOPS)
        assert done.returncode == 0, done.stderr
        processes.append(parse((tmp_path / name).read_bytes()))

    first, second = processes
    assert first == second
    assert first.registers["rax"] == 0, "the call in which it stopped succeeds"
    (thread,) = [m for m in first.mappings if m.start <= first.registers["fs_base"] < m.end]
    assert thread.data is not None
    at = first.registers["fs_base"] - thread.start + 0x28
    assert int.from_bytes(thread.data[at : at + 8], "little") == STACK_GUARD
    code = [m for m in first.mappings if m.protection == 5]
    assert code
    assert all(m.data is None and m.path.startswith("/") for m in code)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit(3)", "it ended with status 0x300"),
        ("import os; os.kill(os.getpid(), 10)", "stopped by signal 10"),
        ("import ctypes; ctypes.string_at(8)", "stopped by signal 11"),
    ],
)
def test_a_subject_that_does_not_come_to_its_stop_is_an_error(tmp_path: Path, program: str, said: str) -> None:
    done = kept(tmp_path / "disk", program)

    assert done.returncode == 1
    assert said in done.stderr
    with pytest.raises(ValueError, match="Expecting value"):
        parse((tmp_path / "disk").read_bytes())


def test_what_is_written_is_read_back() -> None:
    written = b"".join(PROCESS.pieces())

    assert parse(written) == PROCESS
    assert parse(written + bytes(4096)) == PROCESS
    assert len(written) == HEADER_BYTES + 8192


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        ("file = open('/dev/null')", "it has /dev/null open"),
        ("import mmap; memory = mmap.mmap(-1, 4096)", "it shares the memory at"),
        ("import _thread, time; _thread.start_new_thread(time.sleep, (600,))", "it has 2 threads"),
    ],
)
def test_a_subject_that_is_more_than_its_memory_is_refused(tmp_path: Path, holds: str, said: str) -> None:
    done = kept(tmp_path / "disk", f"{holds}\n{STOPS}")

    assert done.returncode == 1
    assert f"keep the subject: {said}" in done.stderr


@pytest.mark.parametrize("length", [0, 10, HEADER_BYTES, HEADER_BYTES + 8191])
def test_a_part_of_it_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"Expecting value|Unterminated|read snapshot: 73728 bytes long"):
        parse(b"".join(PROCESS.pieces())[:length])


def test_pages_that_never_reached_the_disk_are_no_zeros_of_the_process() -> None:
    written = b"".join(PROCESS.pieces())

    with pytest.raises(ValueError, match="the pages on the disk are not those"):
        parse(written[:-4096] + bytes(4096))


def test_more_mappings_than_the_header_holds_are_refused() -> None:
    mappings = tuple(Mapping(4096 * n, 4096 * (n + 1), 1, 0, "/usr/lib/some.so", None) for n in range(2000))

    with pytest.raises(ValueError, match="2000 mappings do not fit"):
        next(Process({}, mappings).pieces())
