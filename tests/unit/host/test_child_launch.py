"""How a child starts: its descriptors, signals, environment and network namespace are what was given."""

import asyncio
import errno
import os
import resource
import signal
import socket
import sys
import uuid
from pathlib import Path

import pytest

from pyshim.host import syscalls
from pyshim.host.processes import children as children_module
from pyshim.host.processes import identity
from pyshim.host.processes.children import Children
from pyshim.host.processes.launch import Isolation, SpawnFailed, set_labels
from pyshim.model.confinement import ProcessLabels
from tests.fakes.ledger import FakeLedger
from tests.unit.host.child_scenarios import ENV, finished, shell


async def test_child_has_exactly_the_descriptors_it_was_given(children: Children) -> None:
    stray = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(stray, True)
    given, peer = socket.socketpair()
    try:
        child = await children.spawn(["/bin/sleep", "600"], env=ENV, fds={7: given.fileno()})
        async with asyncio.timeout(30):
            # While it starts the loader has the libraries open.
            while sorted(os.listdir(f"/proc/{child.pid}/fd"), key=int) != ["0", "1", "2", "7"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await child.end()
    finally:
        os.close(stray)
        given.close()
        peer.close()


async def test_descriptors_may_trade_numbers(tmp_path: Path, children: Children) -> None:
    (tmp_path / "a").write_text("A")
    (tmp_path / "b").write_text("B")

    a, b = os.open(tmp_path / "a", os.O_RDONLY), os.open(tmp_path / "b", os.O_RDONLY)
    # The child's `a` is our b and the other way round: plain dup2s in a row would give it one file twice.
    said = await finished(children, f"cat /proc/$$/fd/{a} /proc/$$/fd/{b} >&2; true", fds={a: b, b: a})
    os.close(a)
    os.close(b)

    assert said.last_words() == ("BA",)


async def test_stdio_is_null_unless_given(children: Children) -> None:
    child = await finished(children, "said=$(readlink /proc/$$/fd/0 /proc/$$/fd/1); echo $said >&2")
    read_end, write_end = os.pipe()
    try:
        piped = await children.spawn(shell("echo out; echo err >&2"), env=ENV, stdout=write_end, stderr=write_end)
        await piped.wait()
        said = os.read(read_end, 100)
    finally:
        os.close(read_end)
        os.close(write_end)

    assert child.last_words() == ("/dev/null /dev/null",)
    assert said == b"out\nerr\n"
    assert piped.last_words() == ()


async def test_child_starts_with_default_signals_and_its_own_session(children: Children) -> None:
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN  # Python's own doing
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        _, masks = await children.output(["/bin/grep", "^Sig[BI]", "/proc/self/status"], env=ENV, timeout_s=30)
        _, stat = await children.output(["/bin/cat", "/proc/self/stat"], env=ENV, timeout_s=30)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})

    blocked, ignored = (int(line.split()[1], 16) for line in masks.splitlines())
    threading_signals = 0b11 << 31  # 32 and 33: the C library's own, which no program can set
    assert (blocked, ignored & ~threading_signals) == (0, 0)
    pid, session = stat.split()[0], stat.split()[5]
    assert pid == session


async def test_environment_is_only_what_was_given(children: Children) -> None:
    _, output = await children.output(["/usr/bin/env"], env={"A": "b"}, timeout_s=10)

    assert output == b"A=b\n"


@pytest.mark.parametrize(
    ("argv", "cause"),
    [
        pytest.param(["/nonexistent/program"], "ENOENT (no such file or directory)", id="missing"),
        pytest.param(["/etc/passwd"], "EACCES (permission denied)", id="not-executable"),
        pytest.param(["/"], "EACCES (permission denied)", id="directory"),
    ],
)
async def test_unstartable_program_is_named_with_its_cause(argv: list[str], cause: str, children: Children) -> None:
    ledger = FakeLedger()

    with pytest.raises(SpawnFailed) as caught:
        await children.spawn(argv, env=ENV, ledger=ledger, ledger_key=argv[0])

    assert str(caught.value) == f"start program {argv[0]!r}: {cause}"
    assert ledger.held == {}


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        pytest.param("/run/netns/none-such", "ENOENT", id="missing"),
        pytest.param("/dev/null", "EINVAL", id="not-a-namespace"),
    ],
)
async def test_wrong_network_namespace_is_named(path: str, cause: str, children: Children) -> None:
    with pytest.raises(SpawnFailed, match=f"enter network namespace '{path}': {cause}"):
        await children.spawn(shell("exit 0"), env=ENV, isolation=Isolation(netns_path=path))


