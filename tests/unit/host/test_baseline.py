"""A kept state of a process's memory, and forks that go back to it. Each in a process of its own."""

import ctypes
import mmap
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.host.machine_code import executable
from pyshim.host.memory import baseline
from pyshim.host.memory.mappings import PAGE_BYTES

REPOSITORY = Path(__file__).resolve().parents[3]
WORDS = PAGE_BYTES // 8

BEFORE = """
import gc, json, os, sys
from pyshim.host.memory.baseline import NAME, take_baseline

class Thing:
    def __init__(self, number):
        self.number, self.name, self.parts = number, f"thing {number}", [number, str(number)]

def private_kib():
    return sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Private_Dirty"))

def in_fork(work):
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, json.dumps(work()).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write_end)
    found = open(read_end).read()
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    return json.loads(found)

things = [Thing(number) for number in range(20000)]
"""

MAPPED = """
import ctypes, mmap
memory = mmap.mmap(-1, 1 << 22, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(b"x" * len(memory))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
baseline = take_baseline()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{BEFORE}\n{script}"
    return subprocess.run([sys.executable, "-ISc", program], capture_output=True, text=True, check=False)


def printed_by(script: str) -> list[str]:
    done = run(script)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split()


def test_what_a_fork_only_looked_at_is_shared_again() -> None:
    looked, given_back, rested = map(
        int,
        printed_by(
            """
baseline = take_baseline()
def look():
    names = [(thing, thing.name, thing.parts) for thing in things]
    looked = private_kib()
    del names
    given_back = baseline.give_back()
    return looked, given_back // 1024, private_kib()
print(*in_fork(look))
"""
        ),
    )

    assert looked > 5000
    assert given_back > looked * 0.6
    assert rested < looked * 0.5


def test_what_a_fork_has_changed_stays() -> None:
    """Values in place, new objects in place of old ones, grown and emptied containers, and what refers to them."""
    printed = printed_by(
        """
numbers, table, text, whole = list(range(5000)), {n: str(n) for n in range(5000)}, bytearray(50000), [Thing(1)]
baseline = take_baseline()
def change():
    for n in range(0, 5000, 7):
        numbers[n] = -n
        table[n] = f"changed {n}"
        text[n * 10] = n % 251
    for n in range(1, 5000, 7):
        del table[n]
    things[100].name, things[200].parts[1], things[300].new = "other", ["new"], {"a": 1}
    things.append(Thing("last"))
    whole.clear()
    def state():
        return [hash(tuple(numbers)), sorted(table.items()), bytes(text).hex(), things[100].name, things[200].parts,
                things[300].new, vars(things[-1]), [vars(thing) for thing in things[:50]], whole]
    before = json.dumps(state())
    for _ in range(5):
        assert baseline.give_back() > 0
        assert json.dumps(state()) == before
        gc.collect()
    return len(before)
print(in_fork(change) > 10000)
print(numbers[7], table[1], things[100].name, len(things), len(whole))
"""
    )

    assert printed == ["True", "7", "1", "thing", "100", "20000", "1"]


def test_a_process_that_goes_back_again_and_again_computes_what_another_does() -> None:
    """Classes are made and gone, code is compiled, modules imported, exceptions raised, threads run, in between."""
    (same,) = printed_by(
        """
import random, re, threading, types
def work(after):
    chance = random.Random(5)
    kept, found = {}, []
    for number in range(300):
        made = type(f"Made{number}", (Thing,), {"double": lambda self: self.number * 2})
        kept[chance.randrange(40)] = [made(chance.random()) for _ in range(chance.randrange(60))]
        code = compile(f"def f(x):\\n return [x + {number} for _ in range({chance.randrange(9)})]", "made", "exec")
        space = {}
        exec(code, space)
        found.append(space["f"](number))
        try:
            kept[chance.randrange(1000)][0].double()
        except (KeyError, IndexError) as error:
            found.append(repr(error))
        found.append(re.findall(f"[{number % 10}a-c]+", "a1b2c3" * chance.randrange(5)))
        things[chance.randrange(len(things))] = Thing(number)
        worker = threading.Thread(target=found.append, args=(number,))
        worker.start()
        worker.join()
        while len(os.listdir("/proc/self/task")) > 1:
            pass
        after()
    import calendar, colorsys, wave
    found.append([[thing.number for thing in group] for group in kept.values()])
    return hash(json.dumps(found)), sum(thing.number for thing in things)
