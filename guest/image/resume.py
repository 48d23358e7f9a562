"""From a kept process to the system calls by which another process, of a few instructions, goes on as it.

Everything here is a value: what is mapped where, the file that holds the pages, the words on the stack.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from guest.image.errors import BuildError
from guest.image.sysinit import RED_ZONE_BYTES, RESTORED, SAVED_FD, Program
from guest.snapshot.process import Mapping, Process

_PAGE_BYTES: Final = 4096
_DRAWN_BYTES: Final = 16  # below the registers on the stack: where a guard is drawn to
_PROT_READ_WRITE: Final = 3
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 2, 0x10, 0x20, 0x4000
_CLOSE_ON_EXEC: Final = 0o2000000
_PR_SET_NAME, _PR_SET_MM = 15, 35
_MM_START_BRK, _MM_BRK, _MM_ARG_START, _MM_ARG_END = 6, 7, 8, 9
_ARCH_SET_FS: Final = 0x1002
_GRND_INSECURE: Final = 4
# All that the kernel may have mapped for the process that goes on as another: its stack and the vdso.
_UPPER_START, _UPPER_END = 0x7F00_0000_0000, 0x7FFF_FFFF_F000
_STACK_BYTES: Final = 8 << 20  # Linux' default limit
_BELOW_STACK_BYTES: Final = 1 << 20  # nothing is ever mapped there: Linux' stack_guard_gap
# As many pages of zeros lie in the file before a mapping more is made for what follows them.
_ZERO_PAGES: Final = 16
_GUARD_IN_THREAD: Final = 0x28  # where code finds the guard of its stack, from FS on: x86-64 psABI supplement, glibc


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`length` bytes at `address` are private, and those of the file `path` from `offset` on; of no path: zero."""

    address: int
    length: int
    protection: int
    path: str = ""
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """How to go on as a process. `memory` is the content of the file `memory_path`; what it begins with is copied to
    `stack` (start, end), all else is mapped.

    `guards` are the addresses of all copies of the stack's guard, which each guest replaces by one of its own; `shown`
    is where the command line lies.
    """

    spans: tuple[Span, ...]
    memory_path: str
    memory: bytes
    stack: tuple[int, int]
    stack_pointer: int
    thread_pointer: int
    heap: tuple[int, int]
    shown: tuple[int, int]
    guards: tuple[int, ...]


def _written_runs(data: bytes) -> list[tuple[int, int]]:
    """First byte and end of each run of pages that are not all zero."""
    runs: list[tuple[int, int]] = []
    zero = bytes(_PAGE_BYTES)
    for at in range(0, len(data), _PAGE_BYTES):
        if data[at : at + _PAGE_BYTES] == zero:
            continue
        if runs and at - runs[-1][1] <= _ZERO_PAGES * _PAGE_BYTES:
            runs[-1] = (runs[-1][0], at + _PAGE_BYTES)
        else:
            runs.append((at, at + _PAGE_BYTES))
    return runs


def _with_registers(stack: Mapping, registers: dict[str, int]) -> tuple[bytes, int]:
    """The pages of the stack that are in use, with what `Program.resume` takes from them, and where that begins.

    It lies below what belongs to the process.
    """
    words = [registers[name] for name in RESTORED] + [registers["rip"]]
    stack_pointer = registers["rsp"] - RED_ZONE_BYTES - 8 * len(words)
    at = stack_pointer - _DRAWN_BYTES - stack.start
    if stack.data is None or at < 0:
        raise BuildError("plan resumption: the stack has no room for the registers")
    first = at - at % _PAGE_BYTES
    used = bytes(stack_pointer - stack.start - first) + struct.pack(f"<{len(words)}Q", *words)
    return used + stack.data[first + len(used) :], stack_pointer


def _guards(mapping: Mapping, guard: int) -> list[int]:
    """Addresses of all words of a mapping's content that are `guard`."""
    data = mapping.data or b""
    words = memoryview(data).cast("Q")
    return [mapping.start + 8 * index for index, word in enumerate(words) if word == guard]


def _shown(stack: Mapping, argv: Sequence[str]) -> tuple[int, int]:
    """Where `argv` lies on the stack."""
    text = b"".join(word.encode() + b"\0" for word in argv)
    at = (stack.data or b"").rfind(text)
    if at < 0:
        raise BuildError(f"plan resumption: the process is none of {' '.join(argv)!r}")
    return stack.start + at, stack.start + at + len(text)


