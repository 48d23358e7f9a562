"""`delete` on real leftovers, with daemons that live, and as a program."""

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from delete_node import PROJECT, SANDBOX, Node, until

from protos.containerd.task_v2_pb2 import DeleteResponse
from pyshim.cleanup import delete, leftovers, names
from pyshim.cleanup.background import Outcome, Work
from pyshim.host.fds import OwnedFd
from pyshim.host.processes import identity as processes
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.task import ExitStatus
from pyshim.start.address import socket_path
from pyshim.start.invocation import CommandError, Invocation
from tests.fakes.left_node import DEADLINE_S, Process, directory, running
from tests.unit.state.states import container

pytestmark = pytest.mark.root  # `delete` unmounts the bundle's root, whether or not it is mounted


@pytest.mark.parametrize("bundle", ["bundle", "no-such-bundle"])
def test_without_any_state_it_answers_killed_now(node: Node, bundle: str) -> None:
    node.bundle = node.root / bundle
    before = time.time_ns()

    response = node.delete()

    assert (response.pid, response.exit_status) == (0, 137)
    assert before <= response.exited_at.ToNanoseconds() <= time.time_ns()
    assert node.errors == []


@pytest.mark.parametrize("container_id", ["", "../x", "a/b", "a" * 77])
def test_an_id_that_is_none_is_refused(node: Node, container_id: str) -> None:
    with pytest.raises(CommandError, match="-id"):
        node.delete(container_id)


def test_a_dead_shims_ledger_is_undone_and_its_state_removed(node: Node) -> None:
    vmm = node.process()
    node.save(directory(node.own / "vm"), running(vmm), vmm_pid=vmm.pid)

    response = node.delete()

    assert vmm.wait() == -signal.SIGKILL
    assert not (node.own / "vm").exists()
    assert node.store.sandbox_ids() == ()
    assert (response.pid, response.exit_status) == (vmm.pid, 137)
    assert node.errors == []


def test_intents_whose_effect_never_came_are_no_error(node: Node) -> None:
    path = f"{node.own}/never"
    kinds = (ResourceKind.DIRECTORY, ResourceKind.SOCKET, ResourceKind.FILE, ResourceKind.MOUNT, ResourceKind.NETNS)
    cgroup = LedgerEntry(kind=ResourceKind.CGROUP, key=f"/sys/fs/cgroup/kata_{SANDBOX}/never-made")
    node.save(*(LedgerEntry(kind=kind, key=path) for kind in kinds), cgroup, planned=False)

    node.delete()

    assert node.errors == []
    assert node.store.sandbox_ids() == ()


def test_what_cannot_be_undone_is_reported_and_kept_for_the_next(node: Node) -> None:
    (node.own / "in-the-way").mkdir(parents=True)
    stuck = LedgerEntry(kind=ResourceKind.SOCKET, key=f"{node.own}/in-the-way")
    node.save(directory(node.own / "first"), stuck, directory(node.own / "last"))

    node.delete()

    assert len(node.errors) == 1
    assert "in-the-way" in node.errors[0]
    assert not (node.own / "first").exists()
    assert not (node.own / "last").exists()
    assert node.store.load(SANDBOX).ledger == (stuck,)
    (node.own / "in-the-way").rmdir()
    node.errors.clear()
    node.delete()
    assert node.errors == []
    assert node.store.sandbox_ids() == ()


def test_the_recorded_exit_is_answered_when_there_is_one(node: Node) -> None:
    node.save(containers=(container("app", ExitStatus(status=3, exited_at_ns=1_700_000_000_000_000_007)),))

    response = node.delete("app")

    assert response.exit_status == 3
    assert response.exited_at.ToNanoseconds() == 1_700_000_000_000_000_007


