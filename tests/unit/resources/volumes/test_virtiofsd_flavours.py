"""The flavour of a binary; a node's binaries are asked once."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.host.file_answers import FileAnswers
from pyshim.host.processes.children import Children
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import VirtiofsdFlavour
from pyshim.model.ids import HostPath
from pyshim.resources.volumes.host.virtiofsd_flavours import (
    VirtiofsdFailed,
    VirtiofsdFlavours,
    flavour_from_capabilities,
    flavour_from_version,
)

REAL_C = "/usr/lib/qemu/virtiofsd"
RUST, C = VirtiofsdFlavour.RUST, VirtiofsdFlavour.C
HOUR_NS = 3600 * 10**9
SAYS_RUST = 'echo \'{"type": "fs", "features": ["separate-options"]}\''
SAYS_C = 'echo \'{"type": "fs"}\''
needs_c = pytest.mark.skipif(not os.access(REAL_C, os.X_OK), reason=f"needs {REAL_C}")


def program(path: Path, script: str) -> HostPath:
    """Written aside, for a program that has just run cannot be written to."""
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(f"#!/bin/sh\n{script}\n")
    aside.chmod(0o755)
    aside.rename(path)
    return HostPath(str(path))


def flavour_of(binary: str, answers: Path, *, later_ns: int = HOUR_NS) -> VirtiofsdFlavour:
    """As a new shim learns it, `later_ns` after now."""

    async def scenario() -> VirtiofsdFlavour:
        stored = FileAnswers(str(answers), clock_ns=lambda: time.time_ns() + later_ns)
        return await VirtiofsdFlavours(Children(), stored).of(binary)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("output", "flavour"),
    [
        pytest.param(b'{"type": "fs", "features": ["migrate-precopy", "separate-options"]}', RUST, id="rust"),
        pytest.param(b'{\n  "type": "fs"\n}\n', C, id="c"),
        pytest.param(b'{"type": "fs", "features": []}', None, id="neither"),
        pytest.param(b'{"type": "gpu"}', None, id="other-daemon"),
        pytest.param(b"usage: ...", None, id="no-json"),
        pytest.param(b"[]", None, id="no-object"),
    ],
)
def test_flavour_from_capabilities(output: bytes, flavour: VirtiofsdFlavour | None) -> None:
    assert flavour_from_capabilities(output) is flavour


@pytest.mark.parametrize(
    ("output", "flavour"),
    [
        pytest.param(b"virtiofsd version 7.2.22 (Debian)\nusing FUSE kernel interface version 7.36\n", C, id="c"),
        pytest.param(b"virtiofsd 1.13.0\n", RUST, id="rust"),
        pytest.param(b"virtiofsd 2\n", None, id="unknown"),
        pytest.param(b"", None, id="silent"),
    ],
)
def test_flavour_from_version(output: bytes, flavour: VirtiofsdFlavour | None) -> None:
    assert flavour_from_version(output) is flavour


def test_a_binary_is_asked_by_one_shim_until_the_file_changes(tmp_path: Path) -> None:
    log, answers = tmp_path / "asked", tmp_path / "run" / "answers"
    binary = program(tmp_path / "virtiofsd", f"echo $1 >> {log}; {SAYS_RUST}")

    assert [flavour_of(binary, answers) for _ in range(3)] == [RUST] * 3
    assert log.read_text() == "--print-capabilities\n"
    program(tmp_path / "virtiofsd", f"echo again >> {log}; {SAYS_C}")
    assert [flavour_of(binary, answers) for _ in range(2)] == [C, C]
    assert log.read_text() == "--print-capabilities\nagain\n"


def test_a_file_that_has_just_changed_is_asked_again(tmp_path: Path) -> None:
    log, answers = tmp_path / "asked", tmp_path / "answers"
    binary = program(tmp_path / "virtiofsd", f"echo asked >> {log}; {SAYS_RUST}")

    assert [flavour_of(binary, answers, later_ns=0) for _ in range(2)] == [RUST, RUST]
    assert log.read_text() == "asked\nasked\n"
    assert not answers.exists()


def test_a_word_that_is_no_flavour_is_asked_for(tmp_path: Path) -> None:
    log, answers = tmp_path / "asked", tmp_path / "answers"
    binary = program(tmp_path / "virtiofsd", f"echo asked >> {log}; {SAYS_RUST}")
    assert flavour_of(binary, answers) is RUST
    (stored,) = answers.iterdir()
    stored.write_text("perl")

    assert flavour_of(binary, answers) is RUST
    assert log.read_text() == "asked\nasked\n"


def test_version_decides_when_capabilities_do_not(tmp_path: Path) -> None:
    binary = program(tmp_path / "virtiofsd", '[ "$1" = -V ] && echo virtiofsd 1.4.0 || exit 2')

    assert flavour_of(binary, tmp_path / "answers") is RUST


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        pytest.param(lambda path: f"{path}/none", FailedPrecondition, "find virtiofsd '.*/none': ENOENT", id="missing"),
        pytest.param(
            lambda path: program(path / "x", "exit 1"), VirtiofsdFailed, "-V is not understood", id="stranger"
        ),
        pytest.param(
            lambda path: "/etc/passwd", FailedPrecondition, "start program '/etc/passwd': EACCES", id="no-program"
        ),
    ],
)
def test_a_binary_that_is_no_virtiofsd(tmp_path: Path, make: Callable[[Path], str], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        flavour_of(make(tmp_path), tmp_path / "answers")
    assert not (tmp_path / "answers").exists()


@needs_c
def test_debians_c_virtiofsd_is_recognised(tmp_path: Path) -> None:
    assert flavour_of(REAL_C, tmp_path / "answers") is C