ATTACK = """
import errno, socket, sys
for family, address in ((socket.AF_INET, ("127.0.0.1", int(sys.argv[1]))), (socket.AF_UNIX, "\\0" + sys.argv[2])):
    with socket.socket(family) as client:
        print(errno.errorcode.get(client.connect_ex(address), "reached"), file=sys.stderr)
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("empty_netns", "said"),
    [
        pytest.param(False, ("reached", "reached"), id="control-in-the-hosts-namespace"),
        pytest.param(True, ("ENETUNREACH", "ECONNREFUSED"), id="in-an-empty-namespace"),
    ],
)
async def test_loopback_and_abstract_sockets_of_the_host_are_out_of_reach_in_an_empty_namespace(
    empty_netns: bool, said: tuple[str, str], children: Children
) -> None:
    name = f"pyshim-test-{uuid.uuid4()}"
    with socket.create_server(("127.0.0.1", 0)) as loopback, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        argv = [sys.executable, "-I", "-S", "-c", ATTACK, str(loopback.getsockname()[1]), name]

        child = await children.spawn(argv, env=ENV, isolation=Isolation(empty_netns=empty_netns))
        await child.wait()

    assert child.last_words() == said


@pytest.mark.root
async def test_child_runs_in_the_network_namespace_and_we_do_not(children: Children) -> None:
    own = os.readlink("/proc/thread-self/ns/net")
    holder_script = "readlink /proc/self/ns/net; exec cat"
    keep_read, keep_write = os.pipe()
    said_read, said_write = os.pipe()
    holder = await children.spawn(
        ["/usr/bin/unshare", "--net", "/bin/sh", "-c", holder_script], env=ENV, stdin=keep_read, stdout=said_write
    )
    os.close(said_write)
    other = (await asyncio.to_thread(os.read, said_read, 100)).decode().strip()

    child = await finished(
        children, "readlink /proc/$$/ns/net >&2", isolation=Isolation(netns_path=f"/proc/{holder.pid}/ns/net")
    )

    assert child.last_words() == (other,)
    assert other != own
    assert os.readlink("/proc/thread-self/ns/net") == own
    for fd in (keep_read, keep_write, said_read):
        os.close(fd)
    await holder.wait()


@pytest.mark.root
async def test_cancelled_start_in_a_namespace_leaves_no_process(children: Children) -> None:
    isolation = Isolation(netns_path="/proc/self/ns/net")
    for _ in range(200):
        starting = asyncio.create_task(children.spawn(shell("exec sleep 1000"), env=ENV, isolation=isolation))
        await asyncio.sleep(0)
        starting.cancel()
        try:
            child = await starting
        except asyncio.CancelledError:
            return
        # The thread was quicker than the cancel, which since Python 3.14 ends the start without a turn of the loop.
        await child.end()
    pytest.fail("no start was cancelled")


async def test_a_full_descriptor_table_is_an_error_and_leaks_none(children: Children) -> None:
    async def attempt() -> str:
        try:
            child = await children.spawn(shell("exit 0"), env=ENV)
        except SpawnFailed as error:
            return str(error)
        return str(await child.wait())

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    said: list[str] = []
    # How many descriptors a spawn needs is the interpreter's business, and which numbers are free is the
    # machine's: the limit is raised until one spawn succeeds.
    for limit in range(lowest_free, highest + 100):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
        try:
            said.append(await attempt())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        if said[-1] == "exited with status 0":
            break

    assert said[-1] == "exited with status 0"
    assert len(said) > 1
    assert all(line.startswith("start program '/bin/sh': E") for line in said[:-1])


def own_rights() -> list[str]:
    """This thread's."""
    return [line for line in Path("/proc/thread-self/status").read_text().splitlines() if line[:3] in ("Cap", "NoN")]