@pytest.mark.parametrize(
    "annotations",
    [
        pytest.param({"io.kubernetes.cri.sandbox-id": SANDBOX}, id="containerd"),
        pytest.param({"io.kubernetes.cri-o.SandboxID": SANDBOX}, id="cri-o"),
        pytest.param({"io.kubernetes.cri.sandbox-id": "another"}, id="misleading"),
        pytest.param(None, id="no config.json"),
        pytest.param("damaged", id="damaged config.json"),
    ],
)
def test_the_sandbox_of_a_container_is_found(node: Node, annotations: object) -> None:
    if annotations == "damaged":
        (node.bundle / "config.json").write_text('{"annotations": {')
    elif annotations is not None:
        (node.bundle / "config.json").write_text(json.dumps({"annotations": annotations}))
    node.save(directory(node.own / "vm"), vmm_pid=4711, containers=(container("app"),))

    response = node.delete("app")

    assert response.pid == 4711
    assert not (node.own / "vm").exists()


def test_a_newer_state_is_left_alone_and_reported(node: Node) -> None:
    node.save(directory(node.own / "vm"))
    node.rewrite('"PersistVersion":2', '"PersistVersion":3')

    node.delete()

    assert "reads up to" in node.errors[0]
    assert (node.own / "vm").exists()
    assert node.state_file().exists()


def test_katas_own_state_is_none_of_our_business(node: Node) -> None:
    node.save()
    node.state_file().write_text('{"PersistVersion": 2, "State": "running"}')

    response = node.delete()

    assert response.exit_status == 137
    assert node.errors == []
    assert node.state_file().exists()


@pytest.mark.parametrize("body", ["", "{", "[]", '{"PersistVersion":2,"Pyshim":{}}'])
def test_a_damaged_state_is_cleaned_by_the_names_of_its_directories(node: Node, body: str) -> None:
    vm_dir, shared = Path(names.VM_ROOT, SANDBOX), Path(names.SHARED_ROOT, SANDBOX)
    vmm = node.program("qemu-system-x86_64", f"path={vm_dir}/qmp.sock,server=on")
    virtiofsd = node.program("virtiofsd", f"source={shared}/shared")
    bystander = node.program("qemu-system-x86_64", f"path={vm_dir}2/qmp.sock")
    onlooker = node.process(key=f"path={vm_dir}/qmp.sock,server=on")
    node.save()
    node.state_file().write_text(body)
    try:
        directory(vm_dir)
        directory(shared / "mounts/app")

        node.delete("app-of-the-pod")
        assert vmm.poll() is None

        node.delete()

        assert vmm.wait() == -signal.SIGKILL
        assert virtiofsd.wait() == -signal.SIGKILL
        assert bystander.poll() is None
        assert onlooker.poll() is None
        assert not vm_dir.exists()
        assert not shared.exists()
        assert node.store.sandbox_ids() == ()
        assert node.errors == []
    finally:
        subprocess.run(["rm", "-rf", vm_dir, shared], check=True)


def test_without_a_state_the_sandboxs_cgroups_are_found(node: Node) -> None:
    """Nobody finds them later: what tells of the sandbox is removed with the rest."""
    root = Path(names.CGROUP_ROOT)
    hierarchy = root if (root / "cgroup.procs").exists() else root / "pids"
    cgroup = hierarchy / f"{SANDBOX}-pod" / SANDBOX
    try:
        cgroup.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    node.save()
    node.state_file().write_text("{")
    try:
        node.delete()

        assert not cgroup.exists()
        assert node.errors == []
    finally:
        if cgroup.exists():
            cgroup.rmdir()
        cgroup.parent.rmdir()


def test_without_a_state_programs_of_the_sandboxs_own_users_are_found(node: Node) -> None:
    """The group of the VM's directory says which users these are."""
    user, vm_dir = 1879048192 + os.getpid() % 1000 * 2, Path(names.VM_ROOT, SANDBOX)
    node.save()
    node.state_file().write_text("{")
    directory(vm_dir)
    programs = [vm_dir / "qemu-system-x86_64", vm_dir / "vhost-device-vsock"]
    for program in programs:
        shutil.copy("/bin/cat", program)
    os.chown(vm_dir, -1, user)
    os.chmod(vm_dir, 0o755)
    started: list[Process] = []
    try:
        for program, whose in ((programs[0], user), (programs[1], user + 1), (programs[0], user + 2)):
            words = [program, "--", "-", f"path={vm_dir}/qmp.sock"]
            silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append(
                subprocess.Popen(words, stdin=subprocess.PIPE, user=whose, group=whose, extra_groups=(), **silent)
            )

        node.delete()

        assert [process.wait() for process in started[:2]] == [-signal.SIGKILL] * 2
        assert started[2].poll() is None
        assert node.errors == []
    finally:
        for process in started:
            process.kill()
            process.communicate()
        subprocess.run(["rm", "-rf", vm_dir], check=True)


