"""The assembled first process, run as an ordinary program on the build machine."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from guest.image.errors import BuildError
from guest.image.loader import AGENT_ARGV, init_program, take_console
from guest.image.sysinit import SAVED_FD, SYSCALLS, Program, SavedFd


def run_program(program: Program, directory: Path) -> subprocess.CompletedProcess[bytes]:
    executable = directory / "program"
    executable.write_bytes(program.image())
    executable.chmod(0o755)
    return subprocess.run([executable], capture_output=True, timeout=20, check=False)


def test_calls_run_in_order_with_their_arguments(tmp_path: Path) -> None:
    made = tmp_path / "made"
    program = Program()
    program.call("mkdir", os.fsencode(made), 0o755, must="make directory")
    program.call("chdir", os.fsencode(made), must="enter directory")
    program.call("symlink", b"target", b"link", must="link")
    program.call("write", 1, b"done\n", 5)
    program.call("exit", 7)

    done = run_program(program, tmp_path)

    assert (done.returncode, done.stdout) == (7, b"done\n")
    assert os.readlink(made / "link") == "target"


def test_a_saved_descriptor_is_the_result_of_the_call_that_kept_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"from the file")
    program = Program()
    program.call("open", os.fsencode(source), 0, must="open source", keep=True)
    program.call("dup2", SAVED_FD, 0, must="make it standard input")
    program.call("execve", b"/bin/cat", (b"cat",), (), must="start cat")

    assert run_program(program, tmp_path).stdout == b"from the file"


def test_execve_gets_its_whole_argument_and_environment_vectors(tmp_path: Path) -> None:
    program = Program()
    argv = (b"sh", b"-c", b'echo "$#:$1:$2:$NAME"', b"zero", b"one word", b"")
    program.call("execve", b"/bin/sh", argv, (b"NAME=value", b"OTHER="), must="start sh")

    assert run_program(program, tmp_path).stdout == b"2:one word::value\n"


def test_a_failed_must_ends_the_program_before_the_next_call(tmp_path: Path) -> None:
    program = Program()
    program.call("chdir", b"/nonexistent-directory", must="enter directory")
    program.call("write", 1, b"too far\n", 8)
    program.call("exit", 0)

    done = run_program(program, tmp_path)

    assert (done.returncode, done.stdout) == (1, b"")


def test_a_failure_without_must_is_passed_over(tmp_path: Path) -> None:
    program = Program()
    program.call("chdir", b"/nonexistent-directory")
    program.call("write", 1, b"went on\n", 8)
    program.call("exit", 0)

    assert run_program(program, tmp_path).stdout == b"went on\n"


def test_the_child_runs_its_own_calls_and_the_parent_the_rest(tmp_path: Path) -> None:
    child = Program()
    child.call("mkdir", os.fsencode(tmp_path / "by-child"), 0o755)
    child.call("execve", b"/bin/echo", (b"echo", b"vector of the child"), ())
    program = Program()
    program.call("mkdir", os.fsencode(tmp_path / "before"), 0o755)
    program.in_child(child)
    program.call("mkdir", os.fsencode(tmp_path / "by-parent"), 0o755)
    program.call("exit", 3)

    done = run_program(program, tmp_path)

    assert done.returncode == 3
    # communicate() ends only when the child has closed the inherited pipe too
    assert done.stdout == b"vector of the child\n"
    assert {"before", "by-child", "by-parent"} <= {path.name for path in tmp_path.iterdir()}


def test_a_child_that_could_fail_loudly_is_refused() -> None:
    child = Program()
    child.call("chdir", b"/", must="enter root")

    with pytest.raises(BuildError, match="assemble child"):
        Program().in_child(child)


@pytest.mark.parametrize("descriptors", ["0<&- 1>&- 2>&-", ""], ids=["none were open", "three were open"])
def test_the_console_is_the_standard_streams_and_nothing_else_is_open(tmp_path: Path, descriptors: str) -> None:
    """The kernel opens all three for the first process, or none when the console's driver is not there yet."""
    console = tmp_path / "console"
    console.touch()
    program = Program()
    take_console(program, os.fsencode(console))
    argv = (b"sh", b"-c", b"for number in /proc/$$/fd/*; do readlink $number || :; done")
    program.call("execve", b"/bin/sh", argv, (b"PATH=/usr/bin:/bin",), must="start sh")
    executable = tmp_path / "program"
    executable.write_bytes(program.image())
    executable.chmod(0o755)

    subprocess.run(["/bin/sh", "-c", f"exec {executable} {descriptors}"], timeout=20, check=True)

    assert console.read_text().splitlines() == [str(console)] * 3


@pytest.mark.parametrize("place", range(6))
def test_a_saved_descriptor_can_be_any_argument(place: int) -> None:
    """Its register is set from the one that keeps it: two moves differ in nothing but the register they name."""
    program, other = Program(), Program()
    arguments: list[int | SavedFd] = [0] * place
    program.call("mmap", *arguments, SAVED_FD)
    other.call("mmap", *arguments, 0)

    moves = {0: "48 89 df", 1: "48 89 de", 2: "48 89 da", 3: "49 89 da", 4: "49 89 d8", 5: "49 89 d9"}
    assert bytes.fromhex(moves[place]) in program.image()
    assert bytes.fromhex(moves[place]) not in other.image()


@pytest.mark.parametrize("name", sorted(SYSCALLS))
def test_system_call_numbers_are_those_of_this_kernels_headers(name: str) -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip(f"{header} is missing (package linux-libc-dev)")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))

    assert int(numbers[name]) == SYSCALLS[name]


def test_the_guests_init_is_a_function_of_its_arguments_and_names_all_its_files() -> None:
    arguments = {"loader_modules": ["/modules/a.ko"], "background_modules": ["/usr/lib/modules/x/b.ko"]}

    image = init_program(**arguments, argv=AGENT_ARGV)

    assert image == init_program(**arguments, argv=AGENT_ARGV)
    for text in (b"/modules/a.ko\0", b"/usr/lib/modules/x/b.ko\0", *(word + b"\0" for word in AGENT_ARGV)):
        assert text in image
