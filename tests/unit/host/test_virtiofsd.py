"""virtiofsd: which one it is, how each is told the same thing, and how it dies."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyshim.host.processes.children import Children
from pyshim.host.virtiofsd import (
    VirtiofsdFailed,
    VirtiofsdFlavours,
    flavour_from_capabilities,
    flavour_from_version,
    listening_socket,
    start_virtiofsd,
    virtiofsd_command,
)
from pyshim.model.errors import FailedPrecondition, Internal, InvalidArgument
from pyshim.model.host_facts import VirtiofsdFlavour
from pyshim.model.ids import HostPath
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.share import VirtiofsdPlan
from tests.fakes.ledger import FakeLedger

REAL_C = "/usr/lib/qemu/virtiofsd"
RUST, C = VirtiofsdFlavour.RUST, VirtiofsdFlavour.C
needs_c = pytest.mark.skipif(not os.access(REAL_C, os.X_OK), reason=f"needs {REAL_C}")


def plan(**changes: Any) -> VirtiofsdPlan:
    fields: dict[str, Any] = {
        "binary": HostPath("/bin/virtiofsd"),
        "shared_dir": HostPath("/shared"),
        "listen_path": HostPath("/vm/vhost-fs.sock"),
        "cache": "auto",
        "extra_args": (),
        "debug": False,
    }
    return VirtiofsdPlan(**{**fields, **changes})


@pytest.mark.parametrize(
    ("flavour", "cache", "words"),
    [
        pytest.param(RUST, "", ("--cache=auto",), id="rust-default"),
        pytest.param(RUST, "never", ("--cache=never",), id="rust-never"),
        pytest.param(RUST, "metadata", ("--cache=metadata",), id="rust-metadata"),
        pytest.param(RUST, "always", ("--cache=always",), id="rust-always"),
        pytest.param(C, "", ("-o", "cache=auto"), id="c-default"),
        pytest.param(C, "never", ("-o", "cache=none"), id="c-never"),
        pytest.param(C, "metadata", ("-o", "cache=none"), id="c-metadata"),
        pytest.param(C, "always", ("-o", "cache=always"), id="c-always"),
    ],
)
def test_cache_mode_in_each_flavours_words(flavour: VirtiofsdFlavour, cache: str, words: tuple[str, ...]) -> None:
    command = virtiofsd_command(plan(cache=cache), flavour)

    assert command.argv[-len(words) :] == words
    assert command.argv[:2] == ("/bin/virtiofsd", "--fd=3")


def test_unknown_cache_mode_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="unknown cache mode 'fast'"):
        virtiofsd_command(plan(cache="fast"), RUST)


@pytest.mark.parametrize(
    ("flavour", "word"),
    [pytest.param(RUST, "--shared-dir=/a,b", id="rust"), pytest.param(C, "source=/a\\,b", id="c-escapes-commas")],
)
def test_the_share_is_named_and_is_the_key(flavour: VirtiofsdFlavour, word: str) -> None:
    command = virtiofsd_command(plan(shared_dir=HostPath("/a,b")), flavour)

    assert word in command.argv
    assert command.key == word


@pytest.mark.parametrize(
    ("given", "rust", "rust_dropped", "c", "c_dropped"),
    [
        pytest.param(
            ("--thread-pool-size=1", "--announce-submounts"),
            ("--thread-pool-size=1", "--announce-submounts"),
            (),
            ("--thread-pool-size=1", "-o", "announce_submounts"),
            (),
            id="kata-defaults",
        ),
        pytest.param(
            ("--thread-pool-size", "4", "--xattr"),
            ("--thread-pool-size=4", "--xattr"),
            (),
            ("--thread-pool-size=4", "-o", "xattr"),
            (),
            id="value-in-its-own-word",
        ),
        pytest.param(
            ("--sandbox=chroot", "--sandbox=none"),
            ("--sandbox=chroot", "--sandbox=none"),
            (),
            ("-o", "sandbox=chroot"),
            ("--sandbox=none",),
            id="c-has-no-sandbox-none",
        ),
        pytest.param(
            ("--log-level=error", "--log-level=off"),
            ("--log-level=error", "--log-level=off"),
            (),
            ("-o", "log_level=err"),
            ("--log-level=off",),
            id="log-levels",
        ),
        pytest.param(
            ("--seccomp=none", "--inode-file-handles=mandatory", "--new-option"),
            ("--seccomp=none", "--inode-file-handles=mandatory", "--new-option"),
            (),
            (),
            ("--seccomp=none", "--inode-file-handles=mandatory", "--new-option"),
            id="c-lacks-the-option",
        ),
        pytest.param(
            ("--syslog", "--shared-dir=/", "--fd=9", "--socket-path", "/x", "-o", "source=/", "-osource=/,xattr"),
            (),
            ("--syslog", "--shared-dir=/", "--fd=9", "--socket-path=/x", "-o source=/", "-o source=/,xattr"),
            (),
            ("--syslog", "--shared-dir=/", "--fd=9", "--socket-path=/x", "-o source=/", "-o source=/,xattr"),
            id="nobody-may-undo-our-decisions",
        ),
        pytest.param(("-o", "xattr,flock"), ("-o", "xattr,flock"), (), ("-o", "xattr,flock"), (), id="compat"),
    ],
)
def test_extra_arguments(
    given: tuple[str, ...],
    rust: tuple[str, ...],
    rust_dropped: tuple[str, ...],
    c: tuple[str, ...],
    c_dropped: tuple[str, ...],
) -> None:
    for_rust = virtiofsd_command(plan(extra_args=given), RUST)
    for_c = virtiofsd_command(plan(extra_args=given), C)

    assert (for_rust.argv[4:], for_rust.dropped) == (rust, rust_dropped)
    assert (for_c.argv[6:], for_c.dropped) == (c, c_dropped)


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


def program(path: Path, script: str) -> HostPath:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return HostPath(str(path))


def test_a_binary_is_asked_once_until_the_file_changes(tmp_path: Path) -> None:
    log = tmp_path / "asked"
    answer = 'echo \'{"type": "fs", "features": ["separate-options"]}\''

    async def scenario() -> list[VirtiofsdFlavour]:
        flavours = VirtiofsdFlavours(Children())
        binary = program(tmp_path / "virtiofsd", f"echo $1 >> {log}; {answer}")
        found = [await flavours.of(binary), await flavours.of(binary)]
        program(tmp_path / "virtiofsd", f'echo again >> {log}; echo \'{{"type": "fs"}}\'')
        return [*found, await flavours.of(binary)]

    assert asyncio.run(scenario()) == [RUST, RUST, C]
    assert log.read_text() == "--print-capabilities\nagain\n"


def test_version_decides_when_capabilities_do_not(tmp_path: Path) -> None:
    binary = program(tmp_path / "virtiofsd", '[ "$1" = -V ] && echo virtiofsd 1.4.0 || exit 2')

    async def scenario() -> VirtiofsdFlavour:
        return await VirtiofsdFlavours(Children()).of(binary)

    assert asyncio.run(scenario()) is RUST


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
    async def scenario() -> None:
        await VirtiofsdFlavours(Children()).of(make(tmp_path))

    with pytest.raises(error, match=text):
        asyncio.run(scenario())


@needs_c
def test_debians_c_virtiofsd_is_recognised() -> None:
    async def scenario() -> VirtiofsdFlavour:
        return await VirtiofsdFlavours(Children()).of(REAL_C)

    assert asyncio.run(scenario()) is C


def unlink(entry: LedgerEntry) -> None:
    if entry.kind is ResourceKind.SOCKET:
        os.unlink(entry.key)


@needs_c
@pytest.mark.root
def test_socket_takes_connections_and_both_resources_are_in_the_ledger(tmp_path: Path) -> None:
    wanted = plan(binary=REAL_C, shared_dir=str(tmp_path), listen_path=str(tmp_path / "fs.sock"))

    async def scenario() -> None:
        ledger, children = FakeLedger(unlink), Children()

        virtiofsd = await start_virtiofsd(wanted, ledger, children)

        assert [entry.kind for entry in ledger.held.values()] == [ResourceKind.SOCKET, ResourceKind.PROCESS]
        assert os.stat(wanted.listen_path).st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(wanted.listen_path)
        await virtiofsd.stop()
        await virtiofsd.stop()
        assert "SIGKILL" in await virtiofsd.wait() or "exited" in await virtiofsd.wait()
        assert ledger.held == {}
        assert children.alive == ()

    asyncio.run(scenario())

    assert not os.path.exists(wanted.listen_path)


@needs_c
@pytest.mark.root
def test_the_reason_of_an_early_death_is_in_its_text(tmp_path: Path) -> None:
    wanted = plan(
        binary=REAL_C, shared_dir=str(tmp_path), listen_path=str(tmp_path / "s"), extra_args=("-o", "nonsense")
    )

    async def scenario() -> str:
        ledger, children = FakeLedger(unlink), Children()
        virtiofsd = await start_virtiofsd(wanted, ledger, children)
        reason = await virtiofsd.wait()
        await virtiofsd.stop()
        assert ledger.held == {}
        return reason

    reason = asyncio.run(scenario())

    assert "exited with status 1" in reason
    assert "nonsense" in reason
    assert str(tmp_path) in reason


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param({"shared_dir": "/none/such"}, "share directory '/none/such': not a directory", id="no-directory"),
        pytest.param({"listen_path": "/none/such/s"}, "listen at '/none/such/s': ENOENT", id="no-place-for-socket"),
    ],
)
def test_what_cannot_start_leaves_nothing(tmp_path: Path, changes: dict[str, str], text: str) -> None:
    binary = program(tmp_path / "virtiofsd", 'echo \'{"type": "fs"}\'')
    wanted = plan(**{"binary": binary, "shared_dir": str(tmp_path), "listen_path": str(tmp_path / "s"), **changes})
    ledger, children = FakeLedger(), Children()

    with pytest.raises((FailedPrecondition, Internal), match=text):
        asyncio.run(start_virtiofsd(wanted, ledger, children))

    assert ledger.held == {}
    assert children.alive == ()


def test_a_stale_socket_is_replaced_and_a_long_path_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    listening_socket(path).close()
    listening_socket(path).close()

    with pytest.raises(InvalidArgument, match="longer than 107 bytes"):
        listening_socket("/" + "x" * 107)
