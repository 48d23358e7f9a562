"""Starts the subject, answers for the kernel where it would say something else every time, and writes what came of it.

The subject is process 1 of a namespace of its own, as the agent is in a guest, and its addresses are always the same.
"""

from __future__ import annotations

import ctypes
import os
import struct

from guest.snapshot.process import Mapping, Process
from guest.snapshot.subject import AGENT_ARGV, ARGUMENT, ENVIRONMENT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# The 16 bytes of AT_RANDOM. glibc makes a guard of the stack of the first half, without its lowest byte, and one of
# saved pointers of the second. A guest has a guard of its own for the stack: `guest.image.resume` looks for this one.
RANDOM_BYTES = b"\0pyshim.pod guard"
STACK_GUARD = int.from_bytes(RANDOM_BYTES[:8], "little")
# What getrandom(2) says: the seed of Python's hashes, glibc's mark of freed memory.
_DRAWN_BYTES = b"drawn for a pod."
# struct user_regs_struct of sys/user.h
REGISTERS = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
    *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)
_TRACEME, _GETREGS, _SETREGS, _SYSCALL, _SETOPTIONS = 0, 12, 13, 24, 0x4200
_OPTION_SYSGOOD, _SYSGOOD = 1, 0x80
_CLONE_NEWPID = 0x20000000
_ADDR_NO_RANDOMIZE = 0x0040000
_AT_NULL, _AT_IGNORE, _AT_RANDOM, _AT_SYSINFO_EHDR = 0, 1, 25, 33
_SYS_CLOCK_GETTIME, _SYS_GETRANDOM, _SYS_RSEQ = 228, 318, 334
_NO_CALL = 2**64 - 1
_SIGTRAP, _SIGSEGV, _SIGSTOP = 5, 11, 19
_PR_SET_TSC, _TSC_FAULTS = 26, 2
_RDTSC = b"\x0f\x31"
_PROTECTIONS = {"r": 1, "w": 2, "x": 4}


