"""virtiofsd: its flavour, the command line of each flavour for the same configuration, and how it dies."""

import asyncio
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyshim.host.fds import listening_socket
from pyshim.host.file_answers import FileAnswers
from pyshim.host.processes.children import Children
from pyshim.host.processes.launch import SpawnFailed
from pyshim.host.processes.rights import NAMES, ThreadRights, rights_of_threads
from pyshim.model.errors import FailedPrecondition, Internal, InvalidArgument
from pyshim.model.host_facts import VirtiofsdFlavour
from pyshim.model.ids import HostPath
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.volumes import VirtiofsdPlan
from pyshim.resources.volumes.host.virtiofsd import VirtiofsdProcess, start_virtiofsd, virtiofsd_command
from pyshim.resources.volumes.host.virtiofsd_flavours import (
    VirtiofsdFlavours,
    flavour_from_capabilities,
    flavour_from_version,
)
from tests.fakes.ledger import FakeLedger
from tests.unit.pod.conftest import until

REAL_C = "/usr/lib/qemu/virtiofsd"
RUST, C = VirtiofsdFlavour.RUST, VirtiofsdFlavour.C
INSTALLED = "/usr/libexec/virtiofsd" if os.path.exists("/usr/libexec/virtiofsd") else REAL_C
# Since Debian 13 its path is a link to the one in Rust.
is_c = os.access(REAL_C, os.X_OK) and not os.path.islink(REAL_C)
needs_c = pytest.mark.skipif(not is_c, reason="needs QEMU's virtiofsd, in C")
needs_any = pytest.mark.skipif(not os.access(INSTALLED, os.X_OK), reason=f"needs {INSTALLED}")


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

    assert " ".join(words) in " ".join(command.argv[2:])
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


LACKING_IN_C = "--seccomp=none --inode-file-handles=mandatory --new-option"
DECIDED = "--syslog --shared-dir=/ --fd=9 --socket-path=/x"