@pytest.mark.root
@pytest.mark.parametrize("netns_path", [None, "/proc/self/ns/net"], ids=["here", "in-a-namespace"])
async def test_a_child_has_the_capabilities_it_was_left_and_can_gain_none(
    netns_path: str | None, children: Children
) -> None:
    script = "grep -E '^(Cap|NoNew)' /proc/$$/status >&2"

    before = own_rights()
    child = await finished(
        children, script, isolation=Isolation(capabilities=frozenset({1, 14}), netns_path=netns_path)
    )
    none = await finished(children, script, isolation=Isolation(capabilities=frozenset(), netns_path=netns_path))

    two, nothing = f"{1 << 1 | 1 << 14:016x}", f"{0:016x}"
    fields = dict(line.split() for line in child.last_words())
    assert fields == {
        "CapInh:": nothing,
        "CapPrm:": two,
        "CapEff:": two,
        "CapBnd:": two,
        "CapAmb:": nothing,
        "NoNewPrivs:": "1",
    }
    assert {line.split()[1] for line in none.last_words()} == {nothing, "1"}
    assert own_rights() == before


async def test_a_child_that_never_had_capabilities_gains_none(children: Children) -> None:
    child = await finished(
        children, "grep NoNewPrivs /proc/$$/status >&2", isolation=Isolation(capabilities=frozenset())
    )

    assert child.last_words() == ("NoNewPrivs: 1",)


