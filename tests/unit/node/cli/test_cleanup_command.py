"""`pyshim cleanup` on real leftovers below directories of the test's own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from pyshim.cleanup import lost_vms
from pyshim.cleanup.names import VMM_WORD, Places, conventional_ledger
from pyshim.cleanup.orphans import candidates
from pyshim.host.processes import identity as processes
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.node.cli import cleanup
from pyshim.node.cli.install import require_readable_states
from pyshim.start.address import claim
from pyshim.state.schema import KEY, VERSION
from tests.fakes.left_node import LeftNode, Process, directory, running, until_it_shows
from tests.fakes.namespaces import Namespace

NAME = f"test-{os.getpid()}-"
"""Instead of `sandbox-`: a test must not find the VMs that run on this machine."""


class Node(LeftNode):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.places = Places(
            vm_root=f"{root}/vm",
            shared_root=f"{root}/shared",
            cgroup_root=f"{root}/cgroup",
            vmm_name=NAME,
            netns_root=f"{root}/netns",
        )

    def vmm(self, sandbox_id: str) -> Process:
        return self.program("qemu-system-x86_64", "-name", f"{NAME}{sandbox_id},debug-threads=on", "-mon", VMM_WORD)

    def directory(self, *parts: str) -> Path:
        path = self.root.joinpath(*parts)
        directory(path)
        return path

    def lose(self, sandbox_id: str) -> None:
        """The register has the sandbox, whose shim and state are gone."""
        self.leave(sandbox_id)
        self.file_of(sandbox_id).unlink()

    def cleanup(self, *words: str) -> int:
        node = cleanup.CleanupPlaces(
            store=self.store,
            places=self.places,
            templates=(f"{self.store.root}-templates",),
            notes=f"{self.root}/sockets",
        )
        code: int = cleanup.command.main(words, obj=node, standalone_mode=False)
        return code


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr("pyshim.cleanup.lost_vms.LOST_VMS", f"{tmp_path}/lost-vms")
    found = Node(tmp_path)
    yield found
    found.end()


def entry(kind: ResourceKind, key: Path | str, **detail: str | int) -> LedgerEntry:
    return LedgerEntry(kind=kind, key=str(key), detail=detail)


def test_the_ledger_of_a_dead_shim_is_undone_and_reported_line_by_line(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    vmm, directory = node.vmm("dead"), node.directory("vm", "dead", "somewhere")
    node.leave("dead", entry(ResourceKind.DIRECTORY, directory), running(vmm, "the-uuid"))

    assert node.cleanup("--all") == cleanup.CLEAN

    assert capsys.readouterr().out.splitlines() == [
        "sandbox 'dead': known by its state, shim 4194305 of namespace 'k8s.io' is gone",
        f"  undone: process the-uuid (pid {vmm.pid})",
        f"  undone: directory {directory}",
    ]
    assert vmm.wait() == -signal.SIGKILL
    assert not directory.exists()
    assert not node.store.has_record("dead")
    assert node.cleanup("--all") == cleanup.CLEAN
    assert capsys.readouterr().out == ""


def test_a_dry_run_says_the_same_and_changes_nothing(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    vmm, directory = node.vmm("dead"), node.directory("vm", "dead", "somewhere")
    node.leave("dead", entry(ResourceKind.DIRECTORY, directory))

    assert node.cleanup("--all", "--dry-run") == cleanup.TO_DO

    assert f"  would undo: directory {directory}" in capsys.readouterr().out.splitlines()
    assert vmm.poll() is None
    assert directory.exists()
    assert node.store.has_record("dead")


def test_a_living_shims_sandbox_is_left_alone(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    shim = node.program("shim")
    directory = node.directory("vm", "alive", "somewhere")
    node.leave("alive", entry(ResourceKind.DIRECTORY, directory), shim=shim)

    assert node.cleanup("--all") == cleanup.CLEAN
    assert capsys.readouterr().out == ""
    assert node.cleanup("alive") == cleanup.IN_USE

    assert f"shim {shim.pid} of namespace 'k8s.io' serves it" in capsys.readouterr().out
    assert directory.exists()


@pytest.mark.parametrize("body", [None, "", "{", '{"PersistVersion":2,"Pyshim":{}}'])
def test_a_lost_or_damaged_state_is_made_up_for_by_conventions(
    node: Node, body: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    vmm = node.vmm("dead")
    virtiofsd = node.program("virtiofsd", f"source={node.root}/shared/dead/shared")
    vsock = node.program("vhost-device-vsock", f"--socket={node.root}/vm/dead/vhost-vsock.sock")
    directories = [node.directory("vm", "dead"), node.directory("shared", "dead")]
    others = [node.directory("vm", "dead2"), node.directory("shared", "other")]
    bystander = node.vmm("dead2")
    node.lose("dead")
    if body is not None:
        node.file_of("dead").write_text(body)

    assert node.cleanup("dead") == cleanup.CLEAN

    out = capsys.readouterr().out
    assert "sandbox 'dead': known by the register" in out
    assert f"undone: process qemu-system-x86_64 (pid {vmm.pid})" in out
    assert [process.wait() for process in (vmm, virtiofsd, vsock)] == 3 * [-signal.SIGKILL]
    assert bystander.poll() is None
    assert [path.exists() for path in directories] == [False, False]
    assert [path.exists() for path in others] == [True, True]
    assert not node.store.has_record("dead")


def test_a_vmm_that_may_have_an_unrecorded_shim_is_left_alone(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    """Its parent is this very test, a Python program, and might be its shim."""
    vmm = node.vmm("lost")

    assert node.cleanup("lost") == cleanup.IN_USE
    assert f"process {os.getpid()} looks like its shim" in capsys.readouterr().out
    assert vmm.poll() is None


def test_a_vmm_whose_parent_is_no_shim_is_an_orphan(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    program = node.copy_of("cat", "qemu-system-x86_64")
    # The shell stands for the process that inherits orphans.
    script = f"exec 3<&0; '{program}' -- - -name {NAME}lost -mon {VMM_WORD} <&3 >&3 2>&3 & echo $!; wait"
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen(["sh", "-c", script], stdin=theirs.fileno(), stdout=subprocess.PIPE) as shell:
        theirs.close()
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        until_it_shows(pid, VMM_WORD)

        assert node.cleanup("--all") == cleanup.CLEAN

    assert f"known by its VMM (read state '{node.store.root}/lost/persist.json'" in capsys.readouterr().out
    assert processes.start_ticks(pid) is None


@pytest.mark.root
def test_a_vmm_another_user_pretends_to_run_shows_nothing(node: Node) -> None:
    """Otherwise any user could have root remove the cgroup of any container, by the container's id."""
    program = node.copy_of("cat", "qemu-system-x86_64")
    fd = os.open(program, os.O_RDONLY)
    words = [str(program), "--", "-", "-name", f"{NAME}victim", "-mon", VMM_WORD]
    # By its descriptor: the way to the file is closed to other users.
    pretender = subprocess.Popen(
        words, executable=f"/proc/self/fd/{fd}", pass_fds=(fd,), user=65534, stdin=subprocess.PIPE
    )
    os.close(fd)
    node.running.append(pretender)
    until_it_shows(pretender.pid, VMM_WORD)
    ours = node.vmm("ours")

    assert candidates(node.store, node.places) == ("ours",)
    assert pretender.poll() is None
    assert ours.poll() is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"PersistVersion": 2, "State": "running"}', "another runtime's"),
        ('{"PersistVersion": 2, "Sta', "nothing shows whose it is"),
    ],
    ids=["kata's", "kata's, cut off"],
)
def test_a_resource_that_is_not_provably_ours_is_left_alone(
    node: Node, body: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = node.directory("vm", "theirs")
    node.file_of("theirs").parent.mkdir(parents=True)
    node.file_of("theirs").write_text(body)

    assert node.cleanup("--all") == cleanup.CLEAN
    assert reason in capsys.readouterr().out
    assert node.cleanup("theirs") == cleanup.IN_USE

    assert directory.exists()
    assert node.file_of("theirs").read_text() == body


def test_an_entry_that_cannot_be_undone_stays_and_is_reported_and_the_others_are_cleaned(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck = entry(ResourceKind.SOCKET, node.directory("vm", "bad", "in-the-way"))
    node.leave("bad", stuck, entry(ResourceKind.DIRECTORY, node.directory("vm", "bad", "gone")))
    node.leave("good", entry(ResourceKind.DIRECTORY, node.directory("vm", "good", "gone too")))

    assert node.cleanup("--all") == cleanup.FAILED

    captured = capsys.readouterr()
    assert f"  kept: socket {node.root}/vm/bad/in-the-way" in captured.out
    assert f"pyshim: release socket '{node.root}/vm/bad/in-the-way': not a socket" in captured.err
    assert node.store.load("bad").ledger == (stuck,)
    assert not node.store.has_record("good")


def test_an_entry_that_no_shim_can_have_written_is_reported_once_and_dropped(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    """It will never be undone, so keeping it would fail every later run."""
    outside = node.directory("elsewhere", "theirs")
    node.leave(
        "odd", entry(ResourceKind.DIRECTORY, outside), entry(ResourceKind.DIRECTORY, node.directory("vm", "odd"))
    )

    assert node.cleanup("--all") == cleanup.FAILED
    assert (
        f"release directory '{outside}': it is not a place of sandbox 'odd', so it is left" in capsys.readouterr().err
    )
    assert outside.exists()
    assert not node.store.has_record("odd")
    assert node.cleanup("--all") == cleanup.CLEAN


def test_cgroups_are_found_by_their_names_unless_others_run_in_them(node: Node) -> None:
    ours = [
        "kata_overhead/dead",
        "kubepods/pod1/dead",
        "kubepods/pod2/kata_dead",
        "system.slice/cri-containerd-dead.scope",
        "vc/crio-dead",
        "vc/kata_crio-dead",
    ]
    others = ["default/dead", "kata_overhead/dead2", "kubepods/kata_dead2"]
    for path in (*ours, *others):
        (node.root / "cgroup" / path).mkdir(parents=True)
    (node.root / "cgroup/default/dead/app").mkdir()
    (node.root / "cgroup/default/dead/app/cgroup.procs").write_text(f"{os.getpid()}\n")
    node.lose("dead")

    assert node.cleanup("dead") == cleanup.CLEAN

    assert [(node.root / "cgroup" / path).exists() for path in (*ours, *others)] == [False] * 6 + [True] * 3


def test_a_child_of_virtiofsd_does_not_make_its_sandboxs_cgroup_anothers(node: Node) -> None:
    program = node.copy_of("sh", "virtiofsd")
    words = [program, "-c", "sleep 600 & echo $!; wait", f"{node.places.shared_root}/dead/shared"]
    serving = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert serving.stdout is not None
        child = int(serving.stdout.readline())
        until_it_shows(child, "600")
        for name, pids in (("dead", (serving.pid, child)), ("other/dead", (serving.pid, child, os.getpid()))):
            cgroup = node.root / "cgroup" / name
            cgroup.mkdir(parents=True)
            (cgroup / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))

        found = conventional_ledger("dead", node.places)

        assert [each.key for each in found if each.kind is ResourceKind.CGROUP] == [f"{node.root}/cgroup/dead"]
    finally:
        os.killpg(serving.pid, signal.SIGKILL)
        serving.wait()
        serving.stdout.close()


def test_a_process_that_is_ending_does_not_make_a_cgroup_anothers(node: Node) -> None:
    """As the VMM and the shim are just after a SIGKILL."""
    ending = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ending.pid, os.WEXITED | os.WNOWAIT)
    cgroup = node.root / "cgroup" / "dead"
    cgroup.mkdir(parents=True)
    (cgroup / "cgroup.procs").write_text(f"{ending.pid}\n")

    found = conventional_ledger("dead", node.places)

    ending.wait()
    assert [each.key for each in found if each.kind is ResourceKind.CGROUP] == [str(cgroup)]


def test_an_unknown_id_is_clean(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert node.cleanup("nobody") == cleanup.CLEAN
    assert capsys.readouterr().out == "sandbox 'nobody': nothing is left of it\n"


def test_a_state_of_a_later_release_is_named_and_neither_cleaned_nor_installed_under(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.leave("old")
    node.leave("later")
    document = json.loads(node.file_of("later").read_text())
    node.file_of("later").write_text(json.dumps({**document, KEY: {**document[KEY], "Version": VERSION + 1}}))
    before = node.file_of("later").read_text()

    assert node.cleanup("--all") == cleanup.FAILED
    shown = capsys.readouterr()
    why = f"it has version {document['PersistVersion']}/{VERSION + 1}, this pyshim reads up to"
    assert f"clean sandbox 'later': read state '{node.file_of('later')}': {why}" in shown.err
    assert "sandbox 'old': known by its state" in shown.out
    assert node.file_of("later").read_text() == before

    with pytest.raises(
        FailedPrecondition, match=r"install pyshim: sandboxes 'later' are of a later release, .*--force"
    ):
        require_readable_states(node.store, force=False)
    require_readable_states(node.store, force=True)
    assert "pyshim: warning: sandboxes 'later' are of a later release" in capsys.readouterr().err
    node.file_of("later").unlink()
    require_readable_states(node.store, force=False)
    assert capsys.readouterr().err == ""


def test_the_register_is_distinguished_from_a_damaged_entry(node: Node) -> None:
    node.leave("dead", entry(ResourceKind.DIRECTORY, node.directory("vm", "dead", "gone")))
    Path(f"{node.root}/register/dead").write_text(json.dumps({"Pid": "x"}))

    assert node.cleanup("--all") == cleanup.CLEAN

    assert node.store.entered_ids() == ()
    assert not (node.root / "gone").exists()


@pytest.mark.root
def test_taps_are_found_by_their_alias_and_the_filters_by_what_it_says(node: Node) -> None:
    netns = node.root / "netns"
    netns.mkdir()
    (netns / "stale").touch()
    (netns / "pod").touch()
    script = (
        "ip link add eth0 type veth peer name out0 && ip tuntap add tap0 mode tap && ip tuntap add tap1 mode tap"
        " && ip link set tap0 alias pykata:dead:eth0 && ip link set tap1 alias pykata:dead2:eth0"
        " && tc qdisc add dev eth0 ingress"
    )
    with contextlib.closing(Namespace()) as namespace:
        subprocess.run(["mount", "--bind", namespace.path, netns / "pod"], check=True)
        try:
            namespace.run("sh", "-c", script)
            node.lose("dead")

            assert node.cleanup("dead") == cleanup.CLEAN

            links = namespace.run("ip", "-o", "link", "show")
            assert ("tap0" in links, "tap1" in links, "eth0" in links) == (False, True, True)
            assert "ingress" not in namespace.run("tc", "qdisc", "show", "dev", "eth0")
        finally:
            subprocess.run(["umount", netns / "pod"], check=True)


def test_a_shim_of_another_pid_namespace_cannot_be_said_to_be_dead(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    """A containerd in a container, its /run shared with the host: its pids mean others here."""
    directory = node.directory("somewhere")
    node.leave("nested", entry(ResourceKind.DIRECTORY, directory))
    state = node.store.load("nested")
    elsewhere = replace(state.shim, pid_namespace=processes.our_pid_namespace() + 1)
    node.store.save(replace(state, shim=elsewhere))

    assert node.cleanup("--all") == cleanup.CLEAN

    assert "of another pid namespace" in capsys.readouterr().out
    assert directory.exists()


def test_a_lost_remote_vm_is_listed_until_a_person_strikes_it(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    lost_vms.write_tombstone(entry(ResourceKind.REMOTE_VM, "pod1", socket="/run/peerpod/hypervisor.sock"))

    for words, code in ((("--all",), cleanup.FAILED), (("--all", "--dry-run"), cleanup.TO_DO), (("pod1",), 1)):
        assert node.cleanup(*words) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("pyshim: remote vm 'pod1': lost: '/run/peerpod/hypervisor.sock' did not know it at 2")
        assert "'pyshim cleanup --strike pod1'" in line
    assert node.cleanup("other") == cleanup.CLEAN
    assert capsys.readouterr().err == ""

    assert node.cleanup("--strike", "pod1") == cleanup.CLEAN
    assert node.cleanup("--strike", "pod1") == cleanup.CLEAN
    assert node.cleanup("--all") == cleanup.CLEAN
    assert capsys.readouterr().out.splitlines() == [
        "remote vm 'pod1': struck off",
        "remote vm 'pod1': it is not on the list",
    ]
    with pytest.raises(InvalidArgument, match="not a valid identifier"):
        node.cleanup("--strike", "../x")


def test_templates_that_no_vm_can_continue_from_go_with_all(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    templates = Path(f"{node.store.root}-templates")
    (templates / ("1" * 32)).mkdir(parents=True, mode=0o700)
    templates.chmod(0o700)
    said = f"a template: use template '{'1' * 32}': a file of it is missing\n"

    assert node.cleanup("--all", "--dry-run") == cleanup.TO_DO
    assert capsys.readouterr().out == f"would discard {said}"
    assert node.cleanup("--all") == cleanup.CLEAN
    assert capsys.readouterr().out == f"discarded {said}"
    assert list(templates.iterdir()) == []


def test_the_socket_of_a_shim_that_ended_before_its_first_call_goes(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = f"{node.root}/sockets"
    with tempfile.TemporaryDirectory() as directory:  # a socket's path is short
        dead, served, theirs = (f"{directory}/{name}" for name in ("dead", "served", "theirs"))
        for path in (dead, theirs):
            listener = claim(path, notes if path == dead else "")
            assert listener is not None
            listener.close()  # as by SIGKILL
        with contextlib.closing(claim(served, notes) or socket.socket()):
            assert node.cleanup("--all", "--dry-run") == cleanup.TO_DO
            assert os.path.exists(dead)
            assert node.cleanup("--all") == cleanup.CLEAN
            assert node.cleanup("--all", "--dry-run") == cleanup.CLEAN

            assert sorted(os.listdir(directory)) == ["served", "theirs"]
            assert os.listdir(notes) == ["served"]
            assert capsys.readouterr().out.splitlines() == [
                f"would remove socket '{dead}': its shim is gone",
                f"removed socket '{dead}': its shim is gone",
            ]
        os.unlink(served)
        node.cleanup("--all")
        assert os.listdir(notes) == []
