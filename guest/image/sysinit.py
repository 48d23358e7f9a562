"""The guest's first process: a table of system calls, assembled into a static ELF file of a few kilobytes.

Between the kernel and the agent lie only module loads, mounts and what maps the agent's memory (or one exec). A shell
would spend a process on each and an interpreter its own start, both before the agent's start; this costs the calls
themselves. It is assembled here, not compiled, so that the build needs no compiler: the only instructions are "load
arguments, call, compare with zero, jump", and at the end those that copy a word and restore registers.

Failures are written to /dev/kmsg, so they appear on the console beside the kernel's own lines, and end the process:
the kernel then panics, and the host sees the end of the VM with the reason in its console log.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from guest.image.errors import BuildError

# Source of numbers: kernel arch/x86/entry/syscalls/syscall_64.tbl.
SYSCALLS: Final = {
    "read": 0,
    "write": 1,
    "open": 2,
    "close": 3,
    "mmap": 9,
    "munmap": 11,
    "pread64": 17,
    "dup2": 33,
    "fork": 57,
    "execve": 59,
    "exit": 60,
    "chdir": 80,
    "mkdir": 83,
    "symlink": 88,
    "setsid": 112,
    "mknod": 133,
    "setpriority": 141,
    "prctl": 157,
    "arch_prctl": 158,
    "chroot": 161,
    "mount": 165,
    "ioctl": 16,
    "finit_module": 313,
    "getrandom": 318,
}
# Out of the way of any address a process of the guest has for itself: `resume` maps such a process around this one.
_BASE: Final = 0x1000000000
_HEADER_BYTES: Final = 64 + 56
# mov r, imm64 for the argument registers in the order of the system call convention: rdi rsi rdx r10 r8 r9
_MOVE_IMMEDIATE: Final = (b"\x48\xbf", b"\x48\xbe", b"\x48\xba", b"\x49\xba", b"\x49\xb8", b"\x49\xb9")
# mov r, rbx for the same
_MOVE_SAVED_FD: Final = tuple(bytes.fromhex(code) for code in "4889df 4889de 4889da 4989da 4989d8 4989d9".split())
_SAVE_RESULT: Final = b"\x48\x89\xc3"  # mov rbx, rax
_CALL: Final = b"\x0f\x05"
_TEST_RESULT: Final = b"\x48\x85\xc0"  # test rax, rax
_JUMP_IF_NEGATIVE: Final = b"\x0f\x88"
_JUMP_IF_NOT_ZERO: Final = b"\x0f\x85"
_LOAD: Final = b"\x48\xa1"  # mov rax, [imm64]
_STORE: Final = b"\x48\xa3"  # mov [imm64], rax
_SET_STACK_POINTER: Final = b"\x48\xbc"  # mov rsp, imm64
RESTORED: Final = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
)
_POP_RESTORED: Final = bytes.fromhex("415f 415e 415d 415c 5d 5b 415b 415a 4159 4158 58 59 5a 5e 5f")
# What a function may keep below the stack pointer: x86-64 psABI, "The Stack Frame".
RED_ZONE_BYTES: Final = 128
_RETURN: Final = b"\xc2" + struct.pack("<H", RED_ZONE_BYTES)  # ret: to the address on the stack, then drop the red zone


class SavedFd:
    """Stands for the descriptor the last `keep=True` call returned."""


SAVED_FD: Final = SavedFd()
Argument = int | bytes | tuple[bytes, ...] | SavedFd


@dataclass(slots=True)
class Program:
    """A straight line of system calls; `image()` is the ELF file. Text arguments are bytes without their final NUL."""

    _code: bytearray = field(default_factory=bytearray)
    _data: bytearray = field(default_factory=bytearray)
    _data_offsets: dict[bytes, int] = field(default_factory=dict)
    _patches: list[tuple[int, int]] = field(default_factory=list)  # where in the code, offset in the data
    _vectors: list[tuple[int, list[int]]] = field(default_factory=list)
    _failures: list[tuple[int, bytes]] = field(default_factory=list)

    def call(self, name: str, *arguments: Argument, must: str = "", keep: bool = False) -> None:
        """Append one system call. With `must`, an error ends the program with that text; otherwise it is ignored."""
        for index, argument in enumerate(arguments):
            if isinstance(argument, SavedFd):
                self._code += _MOVE_SAVED_FD[index]
                continue
            self._code += _MOVE_IMMEDIATE[index]
            if isinstance(argument, int):
                self._code += struct.pack("<q", argument)
            else:
                offset = self._vector(argument) if isinstance(argument, tuple) else self._text(argument)
                self._patches.append((len(self._code), offset))
                self._code += bytes(8)
        self._code += b"\xb8" + struct.pack("<I", SYSCALLS[name]) + _CALL
        if keep:
            self._code += _SAVE_RESULT
        if must:
            self._code += _TEST_RESULT + _JUMP_IF_NEGATIVE
            self._failures.append((len(self._code), must.encode()))
            self._code += bytes(4)

    def in_child(self, body: "Program") -> None:
        """Run `body` in a forked child while this program goes on; a `must` in `body` is refused."""
        if body._failures:
            raise BuildError("assemble child: a child has nobody to report a failure to")
        self._code += b"\xb8" + struct.pack("<I", SYSCALLS["fork"]) + _CALL + _TEST_RESULT + _JUMP_IF_NOT_ZERO
        jump_at = len(self._code)
        self._code += bytes(4)
        start = len(self._code)
        self._code += body._code
        for at, offset in body._patches:
            self._patches.append((start + at, self._adopt(body, offset)))
        self.call("exit", 0)
        struct.pack_into("<i", self._code, jump_at, len(self._code) - jump_at - 4)

    def copy(self, source: int, targets: Iterable[int]) -> None:
        """Append: the 8 bytes at the address `source` are at each of `targets` too."""
        self._code += _LOAD + struct.pack("<Q", source)
        for target in targets:
            self._code += _STORE + struct.pack("<Q", target)

    def resume(self, stack_pointer: int) -> None:
        """Append: the registers `RESTORED` are what lies on the stack from `stack_pointer` on, in their order, and the
        next instruction is where the word after them points; the stack begins `RED_ZONE_BYTES` above that word.
        """
        self._code += _SET_STACK_POINTER + struct.pack("<Q", stack_pointer) + _POP_RESTORED + _RETURN

    def _adopt(self, other: "Program", offset: int) -> int:
        for vector_offset, members in other._vectors:
            if vector_offset == offset:
                return self._vector(tuple(_text_at(other._data, member) for member in members))
        return self._text(_text_at(other._data, offset))

    def _text(self, text: bytes) -> int:
        if text not in self._data_offsets:
            self._data_offsets[text] = len(self._data)
            self._data += text + b"\0"
        return self._data_offsets[text]

    def _vector(self, texts: tuple[bytes, ...]) -> int:
        members = [self._text(text) for text in texts]
        self._data += bytes(-len(self._data) % 8)
        offset = len(self._data)
        self._data += bytes(8 * (len(members) + 1))
        self._vectors.append((offset, members))
        return offset

    def image(self) -> bytes:
        """The finished executable: one segment that cannot be written, holding headers, code and data."""
        code = bytearray(self._code)
        patches = list(self._patches)
        for jump_at, text in self._failures:
            struct.pack_into("<i", code, jump_at, len(code) - jump_at - 4)
            report = Program(_data=self._data, _data_offsets=self._data_offsets)
            line = b"<3>guest init: cannot " + text + b"\n"
            report.call("open", b"/dev/kmsg", 1, keep=True)
            report.call("write", SAVED_FD, line, len(line))
            report.call("exit", 1)
            patches += [(len(code) + at, offset) for at, offset in report._patches]
            code += report._code
        data_base = _BASE + _HEADER_BYTES + len(code) + (-(_HEADER_BYTES + len(code)) % 8)
        for at, offset in patches:
            struct.pack_into("<Q", code, at, data_base + offset)
        data = bytearray(self._data)
        for offset, members in self._vectors:
            struct.pack_into(f"<{len(members)}Q", data, offset, *(data_base + member for member in members))
        size = data_base - _BASE + len(data)
        ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
        header = ident + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, _BASE + _HEADER_BYTES, 64, 0, 0, 64, 56, 1, 64, 0, 0)
        segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
        return (header + segment + bytes(code)).ljust(data_base - _BASE, b"\0") + bytes(data)


def _text_at(data: bytearray, offset: int) -> bytes:
    return bytes(data[offset : data.index(b"\0", offset)])
