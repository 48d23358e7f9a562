"""A state of this process's memory that its forks can go back to, page by page, and then share.

A fork shares what it has not written to. It also writes where it only looks: CPython counts references. So most of what
it made its own says the same as before. Such a page can be given up if the state before is kept: in a file that lies
below the memory as a private mapping does. A page of that which is dropped (MADV_DONTNEED) reads as the file again.

Nothing may write to a page between the look that finds it as it was and its end, so both are one piece of machine code,
run while the interpreter stands still, no other thread exists and no signal is taken. Source: madvise(2), mmap(2).
"""

import ctypes
import errno
import fcntl
import gc
import os
import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from pyshim.host.machine_code import executable
from pyshim.host.memory.advice import give_back_free
from pyshim.host.memory.gaps import fill_gaps
from pyshim.host.memory.mappings import PAGE_BYTES, mappings, own_pages, pages_of_files, written_to
from pyshim.host.memory.objects import everlasting_objects, in_child
from pyshim.host.memory.quickening import have_looked_up, stop_adapting
from pyshim.host.syscalls import (
    MADV_DONTNEED,
    MAP_FIXED,
    MAP_PRIVATE,
    PROT_READ,
    PROT_WRITE,
    madvise,
    map_file,
)

NAME = "pyshim-baseline"
"""Of the file, in /proc/PID/maps."""
_WORD_BYTES = 8
_BITS_BYTES_PER_PAGE = PAGE_BYTES // _WORD_BYTES // 8
_OWN_BYTES = 1 << 16
"""Around a thread's own data, which the kernel writes to as well: rseq(2), set_robust_list(2)."""
# Of x86-64, as the machine code is.
_SYS_PWRITE64, _SYS_MMAP = 18, 9

# calls(table, rows): the rows not done, 0 for all. Each row is the number of a system call, its six arguments and the
# result it shall have; the first row with another result is the last, and has it.
_CALLS = bytes.fromhex(
    "53 55"  # push rbx; push rbp
    "4889fb 4889f5"  # mov rbx, rdi; mov rbp, rsi
    "4885ed 7430"  # row: test rbp, rbp; jz done
    "488b03 488b7b08 488b7310 488b5318 4c8b5320 4c8b4328 4c8b4b30"  # mov rax, [rbx]; mov rdi, [rbx+8]; ... r9, [rbx+48]
    "0f05"  # syscall
    "483b4338 7509"  # cmp rax, [rbx+56]; jne failed
    "4883c340 48ffcd ebcf"  # add rbx, 64; dec rbp; jmp row
    "48894338"  # failed: mov [rbx+56], rax
    "4889e8 5d 5b c3"  # done: mov rax, rbp; pop rbp; pop rbx; ret
)
# drop(pages, kept, bits, count): how many of `count` pages were given up. One is if each of its words of 8 bytes is
# that of the kept page, or is one whose bit is set.
_DROP = bytes.fromhex(
    "53 55 4154 4155 4156"  # push rbx; push rbp; push r12; push r13; push r14
    "4989fc 4989f5 4989d6 4889cd 31db"  # mov r12, rdi; mov r13, rsi; mov r14, rdx; mov rbp, rcx; xor ebx, ebx
    "4883ed01 724d"  # page: sub rbp, 1; jb done
    "31c9"  # xor ecx, ecx
    "498b04cc 493b44cd00 7406"  # word: mov rax, [r12+rcx*8]; cmp rax, [r13+rcx*8]; je same
    "490fa30e 7326"  # bt [r14], rcx; jnc next
    "ffc1 81f900020000 72e5"  # same: inc ecx; cmp ecx, 512; jb word
    "4c89e7 be00100000 ba04000000 b81c000000 0f05"  # madvise(r12, 4096, MADV_DONTNEED)
    "4883f801 4883d300"  # cmp rax, 1; adc rbx, 0
    "4981c400100000 4981c500100000 4983c640 ebad"  # next: add r12, 4096; add r13, 4096; add r14, 64; jmp page
    "4889d8 415e 415d 415c 5d 5b c3"  # done: mov rax, rbx; pop r14; pop r13; pop r12; pop rbp; pop rbx; ret
)
_ROW = 8
"""Words of a row of `calls`."""
_IS_MMAPPED = 2
_LEAST_CHUNK_BYTES = 1 << 17
_MFD_NOEXEC_SEAL = 0x8
_SEALED_WITHIN_S = 10.0
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class _Run(NamedTuple):
    start: int
    end: int
    offset: int
    """In the file."""