class _Subject:
    """A traced child, stopped at its first instruction."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        self._libc.ptrace.restype = ctypes.c_long
        if self._libc.unshare(_CLONE_NEWPID):
            raise OSError(ctypes.get_errno(), "unshare")
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._libc.ptrace(_TRACEME, 0, None, None)
                self._libc.personality(_ADDR_NO_RANDOMIZE)
                self._libc.prctl(_PR_SET_TSC, _TSC_FAULTS, 0, 0, 0)
                os.execve(argv[0], argv, environment)
            finally:
                os._exit(127)
        if self._next_stop() != _SIGTRAP:
            raise RuntimeError(f"start {argv[0]}: not stopped at its start")
        self.memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR)
        self._ptrace(_SETOPTIONS, _OPTION_SYSGOOD)

    def _ptrace(self, request: int, data: ctypes.Array[ctypes.c_ulong] | int | None = None) -> None:
        if self._libc.ptrace(request, self.pid, None, data) < 0:
            raise OSError(ctypes.get_errno(), f"ptrace {request}")

    def _next_stop(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        if not os.WIFSTOPPED(status):
            raise RuntimeError(f"wait for the subject: it ended with status {status:#x}")
        return os.WSTOPSIG(status)

    def registers(self) -> dict[str, int]:
        values = (ctypes.c_ulong * len(REGISTERS))()
        self._ptrace(_GETREGS, values)
        return dict(zip(REGISTERS, values, strict=True))

    def _set_registers(self, registers: dict[str, int]) -> None:
        self._ptrace(_SETREGS, (ctypes.c_ulong * len(REGISTERS))(*registers.values()))

    def run_until_it_stops(self) -> None:
        """It has sent itself SIGSTOP. Nothing it was told was random or the time, and it has no rseq(2) area."""
        leaving = False
        while True:
            self._ptrace(_SYSCALL)
            signal = self._next_stop()
            if signal == _SIGSTOP:
                return
            if signal == _SIGSEGV and self._answer_time():
                continue
            if signal != _SIGTRAP | _SYSGOOD:
                raise RuntimeError(f"wait for the subject: stopped by signal {signal}")
            self._answer(self.registers(), leaving)
            leaving = not leaving

    def _answer(self, registers: dict[str, int], leaving: bool) -> None:
        """One system call, on its way in or out."""
        if not leaving and registers["orig_rax"] == _SYS_RSEQ:
            self._set_registers(registers | {"orig_rax": _NO_CALL})
        elif leaving and registers["orig_rax"] == _SYS_GETRANDOM:
            # also where the kernel has nothing to give yet: its answer would depend on how fast the machine is
            length = registers["rsi"]
            os.pwrite(self.memory, (_DRAWN_BYTES * (length // 16 + 1))[:length], registers["rdi"])
            self._set_registers(registers | {"rax": length})
        elif leaving and registers["orig_rax"] == _SYS_CLOCK_GETTIME:
            os.pwrite(self.memory, struct.pack("<qq", 1, 0), registers["rsi"])

    def _answer_time(self) -> bool:
        """Whether it stopped at the instruction that reads the CPU's clock; it has read 0 then.

        The dynamic loader keeps how long it took.
        """
        registers = self.registers()
        if os.pread(self.memory, 2, registers["rip"]) != _RDTSC:
            return False
        self._set_registers(registers | {"rip": registers["rip"] + 2, "rax": 0, "rdx": 0})
        return True


def _answer_at_start(memory: int, stack_pointer: int) -> None:
    """A process that has just been executed gets `RANDOM_BYTES`, and hears of no vdso: what it called there would be
    another kernel's in a guest. On its stack: argc, argv, 0, environment, 0, pairs of the auxiliary vector (x86-64
    psABI, "Initial Stack and Register State").
    """
    stack = os.pread(memory, 4096, stack_pointer)
    words = struct.unpack_from(f"<{len(stack) // 8}Q", stack)
    at = words.index(0, 1) + 1
    at = words.index(0, at) + 1
    while words[at] != _AT_NULL:
        if words[at] == _AT_RANDOM:
            os.pwrite(memory, RANDOM_BYTES, words[at + 1])
        elif words[at] == _AT_SYSINFO_EHDR:
            os.pwrite(memory, struct.pack("<QQ", _AT_IGNORE, 0), stack_pointer + 8 * at)
        at += 2


def _mappings(pid: int, memory: int) -> Iterator[Mapping]:
    with open(f"/proc/{pid}/smaps", encoding="ascii") as file:
        start = end = protection = offset = 0
        path = ""
        for line in file:
            first, *rest = line.split(None, 5)
            if not first.endswith(":"):
                start, end = (int(part, 16) for part in first.split("-"))
                if rest[0].startswith("w", 1) and rest[0].endswith("s"):
                    raise RuntimeError(f"keep the subject: it shares the memory at {first}")
                protection = sum(_PROTECTIONS.get(letter, 0) for letter in rest[0])
                offset, path = int(rest[1], 16), rest[4].rstrip("\n") if len(rest) > 4 else ""
            elif first == "Anonymous:" and not path.startswith("[v"):  # vdso, vvar, vsyscall are the kernel's
                data = os.pread(memory, end - start, start) if rest[0] != "0" else None
                yield Mapping(start, end, protection, offset, path, data)


def _refuse_what_is_no_memory(pid: int) -> None:
    """Other threads and open files are known to the kernel alone: whoever goes on would believe to have them."""
    threads = len(os.listdir(f"/proc/{pid}/task"))
    if threads != 1:
        raise RuntimeError(f"keep the subject: it has {threads} threads")
    for number in os.listdir(f"/proc/{pid}/fd"):
        if int(number) > 2:
            raise RuntimeError(f"keep the subject: it has {os.readlink(f'/proc/{pid}/fd/{number}')} open")


def keep(argv: list[str], environment: dict[str, str], disk: str) -> None:
    """The process `argv`, as it is when it stops itself, is on `disk`; it has ended. Needs root, and one thread."""
    subject = _Subject(argv, environment | ENVIRONMENT)
    _answer_at_start(subject.memory, subject.registers()["rsp"])
    subject.run_until_it_stops()
    _refuse_what_is_no_memory(subject.pid)
    process = Process(subject.registers(), tuple(_mappings(subject.pid, subject.memory)))
    with open(disk, "r+b", 0) as file:
        for piece in process.pieces():
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    os.kill(subject.pid, 9)


def run() -> None:
    """The whole task of the machine that the build boots: the snapshot is on its second disk, and the machine is off.

    A failure is on the console.
    """
    from guest.agent.storage import syscalls

    try:
        keep([*AGENT_ARGV, ARGUMENT], dict(os.environ), "/dev/vdb")
    except Exception as error:
        print(f"snapshot failed: {error!r}", flush=True)
    syscalls.power_off()