def _spans(mapping: Mapping, memory: bytearray, memory_path: str) -> list[Span]:
    """What makes `mapping`, from below up; pages of its own are added to `memory`."""
    start, length, protection = mapping.start, mapping.end - mapping.start, mapping.protection
    is_file = mapping.path.startswith("/")
    data = mapping.data
    spans: list[Span] = []
    if data is None or not is_file:
        path = mapping.path if is_file else ""
        spans.append(Span(address=start, length=length, protection=protection, path=path, offset=mapping.offset))
    for at, end in [(0, length)] if data and is_file else _written_runs(data or b""):
        own = Span(address=start + at, length=end - at, protection=protection, path=memory_path, offset=len(memory))
        memory += (data or b"")[at:end]
        spans.append(own)
    return spans


def plan(process: Process, memory_path: str, stack_guard: int, argv: Sequence[str]) -> Resumption:
    """How to go on as `process`, with what is its own in a file `memory_path`. BuildError names what cannot be.

    `argv` is the command line it shows, the first words of the one it was started with.
    """
    by_path = {mapping.path: mapping for mapping in process.mappings}
    if "[stack]" not in by_path or "[heap]" not in by_path:
        raise BuildError("plan resumption: the process has no stack or no heap")
    stack, heap = by_path["[stack]"], by_path["[heap]"]
    used, stack_pointer = _with_registers(stack, process.registers)
    thread_pointer = process.registers["fs_base"]
    guards = _guards(stack, stack_guard)
    memory = bytearray(used)
    bottom = stack.end - _STACK_BYTES
    spans = [
        Span(address=bottom - _BELOW_STACK_BYTES, length=_BELOW_STACK_BYTES, protection=0),
        Span(address=bottom, length=_STACK_BYTES, protection=_PROT_READ_WRITE),
    ]
    for mapping in process.mappings:
        if mapping.start <= thread_pointer < mapping.end:
            guards += _guards(mapping, stack_guard)
        if mapping is not stack:
            spans += _spans(mapping, memory, memory_path)
    if thread_pointer + _GUARD_IN_THREAD not in guards:
        raise BuildError("plan resumption: the process has another guard of its stack than it was given")
    return Resumption(
        spans=tuple(spans),
        memory_path=memory_path,
        memory=bytes(memory),
        stack=(stack.end - len(used), stack.end),
        stack_pointer=stack_pointer,
        thread_pointer=thread_pointer,
        heap=(heap.start, heap.end),
        shown=_shown(stack, argv),
        guards=tuple(guards),
    )


def go_on(program: Program, resumption: Resumption) -> None:
    """Append: this process is the kept one, on its way back from the call in which it stopped.

    Its descriptors, credentials, session and directory are those it had before.
    """
    program.call("munmap", _UPPER_START, _UPPER_END - _UPPER_START, must="leave its own stack")
    # zero first: what a file says lies over it
    for path in dict.fromkeys(["", *(span.path for span in resumption.spans)]):
        if path:
            program.call("open", path.encode(), _CLOSE_ON_EXEC, must=f"open {path}", keep=True)
        flags = _MAP_PRIVATE | _MAP_FIXED | (0 if path else _MAP_ANONYMOUS | _MAP_NORESERVE)
        for span in resumption.spans:
            if span.path == path:
                where = (span.address, span.length, span.protection, flags, SAVED_FD if path else -1, span.offset)
                program.call("mmap", *where, must=f"map {path or 'memory'}")
        if path == resumption.memory_path:
            # Copied, so that it is anonymous as any stack: /proc takes a command line from nowhere else.
            start, end = resumption.stack
            program.call("pread64", SAVED_FD, start, end - start, 0, must="copy the stack")
        if path:
            program.call("close", SAVED_FD)
    # The lowest byte of a guard is zero, so that no string that is too long can write it: glibc's.
    drawn = resumption.stack_pointer - _DRAWN_BYTES
    program.call("getrandom", drawn + 1, 7, _GRND_INSECURE, must="draw a guard")
    program.copy(drawn, resumption.guards)
    for word, address in zip((_MM_START_BRK, _MM_BRK), resumption.heap, strict=True):
        program.call("prctl", _PR_SET_MM, word, address, 0, 0)
    # The end first: the kernel takes no line that ends before it starts, and the new one is above the old.
    for word, address in zip((_MM_ARG_END, _MM_ARG_START), reversed(resumption.shown), strict=True):
        program.call("prctl", _PR_SET_MM, word, address, 0, 0)
    program.call("prctl", _PR_SET_NAME, b"python3", 0, 0, 0)
    program.call("arch_prctl", _ARCH_SET_FS, resumption.thread_pointer, must="find its thread")
    program.resume(resumption.stack_pointer)