def test_every_vmm_of_ours_has_the_word_and_the_name_it_is_known_by() -> None:
    for golden in (PROJECT / "tests/golden/qemu").glob("*.txt"):
        words = [word for line in golden.read_text().splitlines() for word in line.split(" ", 1)]
        assert names.VMM_WORD in words, golden.name
        assert words[words.index("-name") + 1].startswith(names.VMM_NAME), golden.name


@pytest.mark.parametrize("named_by", ["bundle", "state"])
@pytest.mark.parametrize("listening", [True, False])
def test_a_socket_without_a_listener_is_removed(node: Node, named_by: str, listening: bool) -> None:
    path = node.root / "shim.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        if listening:
            listener.listen()
        if named_by == "bundle":
            (node.bundle / "address").write_text(f"unix://{path}")
        else:
            node.save()

        node.delete()

        assert path.exists() is listening
    assert node.errors == []


def test_a_file_that_is_no_socket_is_left_where_an_address_names_it(node: Node) -> None:
    path = node.root / "precious"
    path.write_text("data")
    (node.bundle / "address").write_text(f"unix://{path}")

    node.delete()

    assert path.read_text() == "data"
    assert node.errors == []


def test_a_living_daemons_pod_is_not_touched_for_one_of_its_containers(node: Node) -> None:
    daemon, vmm = node.process(), node.process()
    kept = directory(node.own / "vm")
    node.save(kept, running(vmm), daemon=daemon, vmm_pid=vmm.pid, containers=(container("app"),))
    before = node.state_file().read_bytes()

    response = node.delete("app")

    assert response.pid == vmm.pid
    assert daemon.poll() is None
    assert vmm.poll() is None
    assert os.path.exists(kept.key)
    assert node.state_file().read_bytes() == before


def test_a_sandbox_of_the_same_name_in_another_namespace_is_not_touched(node: Node) -> None:
    daemon, vmm = node.process(), node.process()
    kept = directory(node.own / "vm")
    node.save(kept, running(vmm), daemon=daemon, vmm_pid=vmm.pid)
    before = node.state_file().read_bytes()

    response = node.delete(namespace="default")

    assert (response.pid, response.exit_status) == (0, 137)
    assert (daemon.poll(), vmm.poll()) == (None, None)
    assert os.path.exists(kept.key)
    assert node.state_file().read_bytes() == before
    assert node.errors == []


def test_a_sandbox_of_the_same_name_and_namespace_of_another_containerd_is_not_touched(node: Node) -> None:
    """Two containerds on one node, as with k3s beside another: their shims differ only in the name of the socket."""
    node.socket = socket_path("/run/containerd/s", "/run/one.sock", "k8s.io", SANDBOX)
    vmm = node.process()
    kept = directory(node.own / "vm")
    node.save(kept, running(vmm), vmm_pid=vmm.pid)

    node.delete(address="/run/other.sock")

    assert vmm.poll() is None
    assert os.path.exists(kept.key)
    node.delete(address="/run/one.sock")
    assert vmm.wait() == -signal.SIGKILL
    assert not os.path.exists(kept.key)
    assert node.errors == []


@pytest.mark.parametrize("body", [None, "{"], ids=["lost", "damaged"])
def test_without_a_readable_state_the_register_says_whose_the_sandbox_is(node: Node, body: str | None) -> None:
    daemon = node.process()
    node.save()
    node.state_file().unlink()
    if body is not None:
        node.state_file().write_text(body)
    node.store.enter(SANDBOX, node.shim(daemon))

    node.delete(namespace="another")
    assert daemon.poll() is None
    assert node.store.entered_ids() == (SANDBOX,)

    node.delete()
    assert daemon.wait() == -signal.SIGTERM
    assert node.store.entered_ids() == ()
    assert node.store.sandbox_ids() == ()
    assert node.errors == []