os.environ["PYTHONHASHSEED"] = "0"
baseline = take_baseline()
print(in_fork(lambda: work(lambda: None)) == in_fork(lambda: work(baseline.give_back)))
"""
    )

    assert same == "True"


def test_a_process_that_is_not_alone_gives_nothing_back() -> None:
    assert printed_by(
        """
import threading
from pyshim.host.memory.baseline import NotAlone
baseline = take_baseline()
done = threading.Event()
worker = threading.Thread(target=done.wait)
worker.start()
try:
    baseline.give_back()
except NotAlone as error:
    print(error)
done.set()
worker.join()
while len(os.listdir("/proc/self/task")) > 1:
    pass
print(baseline.give_back() > 0)
"""
    ) == ["2", "threads", "True"]


def test_memory_that_was_unmapped_meanwhile_is_left_alone_with_what_lies_there_now() -> None:
    assert printed_by(
        MAPPED
        + """
def unmapped():
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(1 << 21))
    return baseline.give_back() > 0, len(memory[1 << 21 :].strip(b"x"))
print(*in_fork(unmapped))
"""
    ) == ["True", "0"]


def test_memory_that_the_c_library_moves_or_grows_is_none_of_it() -> None:
    """A large list has a mapping of its own, which grows with it over what the file has next."""
    assert printed_by(
        """
import ctypes
large = [None] * 60000
baseline = take_baseline()
def grown():
    places = set()
    for number in range(120):
        large.extend(str(number) for number in range(number * 3000, number * 3000 + 3000))
        places.add(ctypes.c_size_t.from_address(id(large) + 24).value)
        if number % 10 == 0:
            baseline.give_back()
    return len(places) > 1, large[60000:] == [str(number) for number in range(360000)]
print(*in_fork(grown))
"""
    ) == ["True", "True"]


def test_a_mapping_that_was_moved_is_left_alone() -> None:
    """As mremap(2) moves one: what it says is compared with nothing, least of all with another part of the file."""
    assert printed_by(
        MAPPED
        + """
libc = ctypes.CDLL(None)
libc.mremap.restype = ctypes.c_size_t
def moved():
    size = 1 << 20
    target = libc.mremap(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_size_t(size), 1 | 4)  # may move
    target = libc.mremap(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_size_t(2 * size), 1)
    ctypes.memset(ctypes.c_void_p(target), 0, 2 * size)
    before = baseline.give_back()
    return target != address, ctypes.string_at(target, 2 * size) == bytes(2 * size), before > 0
print(*in_fork(moved))
"""
    ) == ["True", "True", "True"]


def test_signals_are_not_taken_while_pages_are_looked_at() -> None:
    assert printed_by(
        """
import contextlib, signal
from pyshim.host.memory import baseline as module
baseline = take_baseline()
real, masks = module.executable, []
@contextlib.contextmanager
def watched(code, result, *arguments):
    with real(code, result, *arguments) as function:
        def call(*values):
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
            return function(*values)
        yield call