async def test_a_thread_that_cannot_give_up_its_capabilities_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    def refuse(_kept: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(syscalls, "limit_capabilities_of_programs", refuse)

    with pytest.raises(SpawnFailed, match="give up capabilities before the start: EPERM"):
        await children.spawn(shell("exit 0"), env=ENV, isolation=Isolation(capabilities=frozenset()))


@pytest.mark.root
async def test_a_program_with_a_thread_that_has_more_than_it_may_have_is_ended(
    monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    """It is looked at once it runs; `sleep` stands for it here, with all rights of the tests."""
    monkeypatch.setattr(syscalls, "limit_capabilities_of_programs", lambda _kept: None)

    with pytest.raises(SpawnFailed, match=r"watch program .*: EPERM \(thread 'sh' \([0-9]+\) has chown, .*sys_admin"):
        await children.spawn(shell("sleep 600"), env=ENV, isolation=Isolation(capabilities=frozenset({1})))

    assert (children.alive, [child.pid for child in identity.children(os.getpid())]) == ((), [])


@pytest.mark.root
async def test_the_first_process_of_its_namespace_can_signal_no_other(children: Children) -> None:
    script = f"echo $$ >&2; kill -0 {os.getpid()} && echo reached >&2"

    inside = await finished(children, script, isolation=Isolation(own_processes=True))
    outside = await finished(children, script, isolation=Isolation(empty_netns=True))

    assert outside.last_words()[-1] == "reached", "the control"
    assert inside.last_words()[0] == "1"
    assert "reached" not in inside.last_words()


@pytest.mark.parametrize("dumps_core", [False, True])
async def test_a_crash_writes_no_core_unless_allowed(children: Children, tmp_path: Path, dumps_core: bool) -> None:
    """The control allows it, and the kernel then says that it made one."""
    former = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (former[1], former[1]))
    if former[1] == 0:
        pytest.skip("the hard limit of cores is 0 here, so no program makes one")

    directory = os.getcwd()
    try:
        os.chdir(tmp_path)
        child = await children.spawn(["/bin/sleep", "600"], env=ENV, dumps_core=dumps_core)
        limit = resource.prlimit(child.pid, resource.RLIMIT_CORE)
        child.kill(signal.SIGSEGV)
        # Blocks the loop, whose watcher would reap it: its end says whether it made a core.
        end = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        assert end is not None
        made = end.si_code == os.CLD_DUMPED
        await child.wait()

        assert limit == ((former[1], former[1]) if dumps_core else (1, 1))
        assert not made or dumps_core
        if dumps_core and not made:
            pytest.skip("the kernel's core_pattern makes no core here, so its absence shows nothing")
        assert resource.getrlimit(resource.RLIMIT_CORE) == (former[1], former[1]), "the shim's own limit stays"
    finally:
        os.chdir(directory)
        resource.setrlimit(resource.RLIMIT_CORE, former)


def label_files(directory: Path, *modules: str) -> dict[str, str]:
    """Places of a made-up /proc and /sys, of a host with these security modules."""
    (directory / "attr/apparmor").mkdir(parents=True)
    for name in ("exec", "apparmor/exec"):
        (directory / f"attr/{name}").touch()
    for name in modules:
        (directory / name).mkdir(parents=True)
    if "fs/selinux" in modules:
        (directory / "fs/selinux/enforce").touch()
    return {"attr": str(directory / "attr"), "sys": str(directory)}


LABELS = ProcessLabels("u:r:container_kvm_t:s0:c1,c2", "pyshim-vmm")


def test_labels_are_written_as_each_module_reads_them(tmp_path: Path) -> None:
    set_labels(LABELS, **label_files(tmp_path, "fs/selinux", "kernel/security/apparmor"))

    assert (tmp_path / "attr/exec").read_text() == "u:r:container_kvm_t:s0:c1,c2"
    assert (tmp_path / "attr/apparmor/exec").read_text() == "exec pyshim-vmm"


def test_a_kernel_before_5_8_reads_the_profile_in_the_shared_file(tmp_path: Path) -> None:
    files = label_files(tmp_path, "kernel/security/apparmor")
    (tmp_path / "attr/apparmor/exec").unlink()

    set_labels(ProcessLabels("", "p"), **files)

    assert (tmp_path / "attr/exec").read_text() == "exec p"


def test_a_host_without_selinux_ignores_the_runtimes_label_and_refuses_the_operators_profile(tmp_path: Path) -> None:
    files = label_files(tmp_path)

    set_labels(ProcessLabels("u:r:t:s0"), **files)
    with pytest.raises(SpawnFailed, match="set AppArmor profile 'pyshim-vmm': this host has no AppArmor"):
        set_labels(LABELS, **files)

    assert (tmp_path / "attr/exec").read_text() == ""


def test_a_label_that_the_kernel_refuses_is_named(tmp_path: Path) -> None:
    files = label_files(tmp_path, "fs/selinux")
    (tmp_path / "attr/exec").unlink()
    (tmp_path / "attr/exec").mkdir()

    with pytest.raises(SpawnFailed, match="set SELinux label 'u:r:container_kvm_t:s0:c1,c2': EISDIR"):
        set_labels(LABELS, **files)


@pytest.mark.skipif(os.path.isdir("/sys/kernel/security/apparmor"), reason="needs a host without AppArmor")
async def test_a_child_with_a_profile_does_not_start_where_it_would_run_without(children: Children) -> None:
    with pytest.raises(SpawnFailed, match="this host has no AppArmor"):
        await children.spawn(shell("true"), env=ENV, isolation=Isolation(labels=ProcessLabels(apparmor="p")))

    assert children.alive == ()


@pytest.mark.root
async def test_a_child_is_looked_at_again_when_the_kernel_has_not_yet_set_its_capabilities(
    monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    """The caller of vfork goes on a moment before the program's capabilities are in place."""
    found = ["thread 'python' (12) has sys_admin", "thread 'python' (12) has sys_admin", ""]
    monkeypatch.setattr(children_module, "excess", lambda _pid, _allowed: found.pop(0))

    child = await children.spawn(shell("exit 3"), env=ENV, isolation=Isolation(capabilities=frozenset()))

    assert (await child.wait()).code == 3
    assert found == []