def test_a_daemon_on_its_way_out_is_waited_for_not_signalled(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "EXIT_WAIT_S", DEADLINE_S)
    daemon = node.process("time.sleep(0.2)")
    node.save(directory(node.own / "vm"), daemon=daemon)

    node.delete()

    assert daemon.wait() == 0
    assert node.store.sandbox_ids() == ()
    assert not (node.own / "vm").exists()


def test_a_daemon_that_holds_nothing_more_is_left_alone(node: Node) -> None:
    daemon = node.process()
    node.save(daemon=daemon, containers=(container("app"),))

    node.delete()

    assert daemon.poll() is None
    assert node.store.sandbox_ids() == (SANDBOX,)
    assert node.errors == []


@pytest.mark.parametrize(
    ("code", "term_wait_s", "end"),
    [
        pytest.param("time.sleep(600)", DEADLINE_S, -signal.SIGTERM, id="obeys"),
        pytest.param("signal.signal(15, signal.SIG_IGN); time.sleep(600)", 0.1, -signal.SIGKILL, id="hangs"),
    ],
)
def test_a_sandbox_containerd_gave_up_goes_with_its_stuck_daemon(
    node: Node, monkeypatch: pytest.MonkeyPatch, code: str, term_wait_s: float, end: int
) -> None:
    monkeypatch.setattr(leftovers, "TERM_WAIT_S", term_wait_s)
    daemon, vmm = node.process(code), node.process()
    node.save(running(vmm), daemon=daemon)

    node.delete()

    assert vmm.wait() == -signal.SIGKILL
    assert daemon.wait() == end
    assert node.store.sandbox_ids() == ()
    assert node.errors == []


@pytest.mark.parametrize("field", ["StartTicks", "Pid"])
def test_another_process_than_the_daemon_is_none_of_the_sandboxs(node: Node, field: str) -> None:
    """The pid's successor has another start time; a record without a pid is that of an ended daemon."""
    other = node.process()
    node.save(directory(node.own / "vm"), daemon=other)
    recorded = {"StartTicks": processes.start_ticks(other.pid), "Pid": other.pid}[field]
    text = node.state_file().read_text().replace(f'"{field}":{recorded}', f'"{field}":{int(field == "StartTicks")}')
    node.state_file().write_text(text)

    node.delete()

    assert (other.poll(), node.errors) == (None, [])
    assert not (node.own / "vm").exists()


def test_a_process_that_is_no_shim_is_never_signalled(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record's pid and start time are those of another program."""
    monkeypatch.setattr(leftovers, "EXIT_WAIT_S", 0.05)
    other = node.program("sshd", "-D")
    node.save(directory(node.own / "vm"), daemon=other)

    node.delete()

    assert other.poll() is None
    assert not (node.own / "vm").exists()


def launch_words(node: Node, container_id: str = SANDBOX, *settings: str, deadline_s: float = DEADLINE_S) -> list[str]:
    """The program of the launcher, with time enough on a busy machine."""
    time_enough = (f"leftovers.LOCK_WAIT_S = {DEADLINE_S}", f"delete.DEADLINE_S = {deadline_s}")
    return node.delete_words(container_id, node.bundle, *settings, *time_enough)


def launch(node: Node, container_id: str = SANDBOX) -> Process:
    words = launch_words(node, container_id)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=node.bundle)


@contextmanager
def held_back(node: Node) -> Iterator[None]:
    """The process that cleans the sandbox waits, as on a busy node."""
    with OwnedFd(os.open(node.own, os.O_RDONLY | os.O_DIRECTORY)) as lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        yield


def is_clean(node: Node) -> bool:
    return node.store.sandbox_ids() == () and not (node.own / "vm").exists()