@pytest.mark.parametrize(
    ("given", "rust", "c", "c_dropped"),
    [
        ("--xattr --announce-submounts", None, "-o xattr -o announce_submounts", ""),
        ("--thread-pool-size 4", "--thread-pool-size=4", "--thread-pool-size=4", ""),
        ("--sandbox=chroot --sandbox=none", None, "", "--sandbox=chroot --sandbox=none"),
        ("--log-level=error --log-level=off", None, "-o log_level=err", "--log-level=off"),
        (LACKING_IN_C, None, "", LACKING_IN_C),
        ("-o xattr,flock", "-o xattr -o flock", "-o xattr -o flock", ""),
        (DECIDED, "", "", DECIDED),
        ("--socket-path /x", "", "", "--socket-path=/x"),
    ],
)
def test_extra_arguments_are_in_each_flavours_words(given: str, rust: str | None, c: str, c_dropped: str) -> None:
    """Words that contradict a decision of ours are dropped, and those that a flavour lacks. None: as given."""
    arguments = tuple(given.split())
    for_rust = virtiofsd_command(plan(extra_args=arguments), RUST)
    for_c = virtiofsd_command(plan(extra_args=arguments), C)

    own = () if "--inode-file-handles=mandatory" in given else ("--inode-file-handles=never",)
    kept = given if rust is None else rust
    assert for_rust.argv[5:] == (*own, *kept.split())
    assert for_rust.dropped == (() if kept else tuple(c_dropped.split()))
    assert (for_c.argv[10:], for_c.dropped) == (tuple(c.split()), tuple(c_dropped.split()))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        pytest.param(("-o", "source=/"), (), id="plain"),
        pytest.param(("-osource=/,xattr",), ("-o", "xattr"), id="with-another"),
        pytest.param(("-o", r"\source=/"), (), id="escaped"),
        pytest.param(("-o", r"s\157urce=/,\cache=always"), (), id="octal"),
        pytest.param(("-o", r"xattr\,source=/"), (), id="behind-an-escaped-comma"),
    ],
)
@pytest.mark.parametrize("flavour", [RUST, C])
def test_sub_options_do_not_change_the_share(
    flavour: VirtiofsdFlavour, given: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    """However they are written: libfuse takes backslashes away, and the Rust one splits at every comma."""
    command = virtiofsd_command(plan(extra_args=given), flavour)

    assert command.argv[6 if flavour is RUST else 10 :] == kept
    assert command.dropped


def test_the_c_one_begins_with_the_rights_that_it_needs_in_the_end() -> None:
    def begins_with(*given: str) -> set[str]:
        command = virtiofsd_command(plan(extra_args=given), C)
        assert command.capabilities is not None
        return {NAMES[number] for number in command.capabilities}

    needed = {"chown", "dac_override", "fowner", "fsetid", "setgid", "setuid", "setfcap", "setpcap", "sys_chroot"}
    assert begins_with() == needed
    assert begins_with("--modcaps=+mknod:-chown") == (needed | {"mknod"}) - {"chown"}
    assert begins_with("-o", "sandbox=namespace") == needed
    assert virtiofsd_command(plan(), C, in_view=False).capabilities is None
    assert virtiofsd_command(plan(), RUST).capabilities is None


@pytest.mark.parametrize(
    ("given", "modcaps", "others"),
    [
        pytest.param((), "-mknod", (), id="without-mknod"),
        pytest.param(("--modcaps=+sys_admin:-chown", "--modcaps", "+fowner"), "-mknod:+sys_admin:-chown:+fowner", ()),
        pytest.param(("-o", "xattr,modcaps=+sys_admin"), "-mknod:+sys_admin", ("-o", "xattr"), id="as-a-suboption"),
        pytest.param(("--modcaps=+sys_admin:+MKNOD",), "+sys_admin:+MKNOD", (), id="asked-for"),
        pytest.param(("-omodcaps=+mknod",), "+mknod", (), id="asked-for-as-a-suboption"),
        pytest.param(("--modcaps",), "-mknod", (), id="without-a-value"),
    ],
)
def test_capabilities_are_one_list_without_mknod(given: tuple[str, ...], modcaps: str, others: tuple[str, ...]) -> None:
    for_rust = virtiofsd_command(plan(extra_args=given), RUST)
    for_c = virtiofsd_command(plan(extra_args=given), C)

    assert for_rust.argv[4:] == (f"--modcaps={modcaps}", "--inode-file-handles=never", *others)
    assert for_c.argv[8:] == ("-o", f"modcaps={modcaps}", *others)


async def start(wanted: VirtiofsdPlan, ledger: FakeLedger, children: Children, directory: Path) -> VirtiofsdProcess:
    flavours = VirtiofsdFlavours(children, FileAnswers(str(directory / "answers")))
    return await start_virtiofsd(wanted, ledger, children, flavours=flavours)


def unlink(entry: LedgerEntry) -> None:
    if entry.kind is ResourceKind.SOCKET:
        os.unlink(entry.key)


@needs_any
@pytest.mark.root
async def test_socket_takes_connections_and_both_resources_are_in_the_ledger(tmp_path: Path) -> None:
    wanted = plan(binary=INSTALLED, shared_dir=str(tmp_path), listen_path=str(tmp_path / "fs.sock"))

    ledger, children = FakeLedger(unlink), Children()

    virtiofsd = await start(wanted, ledger, children, tmp_path)

    assert [entry.kind for entry in ledger.held.values()] == [ResourceKind.SOCKET, ResourceKind.PROCESS]
    assert os.stat(wanted.listen_path).st_mode & 0o777 == 0o600
    assert resource.prlimit(virtiofsd.pid, resource.RLIMIT_CORE) == (1, 1), "it maps the guest's memory"
    assert os.readlink(f"/proc/{virtiofsd.pid}/ns/net") != os.readlink("/proc/self/ns/net")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(wanted.listen_path)
    await virtiofsd.stop()
    await virtiofsd.stop()
    assert "SIGKILL" in await virtiofsd.wait() or "exited" in await virtiofsd.wait()
    assert ledger.held == {}
    assert children.alive == ()

    assert not os.path.exists(wanted.listen_path)


@needs_c
@pytest.mark.root
@pytest.mark.parametrize(("extra_args", "more"), [((), set()), (("--modcaps=+mknod",), {"mknod"})], ids=str)
def test_no_thread_has_more_rights_than_it_needs(tmp_path: Path, extra_args: tuple[str, ...], more: set[str]) -> None:
    """Each thread: its libraries start one before `main`, which keeps what the program began with."""
    wanted = plan(binary=REAL_C, shared_dir=str(tmp_path), listen_path=str(tmp_path / "fs.sock"), extra_args=extra_args)

    async def scenario() -> tuple[tuple[ThreadRights, ...], list[str], list[str]]:
        children = Children()
        virtiofsd = await start(wanted, FakeLedger(unlink), children, tmp_path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(wanted.listen_path)  # it gives its last rights up once a VMM is there
            await until(lambda: serves(virtiofsd.pid))
            threads = rights_of_threads(virtiofsd.pid)
            files = [os.readlink(fd) for fd in Path(f"/proc/{virtiofsd.pid}/fd").iterdir()]
            apart = [kind for kind in ("mnt", "net", "pid") if is_apart(virtiofsd.pid, kind)]
        await virtiofsd.stop()
        return threads, files, apart

    (serving, *others), files, apart = asyncio.run(scenario())

    server = {"chown", "dac_override", "fowner", "fsetid", "setgid", "setuid", "setfcap"} | more
    assert {NAMES[number] for number in serving.capabilities} == server
    assert {NAMES[number] for thread in others for number in thread.capabilities} <= server | {"setpcap", "sys_chroot"}
    assert {thread.bounding <= thread.permitted and thread.no_new_privs for thread in (serving, *others)} == {True}
    assert apart == ["mnt", "net", "pid"]
    assert {"/proc/self/fd", "/proc/self/task", str(tmp_path)} <= set(files)


def serves(pid: int) -> bool:
    """It has its own filter and then no right that only its preparation needs."""
    serving = rights_of_threads(pid)[0]
    has_filter = serving.filters > rights_of_threads(os.getpid())[0].filters
    return has_filter and "setpcap" not in {NAMES[number] for number in serving.capabilities}


def is_apart(pid: int, kind: str) -> bool:
    return os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")


@needs_c
@pytest.mark.root
def test_the_reason_of_an_early_death_is_in_its_text(tmp_path: Path) -> None:
    wanted = plan(
        binary=REAL_C, shared_dir=str(tmp_path), listen_path=str(tmp_path / "s"), extra_args=("-o", "nonsense")
    )

    async def scenario() -> str:
        ledger, children = FakeLedger(unlink), Children()
        try:
            virtiofsd = await start(wanted, ledger, children, tmp_path)
            reason = await virtiofsd.wait()
            await virtiofsd.stop()
        except SpawnFailed as error:  # it ended before it was confined
            reason = str(error)
        assert (ledger.held, children.alive) == ({}, ())
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
    binary = tmp_path / "virtiofsd"
    binary.write_text('#!/bin/sh\necho \'{"type": "fs"}\'\n')
    binary.chmod(0o755)
    wanted = plan(**{"binary": str(binary), "shared_dir": str(tmp_path), "listen_path": str(tmp_path / "s"), **changes})
    ledger, children = FakeLedger(), Children()

    with pytest.raises((FailedPrecondition, Internal), match=text):
        asyncio.run(start(wanted, ledger, children, tmp_path))

    assert ledger.held == {}
    assert children.alive == ()


def test_a_stale_socket_is_replaced_and_a_long_path_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    listening_socket(path).close()
    listening_socket(path).close()

    with pytest.raises(InvalidArgument, match="longer than 107 bytes"):
        listening_socket("/" + "x" * 107)


HOUR_NS = 3600 * 10**9
SAYS_RUST = 'echo \'{"type": "fs", "features": ["separate-options"]}\''
SAYS_C = 'echo \'{"type": "fs"}\''


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
def test_capabilities_tell_the_flavour(output: bytes, flavour: VirtiofsdFlavour | None) -> None:
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
def test_the_version_tells_the_flavour(output: bytes, flavour: VirtiofsdFlavour | None) -> None:
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
        pytest.param(lambda path: program(path / "x", "exit 1"), Internal, "-V is not understood", id="stranger"),
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
