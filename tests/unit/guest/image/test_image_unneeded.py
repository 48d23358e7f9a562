"""A program is taken off a library: the dynamic loader no longer looks for it, and the rest of the program works."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from guest.image.elf import needed_libraries
from guest.image.errors import BuildError
from guest.image.unneeded import without_library

PROGRAM = Path("/bin/cp")
LIBRARIES = ("libattr.so.1", "libacl.so.1")
"""What cp needs beside libc and calls only when asked to keep attributes: the first in the chain of versions, and one
from its middle.
"""
CALLED = "libselinux.so.1"
"""The last one in the chain, which cp calls at every start."""


@pytest.fixture
def content() -> bytes:
    data = PROGRAM.read_bytes()
    if not {*LIBRARIES, CALLED} <= set(needed_libraries(data, "cp")):
        pytest.skip(f"{PROGRAM} does not need the libraries it needs on Debian")
    return data


def loaded(program: Path) -> str:
    """What the dynamic loader finds for the program, which it does not run."""
    environment = {**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}
    return subprocess.run([program], capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.parametrize("taken", [LIBRARIES[:1], LIBRARIES[1:], LIBRARIES, LIBRARIES[::-1]], ids="+".join)
def test_a_program_runs_without_the_library(tmp_path: Path, content: bytes, taken: tuple[str, ...]) -> None:
    lighter = tmp_path / "cp"
    for library in taken:
        content = without_library(content, library, "cp")
    lighter.write_bytes(content)
    lighter.chmod(0o755)

    run = subprocess.run([lighter, lighter, tmp_path / "copy"], capture_output=True, text=True, check=False)

    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "copy").read_bytes() == content
    assert [library in loaded(lighter) for library in LIBRARIES] == [library not in taken for library in LIBRARIES]
    assert "libc.so.6" in loaded(lighter)


def test_the_loader_accepts_what_is_left_but_a_function_that_is_gone_is_null(tmp_path: Path, content: bytes) -> None:
    program = tmp_path / "cp"
    program.write_bytes(without_library(content, CALLED, "cp"))
    program.chmod(0o755)

    assert CALLED not in loaded(program)
    assert subprocess.run([program, program, tmp_path / "copy"], check=False).returncode == -signal.SIGSEGV


@pytest.mark.parametrize("library", [*LIBRARIES, CALLED])
def test_the_other_libraries_are_needed_as_before_and_nothing_moves(content: bytes, library: str) -> None:
    lighter = without_library(content, library, "cp")

    kept = tuple(name for name in needed_libraries(content, "cp") if name != library)
    assert needed_libraries(lighter, "cp") == kept
    assert len(lighter) == len(content)


def test_a_library_whose_data_lies_in_the_program_is_refused(content: bytes) -> None:
    with pytest.raises(BuildError, match=r"take libc.so.6 out of cp: symbol \d+ has a place of its own in the file"):
        without_library(content, "libc.so.6", "cp")


@pytest.mark.parametrize("library", ["libthing.so.1", "libselinux.so", ""])
def test_a_library_that_the_program_does_not_name_is_refused(content: bytes, library: str) -> None:
    with pytest.raises(BuildError, match=f"take {library} out of cp: it needs no version of it"):
        without_library(content, library, "cp")


def test_a_file_without_dynamic_symbols_is_refused() -> None:
    static = Path("/bin/busybox")
    if not static.exists():
        pytest.skip("no statically linked program here")
    with pytest.raises(BuildError, match="it has no dynamic symbols with versions"):
        without_library(static.read_bytes(), LIBRARIES[0], "busybox")