def test_without_time_left_it_answers_and_another_process_undoes_what_is_left(node: Node) -> None:
    """The interpreter's own start counts: containerd counts it, and kills `delete` at the end."""
    vmm = node.process()
    node.save(directory(node.own / "vm"), running(vmm), vmm_pid=vmm.pid)

    with held_back(node):
        words = launch_words(node, SANDBOX, "time.sleep(0.3)", deadline_s=0.2)
        ended = subprocess.run(words, capture_output=True, cwd=node.bundle, check=False)
        assert not is_clean(node)

    assert ended.returncode == 0
    logged = re.fullmatch(
        rf"sandbox '{SANDBOX}': process (\d+) goes on with undoing what is left of it\n", ended.stderr.decode()
    )
    assert logged is not None
    answer = DeleteResponse.FromString(ended.stdout)
    assert (answer.pid, answer.exit_status) == (vmm.pid, 137)
    assert vmm.wait() == -signal.SIGKILL
    until(lambda: is_clean(node))


def test_a_dead_shims_sandbox_is_cleaned_without_room_for_a_byte(node: Node) -> None:
    """Its disk may be full: no file takes what this process writes."""
    vmm = node.process()
    node.save(directory(node.own / "vm"), running(vmm), vmm_pid=vmm.pid)

    words = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *launch_words(node)]
    ended = subprocess.run(words, capture_output=True, cwd=node.bundle, check=False)

    assert (ended.stderr, ended.returncode) == (b"", 0)
    answer = DeleteResponse.FromString(ended.stdout)
    assert (answer.pid, answer.exit_status) == (vmm.pid, 137)
    assert vmm.wait() == -signal.SIGKILL
    until(lambda: is_clean(node))


def test_a_delete_that_containerd_kills_leaves_nothing_behind(node: Node) -> None:
    vmm = node.process()
    node.save(directory(node.own / "vm"), running(vmm), vmm_pid=vmm.pid)

    with held_back(node):
        process = launch(node)
        until(lambda: has_child(process.pid))
        process.kill()
        process.communicate()
        assert not is_clean(node)

    assert vmm.wait() == -signal.SIGKILL
    until(lambda: is_clean(node))


def has_child(pid: int) -> bool:
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def test_a_pod_whose_shim_died_survives_a_delete_per_container_at_once(node: Node) -> None:
    vmm = node.process()
    names = ("app1", "app2", "app3")
    node.save(directory(node.own / "vm"), running(vmm), vmm_pid=vmm.pid, containers=tuple(container(n) for n in names))

    calls = [launch(node, name) for name in (*names, SANDBOX)]
    ends = [(call.communicate()[1], call.returncode) for call in calls]

    assert ends == [(b"", 0)] * 4
    assert vmm.wait() == -signal.SIGKILL
    assert node.store.sandbox_ids() == ()
    assert not (node.own / "vm").exists()


def test_an_unmount_that_waits_for_the_disk_costs_no_answer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an overlay waits for the disk. containerd kills a `delete` that waits for it, and the bundle stays."""
    begun: list[str] = []

    def goes_on(work: Work, action: str, deadline: float) -> Outcome:
        begun.append(action)
        outcome = Outcome()
        outcome.pid = 4711
        return outcome

    monkeypatch.setattr(delete, "has_mount", lambda path: True)
    call = Invocation()
    call.id, call.bundle = SANDBOX, str(node.bundle)

    answer = delete.delete(
        call, state_root=node.store.root, register=node.register, deadline=0, errors=node.errors, carry_out=goes_on
    )

    assert DeleteResponse.FromString(answer).exit_status == 137
    assert (begun, node.errors) == ([f"unmount '{node.bundle}/rootfs'"], [])


def test_the_bundles_mounts_and_the_ledgers_go_in_reverse_order(node: Node) -> None:
    inner, rootfs = node.own / "vm/inner", node.bundle / "rootfs"
    node.save(directory(node.own / "vm"), directory(inner), LedgerEntry(kind=ResourceKind.MOUNT, key=str(inner)))
    command = " ".join(shlex.quote(word) for word in launch_words(node))
    script = (
        f"mount -t tmpfs one {inner} && mount -t tmpfs two {inner} && touch {inner}/file"
        f" && mount -t tmpfs three {rootfs} && mount -t tmpfs four {rootfs} && {command} >/dev/null"
        f"; echo $?; grep -c {node.root} /proc/self/mountinfo"
    )

    result = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)

    assert (result.stdout, result.stderr) == ("0\n0\n", "")
    assert not (node.own / "vm").exists()
    assert rootfs.is_dir()