class _Place(NamedTuple):
    """Where some pages are, where they are kept, where their bits are, and how many they are."""

    start: int
    kept: int
    bits: int
    pages: int


class NotAlone(Exception):
    """Another thread of this process could write to a page just when it is given up."""


class Baseline(NamedTuple):
    """A kept state. Valid in the process that took it and in its forks."""

    inode: int
    runs: tuple[_Run, ...]
    at: int
    """Where the kept pages can be read, in the order of the file; one bit for each of their words follows them."""

    def give_back(self) -> int:
        """Bytes given up: every page that is as it was when this was taken, but for counts of references.

        Blocking, some 15 ms. Raises NotAlone; OSError where the host forbids machine code of our own.
        """
        _require_alone()
        gc.collect()
        give_back_free()
        return self._drop(self._places(pages_of_files), self._places(own_pages)) * PAGE_BYTES

    def turn_away(self) -> None:
        """The file's pages are no longer counted as this process's, until it looks at them again.

        The kernel maps 16 for each that is looked at. Called after `give_back` and what had to be done after that, with
        pages of its own at hand for when it is done again. Raises NotAlone, OSError.
        """
        self._drop(self._places(pages_of_files))

    def own(self) -> set[int]:
        """Where each page begins that this process has written to since, and not given back."""
        return {
            page
            for start, end, _ in self._mapped()
            for first, last in own_pages(start, end)
            for page in range(first, last, PAGE_BYTES)
        }

    def _drop(self, *groups: list[_Place]) -> int:
        """How many pages of the last of these groups were given up."""
        dropped = 0
        with executable(_DROP, ctypes.c_size_t, *(ctypes.c_size_t,) * 4) as drop, _undisturbed():
            for places in groups:
                dropped = 0
                for place in places:
                    dropped += drop(*place)
            madvise(self.at, _file_bytes(_end_of(self.runs)), MADV_DONTNEED)
        return dropped

    def _places(self, pages: Callable[[int, int], Iterable[tuple[int, int]]]) -> list[_Place]:
        """What of the runs `pages` finds. All of it first: what is looked for after a drop would be looked at again."""
        found = []
        bits = self.at + _end_of(self.runs)
        for start, end, offset in self._mapped():
            for first, last in pages(start, end):
                number = (offset + first - start) // PAGE_BYTES
                kept = self.at + number * PAGE_BYTES
                found.append(_Place(first, kept, bits + number * _BITS_BYTES_PER_PAGE, (last - first) // PAGE_BYTES))
        return found

    def _mapped(self) -> Iterator[_Run]:
        """The runs, or their parts, that are where they were."""
        by_place: dict[int, list[_Run]] = {}
        for run in self.runs:
            by_place.setdefault(run.start - run.offset, []).append(run)
        for each in mappings():
            if NAME in each.name and each.inode == self.inode and each.permissions == "rw-p":
                for run in by_place.get(each.start - each.offset, ()):
                    start, end = max(run.start, each.start), min(run.end, each.end)
                    if start < end:
                        yield _Run(start, end, run.offset + start - run.start)


def take_baseline() -> Baseline:
    """The state of this process's memory now, in a file that cannot change any more.

    No object that exists now will ever be freed, no code that exists now adapts any more. Raises OSError, NotAlone,
    MemoryError; forks are right all the same, only larger.
    """
    if PAGE_BYTES != 4096:
        raise OSError(f"pages of {PAGE_BYTES} bytes")
    _require_alone()
    with _system_calls():
        pass  # what cannot be done here is found out first
    have_looked_up()
    with everlasting_objects() as found:
        stop_adapting(found.code)
        gc.collect()
        gc.freeze()
        give_back_free()
        fill_gaps()
        fd = _new_file()
        try:
            runs = _keep(fd)
            in_child(lambda: _write_bits(fd, found.objects, runs))
            _seal(fd)
            return Baseline(inode=os.fstat(fd).st_ino, runs=runs, at=map_file(fd, _file_bytes(_end_of(runs))))
        finally:
            os.close(fd)


def _new_file() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(NAME, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(NAME, flags)  # a kernel before 6.3 knows no such flag


def _seal(fd: int) -> None:
    """Nobody can change the file. Raises OSError."""
    until = time.monotonic() + _SEALED_WITHIN_S
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            # The kernel itself holds a page for a moment.
            if error.errno != errno.EBUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            return


def _system_calls() -> AbstractContextManager[Callable[[int, int], int]]:
    return executable(_CALLS, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)


def _keep(fd: int) -> tuple[_Run, ...]:
    """What is in memory lies in the file, and the file below the memory. Raises OSError, with a part of it done."""
    runs = _runs()
    os.ftruncate(fd, _file_bytes(_end_of(runs)))
    table = (ctypes.c_int64 * _ROW * (2 * len(runs)))()
    for number, (start, end, offset) in enumerate(runs):
        size = end - start
        protection, flags = PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED
        table[2 * number][:] = [_SYS_PWRITE64, fd, start, size, offset, 0, 0, size]
        table[2 * number + 1][:] = [_SYS_MMAP, start, size, protection, flags, fd, offset, start]
    with _system_calls() as calls, _undisturbed():
        left = calls(ctypes.addressof(table), len(table))
    if left:
        number, *_, result = table[len(table) - left]
        reason = os.strerror(-result) if result < 0 else f"{result} bytes only"
        raise OSError(max(-result, 0), f"keep memory: system call {number}: {reason}")
    return runs


def _runs() -> tuple[_Run, ...]:
    """What is to be kept: of files all that is mapped, of other memory what has been written to."""
    own = ctypes.CDLL(None).pthread_self
    own.restype = ctypes.c_size_t
    own_start, own_end = (own() + bytes_ & -PAGE_BYTES for bytes_ in (-_OWN_BYTES, _OWN_BYTES))
    found, offset = [], 0
    for each in written_to():
        for start, end in ((each.start, min(each.end, own_start)), (max(each.start, own_end), each.end)):
            if start >= end:
                continue
            runs: Iterable[tuple[int, int]] = [(start, end)]
            if not each.inode:
                runs = own_pages(start, end)
            if not each.inode and not each.name:
                runs = _without_chunks(runs, end)
            for run in runs:
                found.append(_Run(*run, offset))
                offset += run[1] - run[0]
    return tuple(found)


def _without_chunks(runs: Iterable[tuple[int, int]], mapped_end: int) -> Iterator[tuple[int, int]]:
    """What of these runs of one mapping the C library has not mapped for a large chunk of memory.

    It grows such a chunk by mremap(2), which would show the file's next pages, or none. Its first words are zero and
    its size, with a mark. Source: glibc 2.36, malloc/malloc.c, IS_MMAPPED; mallopt(3), M_MMAP_THRESHOLD.
    """
    chunk_end = 0
    for start, end in runs:
        begin = at = max(start, chunk_end)
        while at < end:
            zero, size = (ctypes.c_uint64 * 2).from_address(at)
            is_chunk = zero == 0 and size % PAGE_BYTES == _IS_MMAPPED
            if is_chunk and _LEAST_CHUNK_BYTES <= size <= mapped_end - at + _IS_MMAPPED:
                if begin < at:
                    yield begin, at
                at = begin = chunk_end = at + size - _IS_MMAPPED
            else:
                at += PAGE_BYTES
        if begin < end:
            yield begin, end


def _write_bits(fd: int, addresses: Iterable[int], runs: tuple[_Run, ...]) -> None:
    """The bits of the words at `addresses` lie behind the kept pages."""
    kept_bytes = _end_of(runs)
    bits = bytearray(_file_bytes(kept_bytes) - kept_bytes)
    starts = [run.start for run in runs]
    for address in addresses:
        run = runs[bisect_right(starts, address) - 1]
        if run.start <= address < run.end:
            word = (run.offset + address - run.start) // _WORD_BYTES
            bits[word // 8] |= 1 << word % 8
    os.pwrite(fd, bits, kept_bytes)


def _end_of(runs: tuple[_Run, ...]) -> int:
    return runs[-1].offset + runs[-1].end - runs[-1].start


def _file_bytes(kept_bytes: int) -> int:
    return kept_bytes + kept_bytes // PAGE_BYTES * _BITS_BYTES_PER_PAGE


def _require_alone() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise NotAlone(f"{threads} threads")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No other thread of this process exists, and no signal is taken within the block. Raises NotAlone."""
    _require_alone()
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
