"""What a process tells the kernel about its memory. Each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyshim.host.memory.mappings import PAGE_BYTES, as_runs

REPOSITORY = Path(__file__).resolve().parents[3]
MM = Path("/sys/kernel/mm")


def printed_by(script: str) -> list[str]:
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{script}"
    done = subprocess.run([sys.executable, "-ISc", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


LOOK = """
import os
from pyshim.host.memory import advice as memory

def regions(flag):
    found = set()
    for line in open("/proc/self/smaps"):
        words = line.split()
        if words[0] == "VmFlags:":
            if flag in words:
                found.add(name)
        elif not words[0].endswith(":"):
            name = words[5] if len(words) > 5 else "anonymous"
    return sorted(found & {"[heap]", "anonymous", "[stack]", "[vdso]"})
"""


@pytest.mark.parametrize(
    ("advise", "flag", "feature"),
    [("offer_for_merging", "mg", "ksm"), ("keep_small_pages", "nh", "transparent_hugepage")],
)
def test_what_is_said_of_memory_holds_for_forks_but_for_no_program_that_is_executed(
    advise: str, flag: str, feature: str
) -> None:
    if not (MM / feature).exists():
        script = f"{LOOK}\ntry: memory.{advise}()\nexcept OSError as error: print(error.strerror)"
        assert printed_by(script) == ["Invalid", "argument"]
        return
    script = f"""{LOOK}
print(*regions("{flag}"), "|")
memory.{advise}()
print(*regions("{flag}"), "|", flush=True)
if os.fork() == 0:
    print(*regions("{flag}"), "|", flush=True)
    os.execv("/bin/grep", ["grep", "-cw", "{flag}", "/proc/self/smaps"])
os.wait()
"""

    assert printed_by(script) == ["|", "[heap]", "anonymous", "|", "[heap]", "anonymous", "|", "0"]


def test_memory_that_was_freed_is_the_kernels_again() -> None:
    """The pieces kept between the freed ones keep the C library from giving back anything by itself."""
    script = """
from pyshim.host.memory.advice import give_back_free

def resident_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

pieces = [bytes(16000) for _ in range(2000)]
kept = pieces[::20]
pieces.clear()
before = resident_kib()
give_back_free()
print(before - resident_kib(), len(kept))
"""

    given_back_kib, kept = (int(word) for word in printed_by(script))

    assert given_back_kib > 15000
    assert kept == 100


@pytest.mark.parametrize(
    ("pages", "runs"), [([], []), ([7], [7, 8]), ([9, 3, 4, 5, 8], [3, 6, 8, 10])], ids=["none", "one", "some"]
)
def test_pages_are_told_by_their_runs(pages: list[int], runs: list[int]) -> None:
    assert list(as_runs(page * PAGE_BYTES for page in pages)) == [edge * PAGE_BYTES for edge in runs]


def test_pages_that_are_made_own_say_what_they_said() -> None:
    script = """
import ctypes, mmap, tempfile
from pyshim.host.memory.advice import make_own
from pyshim.host.memory.mappings import PAGE_BYTES, own_pages
with tempfile.TemporaryFile() as file:
    file.write(b"x" * 8 * PAGE_BYTES)
    file.flush()
    memory = mmap.mmap(file.fileno(), 8 * PAGE_BYTES, flags=mmap.MAP_PRIVATE)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
end = start + 8 * PAGE_BYTES
before = [*own_pages(start, end)]
try:
    make_own([(start + PAGE_BYTES, start + 3 * PAGE_BYTES)])
except OSError as error:
    print(error.strerror)
else:
    print(before, *((place - start) // PAGE_BYTES for run in own_pages(start, end) for place in run))
print(memory[:] == b"x" * 8 * PAGE_BYTES)
"""
    expected = (
        ["[]", "1", "3"] if tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14) else ["Invalid", "argument"]
    )

    assert printed_by(script) == [*expected, "True"]