module.executable = watched
baseline.give_back()
print(len(masks) > 0, all({signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM} <= mask for mask in masks))
print(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
"""
    ) == ["True", "True", "0"]


def test_a_thread_s_own_data_is_none_of_it_since_the_kernel_writes_to_it_too() -> None:
    assert printed_by(
        """
import ctypes
own = ctypes.CDLL(None).pthread_self
own.restype = ctypes.c_size_t
baseline = take_baseline()
print(any(run.start <= own() < run.end for run in baseline.runs), len(baseline.runs) > 5)
"""
    ) == ["False", "True"]


def test_what_existed_is_frozen_and_what_is_made_later_lies_apart() -> None:
    frozen, apart = printed_by(
        """
more = [bytes(size) for size in range(1, 500, 3) for _ in range(40)]
del more[::2]
baseline = take_baseline()
pages = {id(one) >> 12 for one in more}
new = [bytes(size) for size in range(1, 500, 3) for _ in range(3)]
print(gc.get_freeze_count() > 20000, sum(id(one) >> 12 not in pages for one in new) * 100 // len(new))
"""
    )

    assert frozen == "True"
    assert int(apart) > 80


def test_nobody_can_change_the_file() -> None:
    assert printed_by(
        """
baseline = take_baseline()
(line,) = [line for line in open("/proc/self/maps") if NAME in line and "r--p" in line]
for flags in (os.O_RDWR, os.O_RDWR | os.O_TRUNC):
    try:
        fd = os.open(f"/proc/self/map_files/{line.split()[0]}", flags)
        os.pwrite(fd, b"other", 0)
    except PermissionError as error:
        print(error.errno)
"""
    ) == ["1", "1"]


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ("sys.version_info = (3, 12, 0)", "keeps its objects otherwise"),
        ("os.uname = lambda: type('Uname', (), {'machine': 'aarch64'})", "no x86-64 instructions"),
        ("import pyshim.host.memory.baseline as b; b.PAGE_BYTES = 65536", "pages of 65536 bytes"),
        ("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", "Too many open files"),
        ("import pyshim.host.memory.quickening as q; q._WARMUP_AT = 48", "code is not laid out as known"),
    ],
)
def test_where_no_state_can_be_kept_the_process_is_told_and_goes_on(obstacle: str, reason: str) -> None:
    printed = printed_by(
        f"""
{obstacle}
try:
    take_baseline()
except OSError as error:
    sys.stdout.write(str(error).replace(" ", "_") + " ")
gc.collect()
print(len({{thing.name for thing in things}}))
"""
    )

    assert reason.replace(" ", "_") in printed[0]
    assert printed[1] == "20000"


@pytest.fixture
def pages() -> Iterator[tuple[mmap.mmap, mmap.mmap, mmap.mmap]]:
    """Memory over a file of three pages, that file, and room for bits."""
    size = 3 * PAGE_BYTES
    with (
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
        mmap.mmap(-1, size) as kept,
        mmap.mmap(-1, PAGE_BYTES) as bits,
    ):
        memory.write(random.Random(1).randbytes(size))
        kept.write(memory[:])
        yield memory, kept, bits


@pytest.mark.parametrize("word", [0, 1, 7, 8, 63, 64, 255, WORDS - 1])
@pytest.mark.parametrize("counts", [False, True], ids=["any word", "a count"])
@pytest.mark.parametrize("byte", [0, 7])
def test_a_page_is_given_up_unless_a_word_that_matters_differs(
    pages: tuple[mmap.mmap, mmap.mmap, mmap.mmap], word: int, counts: bool, byte: int
) -> None:
    """Dropped memory that is no file's reads as zeros: here that shows which pages were."""
    memory, _, bits = pages
    at = PAGE_BYTES + word * 8 + byte
    memory[at] ^= 0xFF
    if counts:
        bits[(WORDS + word) // 8] = 1 << word % 8
    places = [ctypes.c_char.from_buffer(each) for each in pages]
    try:
        with executable(baseline._DROP, ctypes.c_size_t, *(ctypes.c_size_t,) * 4) as drop:
            dropped = drop(*(ctypes.addressof(place) for place in places), 3)
    finally:
        del places

    expected = [True, counts, True]
    assert dropped == sum(expected)
    zero = bytes(PAGE_BYTES)
    assert [memory[n * PAGE_BYTES : (n + 1) * PAGE_BYTES] == zero for n in range(3)] == expected


def test_system_calls_are_made_up_to_the_first_that_fails() -> None:
    sys_lseek = 8
    with open("/etc/hostname", "rb") as file:
        fd = file.fileno()
        rows = [(sys_lseek, fd, 3, 0, 0, 0, 0, 3), (sys_lseek, -1, 0, 0, 0, 0, 0, 0), (sys_lseek, fd, 5, 0, 0, 0, 0, 5)]
        table = (ctypes.c_int64 * 8 * 3)(*rows)
        with executable(baseline._CALLS, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t) as calls:
            left = calls(ctypes.addressof(table), len(table))

        assert (left, table[1][-1]) == (2, -9)  # EBADF
        assert file.seek(0, 1) == 3
