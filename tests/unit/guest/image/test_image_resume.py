"""From a kept process to one that goes on as it: the plan as a value, and a process that really does."""

import struct
import subprocess
from pathlib import Path

import pytest

from guest.image.errors import BuildError
from guest.image.resume import Resumption, Span, go_on, plan
from guest.image.sysinit import RED_ZONE_BYTES, RESTORED, Program
from guest.snapshot.process import Mapping, Process
from guest.snapshot.tracer import STACK_GUARD

PAGE = 4096
CODE, HEAP, THREAD, STACK = 0x200000, 0x300000, 0x10_0000_0000_00, 0x7000_0000_0000
READ, READ_WRITE, READ_EXECUTE = 1, 3, 5
VALUES = {name: 0x1111_0000_0000 + number for number, name in enumerate(RESTORED)}
# Ends the program with a write of: the 15 registers in the order of RESTORED, the stack pointer it had, the guards in
# its thread and on its stack, and a word from far below the stack.
TELL = bytes.fromhex(
    "4889 2425 00003000"  # mov [HEAP], rsp
    "57 56 52 51 50 4150 4151 4152 4153 53 55 4154 4155 4156 4157"  # push rdi .. r15
    "4889 e6"  # mov rsi, rsp
    "488b 0425 00003000"  # mov rax, [HEAP]
    "4889 46 78"  # mov [rsi+120], rax (over what was the top of the stack)
    "6448 8b0425 28000000"  # mov rax, fs:[0x28]
    "4889 86 80000000"  # mov [rsi+128], rax
    "488b 86 0000f0ff"  # mov rax, [rsi-1048576]
    "4889 86 90000000"  # mov [rsi+144], rax: behind the frame's guard
    "bf 01000000 ba 98000000 b8 01000000 0f05"  # write(1, rsi, 152)
    "31ff b8 3c000000 0f05"  # exit(0)
)


ARGV = ("/usr/bin/agent", "-x")


def stopped(**changes: object) -> Process:
    """A process of one page of code, a heap, a thread's memory and a stack, stopped before `TELL`."""
    words = {30: 0, 31: 0, 32: STACK_GUARD}  # from the stack pointer on; the last one is a frame's guard
    stack = bytearray(16 * PAGE)
    top = len(stack) - PAGE
    for index, word in words.items():
        struct.pack_into("<Q", stack, top + 8 * (index - 30), word)
    line = b"/usr/bin/agent\0-x\0subject\0"
    stack[-len(line) :] = line
    thread = bytearray(PAGE)
    struct.pack_into("<Q", thread, 0x28, STACK_GUARD)
    registers = VALUES | {"rip": CODE, "rsp": STACK + top, "fs_base": THREAD}
    mappings = (
        Mapping(CODE, CODE + PAGE, READ_EXECUTE, 0, "", TELL.ljust(PAGE, b"\x90")),
        Mapping(HEAP, HEAP + 64 * PAGE, READ_WRITE, 0, "[heap]", bytes(63 * PAGE) + b"end".ljust(PAGE, b"\0")),
        Mapping(THREAD, THREAD + PAGE, READ_WRITE, 0, "", bytes(thread)),
        Mapping(STACK, STACK + len(stack), READ_WRITE, 0, "[stack]", bytes(stack)),
    )
    return Process(**{"registers": registers, "mappings": mappings} | changes)


def resumed(resumption: Resumption, directory: Path) -> subprocess.CompletedProcess[bytes]:
    program = Program()
    go_on(program, resumption)
    executable = directory / "program"
    executable.write_bytes(program.image())
    executable.chmod(0o755)
    Path(resumption.memory_path).write_bytes(resumption.memory)
    return subprocess.run([executable], capture_output=True, timeout=20, check=False)


def test_another_process_goes_on_with_all_registers_stack_and_thread(tmp_path: Path) -> None:
    process = stopped()

    done = resumed(plan(process, str(tmp_path / "memory"), STACK_GUARD, ARGV), tmp_path)

    assert (done.returncode, done.stderr) == (0, b"")
    told = struct.unpack("<19Q", done.stdout)
    assert dict(zip(RESTORED, told, strict=False)) == VALUES
    assert told[15] == process.registers["rsp"]
    assert told[18] == 0, "the stack has room below what was kept"


def test_every_resumption_has_a_guard_of_its_own_in_all_places(tmp_path: Path) -> None:
    resumption = plan(stopped(), str(tmp_path / "memory"), STACK_GUARD, ARGV)

    guards = [struct.unpack("<19Q", resumed(resumption, tmp_path).stdout)[16:18] for _ in range(2)]

    for in_thread, on_stack in guards:
        assert in_thread == on_stack
        assert in_thread & 0xFF == 0
        assert in_thread not in (0, STACK_GUARD)
    assert guards[0] != guards[1]


def test_memory_that_is_missing_ends_the_process_with_a_reason(tmp_path: Path) -> None:
    resumption = plan(stopped(), str(tmp_path / "memory"), STACK_GUARD, ARGV)
    program = Program()
    go_on(program, resumption)

    assert b"guest init: cannot open " + str(tmp_path / "memory").encode() in program.image()


def test_only_written_pages_are_kept_the_rest_is_as_in_files_or_zero() -> None:
    library = Mapping(0x400000, 0x400000 + 4 * PAGE, READ, 2 * PAGE, "/usr/lib/some.so", None)
    relocated = Mapping(0x500000, 0x500000 + PAGE, READ, 0, "/usr/lib/some.so", bytes(PAGE))
    process = stopped()
    process = process._replace(mappings=(*process.mappings, library, relocated))

    resumption = plan(process, "/memory", STACK_GUARD, ARGV)

    def at(address: int) -> list[Span]:
        return [span for span in resumption.spans if span.address <= address < span.address + span.length]

    assert at(0x400000) == [
        Span(address=0x400000, length=4 * PAGE, protection=READ, path="/usr/lib/some.so", offset=2 * PAGE)
    ]
    (own,) = at(0x500000)
    assert (own.path, resumption.memory[own.offset : own.offset + PAGE]) == ("/memory", bytes(PAGE))
    assert [span.path for span in at(HEAP)] == [""], "zeros are no part of the file"
    zero, written = at(HEAP + 63 * PAGE)
    assert (zero.path, written.path, written.length) == ("", "/memory", PAGE)
    assert resumption.memory[written.offset :].startswith(b"end")
    assert resumption.heap == (HEAP, HEAP + 64 * PAGE)
    end = STACK + 16 * PAGE - len(b"subject\0")
    assert resumption.shown == (end - len(b"/usr/bin/agent\0-x\0"), end)
    assert len(resumption.memory) < 20 * PAGE


def without(path: str) -> Process:
    process = stopped()
    return process._replace(mappings=tuple(mapping for mapping in process.mappings if mapping.path != path))


@pytest.mark.parametrize(
    ("process", "guard", "argv", "said"),
    [
        (without("[stack]"), STACK_GUARD, ARGV, "no stack"),
        (without("[heap]"), STACK_GUARD, ARGV, "no heap"),
        (stopped(), STACK_GUARD ^ 0x100, ARGV, "another guard"),
        (stopped(registers=stopped().registers | {"rsp": STACK + RED_ZONE_BYTES}), STACK_GUARD, ARGV, "no room"),
        (stopped(), STACK_GUARD, ("/usr/bin/other", "-x"), "none of '/usr/bin/other -x'"),
    ],
)
def test_a_process_that_cannot_go_on_is_refused(process: Process, guard: int, argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(BuildError, match=f"plan resumption: .*{said}"):
        plan(process, "/memory", guard, argv)
