"""What a process gives back to the kernel, and what it lets the kernel merge. Each in a process of its own."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
KSM = Path("/sys/kernel/mm/ksm")


def printed_by(script: str) -> list[str]:
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{script}"
    done = subprocess.run([sys.executable, "-ISc", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


OFFERED = """
import os
from pyshim.host.processes.memory import offer_for_merging

def offered():
    names, found = {}, set()
    for line in open("/proc/self/smaps"):
        words = line.split()
        if words[0].endswith(":"):
            if words[0] == "VmFlags:" and "mg" in words:
                found.add(name)
        else:
            name = words[5] if len(words) > 5 else "anonymous"
    return sorted(found & {"[heap]", "anonymous", "[stack]", "[vdso]"})
"""


def test_the_heap_and_its_forks_are_offered_for_merging_but_no_program_that_is_executed() -> None:
    if not KSM.exists():
        assert "errno 22" in " ".join(
            printed_by(f"{OFFERED}\ntry: offer_for_merging()\nexcept OSError as e: print('errno', e.errno)")
        )
        return
    script = f"""{OFFERED}
print(*offered(), "|")
offer_for_merging()
print(*offered(), "|", flush=True)
if os.fork() == 0:
    print(*offered(), "|", flush=True)
    os.execv("/bin/grep", ["grep", "-cw", "mg", "/proc/self/smaps"])
os.wait()
"""

    assert printed_by(script) == ["|", "[heap]", "anonymous", "|", "[heap]", "anonymous", "|", "0"]


def test_memory_that_was_freed_is_the_kernels_again() -> None:
    """The pieces kept between the freed ones keep the C library from giving back anything by itself."""
    script = """
from pyshim.host.processes.memory import give_back_free

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
