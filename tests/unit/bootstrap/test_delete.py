"""`delete` on real leftovers: processes, directories, sockets, mounts, and states of every kind of shim."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.containerd.task_v2_pb2 import DeleteResponse
from pyshim.bootstrap import conventions, delete
from pyshim.bootstrap.address import socket_path
from pyshim.bootstrap.argv import Invocation
from pyshim.bootstrap.errors import BootstrapError
from pyshim.host.processes import identity as processes
from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.snapshot import ContainerSnapshot, SandboxSnapshot, SandboxStatus
from pyshim.model.task import ExitStatus, Status, Stdio
from pyshim.plan.sandbox import VM_ROOT
from pyshim.plan.share import HOST_SHARED_ROOT
from pyshim.state.schema import SandboxState, ShimRecord
from pyshim.state.store import REGISTER, ROOT, StateStore

PROJECT = Path(__file__).parents[3]
SANDBOX = f"test-sandbox-{os.getpid()}"
DEADLINE_S = 60.0
"""Far more than containerd's: the machine may be busy, and what is tested is what happens, not how soon."""


class Node:
    """A bundle, a state directory, and processes that stand for daemons and VMMs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bundle = root / "bundle"
        (self.bundle / "rootfs").mkdir(parents=True)
        self.register = str(root / "register")
        self.store = StateStore(root=str(root / "sbs"), register=self.register)
        self.socket = f"{root}/shim.sock"
        self.errors: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def process(self, code: str = "time.sleep(600)", key: str = "") -> "subprocess.Popen[bytes]":
        """A running process that has executed all of `code` up to its first wait."""
        program = f"import signal, time; print(flush=True); {code}"
        argv = [sys.executable, "-I", "-S", "-c", program, key]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE)
        self._processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    def program(self, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """A running process whose executable has that name; it waits for its stdin to end."""
        path = self.root / "programs" / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            shutil.copy(shutil.which("cat") or "/bin/cat", path)
        # `cat -` ignores what it cannot open, and says so; the words are there all the same.
        process = subprocess.Popen(
            [path, "--", "-", *arguments], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._processes.append(process)
        deadline = time.monotonic() + DEADLINE_S
        while arguments[-1] not in processes.arguments(process.pid) and time.monotonic() < deadline:
            time.sleep(0.005)  # the kernel shows the new command line a moment later
        return process

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def shim(self, daemon: "subprocess.Popen[bytes] | None") -> ShimRecord:
        pid, ticks = 2**22 + 1, 0
        if daemon is not None:
            pid, ticks = daemon.pid, processes.start_ticks(daemon.pid) or 0
        return ShimRecord(pid=pid, start_ticks=ticks, socket=f"unix://{self.socket}", namespace="k8s.io")

    def save(
        self,
        *ledger: LedgerEntry,
        daemon: "subprocess.Popen[bytes] | None" = None,
        vmm_pid: int = 77,
        containers: tuple[ContainerSnapshot, ...] = (),
        planned: bool = True,
    ) -> None:
        snapshot = SandboxSnapshot(
            sandbox_id=SandboxId(SANDBOX),
            status=SandboxStatus.RUNNING,
            config_source="",
            hypervisor_type="qemu",
            hypervisor={},
            hypervisor_config={},
            vmm_pid=vmm_pid,
            agent_address="",
            netns_path="",
            sizing={},
            containers=containers,
            failure="",
        )
        self.store.save(
            SandboxState(
                sandbox_id=SandboxId(SANDBOX),
                shim=self.shim(daemon),
                snapshot=snapshot if planned else None,
                ledger=ledger,
            )
        )

    def state_file(self) -> Path:
        return Path(f"{self.store.root}/{SANDBOX}/persist.json")

    def delete(
        self, container_id: str = SANDBOX, *, namespace: str = "k8s.io", address: str = "/run/c.sock"
    ) -> DeleteResponse:
        call = Invocation()
        call.id, call.bundle, call.namespace, call.address = container_id, str(self.bundle), namespace, address
        answer = delete.delete(
            call,
            state_root=self.store.root,
            register=self.register,
            deadline=time.monotonic() + DEADLINE_S,
            errors=self.errors,
        )
        return DeleteResponse.FromString(answer)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path)
    yield found
    found.end()


def container(name: str, end: ExitStatus | None = None) -> ContainerSnapshot:
    return ContainerSnapshot(
        container_id=ContainerId(name),
        bundle=HostPath(f"/bundles/{name}"),
        status=Status.STOPPED if end else Status.RUNNING,
        stdio=Stdio(stdin="", stdout="", stderr="", terminal=False),
        exit=end,
        rootfs=HostPath(f"/bundles/{name}/rootfs"),
    )


def directory(path: Path) -> LedgerEntry:
    path.mkdir(parents=True)
    (path / "file").touch()
    return LedgerEntry(kind=ResourceKind.DIRECTORY, key=str(path))


def running(process: "subprocess.Popen[bytes]") -> LedgerEntry:
    ticks = processes.start_ticks(process.pid)
    assert ticks is not None
    return LedgerEntry(
        kind=ResourceKind.PROCESS, key="/run/vc/vm/x/qemu", detail={"pid": process.pid, "start_ticks": ticks}
    )


def test_without_any_state_it_answers_killed_now(node: Node) -> None:
    before = time.time_ns()

    response = node.delete()

    assert (response.pid, response.exit_status) == (0, 137)
    assert before <= response.exited_at.ToNanoseconds() <= time.time_ns()
    assert node.errors == []


def test_without_bundle_and_state_it_answers_too(node: Node) -> None:
    node.bundle = node.root / "no-such-bundle"

    assert node.delete().exit_status == 137
    assert node.errors == []


@pytest.mark.parametrize("container_id", ["", "../x", "a/b", "a" * 77])
def test_an_id_that_is_none_is_refused(node: Node, container_id: str) -> None:
    with pytest.raises(BootstrapError, match="-id"):
        node.delete(container_id)


def test_a_dead_shims_ledger_is_undone_and_its_state_removed(node: Node) -> None:
    vmm = node.process()
    node.save(directory(node.root / "vm"), running(vmm), vmm_pid=vmm.pid)

    response = node.delete()

    assert vmm.wait() == -signal.SIGKILL
    assert not (node.root / "vm").exists()
    assert node.store.sandbox_ids() == ()
    assert (response.pid, response.exit_status) == (vmm.pid, 137)
    assert node.errors == []


def test_deleting_again_is_harmless(node: Node) -> None:
    node.save(directory(node.root / "vm"))
    node.delete()

    assert node.delete().exit_status == 137
    assert node.errors == []


def test_a_process_started_but_never_recorded_is_found(node: Node) -> None:
    vmm = node.process(key=f"{node.root}/vm/qmp.sock")
    node.save(LedgerEntry(kind=ResourceKind.PROCESS, key=f"{node.root}/vm/qmp.sock"), planned=False)

    node.delete()

    assert vmm.wait() == -signal.SIGKILL
    assert node.errors == []


def test_intents_whose_effect_never_came_are_no_error(node: Node) -> None:
    path = f"{node.root}/never"
    kinds = (ResourceKind.DIRECTORY, ResourceKind.SOCKET, ResourceKind.MOUNT, ResourceKind.NETNS, ResourceKind.CGROUP)
    node.save(*(LedgerEntry(kind=kind, key=path) for kind in kinds), planned=False)

    node.delete()

    assert node.errors == []
    assert node.store.sandbox_ids() == ()


def test_what_cannot_be_undone_is_reported_and_kept_for_the_next(node: Node) -> None:
    (node.root / "in-the-way").mkdir()
    stuck = LedgerEntry(kind=ResourceKind.SOCKET, key=f"{node.root}/in-the-way")
    node.save(directory(node.root / "first"), stuck, directory(node.root / "last"))

    node.delete()

    assert len(node.errors) == 1
    assert "in-the-way" in node.errors[0]
    assert not (node.root / "first").exists()
    assert not (node.root / "last").exists()
    assert node.store.load(SANDBOX).ledger == (stuck,)
    (node.root / "in-the-way").rmdir()
    node.errors.clear()
    node.delete()
    assert node.errors == []
    assert node.store.sandbox_ids() == ()


def test_the_recorded_exit_is_answered_when_there_is_one(node: Node) -> None:
    node.save(containers=(container("app", ExitStatus(status=3, exited_at_ns=1_700_000_000_000_000_007)),))

    response = node.delete("app")

    assert response.exit_status == 3
    assert response.exited_at.ToNanoseconds() == 1_700_000_000_000_000_007


def test_a_living_daemons_pod_is_not_touched_for_one_of_its_containers(node: Node) -> None:
    daemon, vmm = node.process(), node.process()
    kept = directory(node.root / "vm")
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
    kept = directory(node.root / "vm")
    node.save(kept, running(vmm), daemon=daemon, vmm_pid=vmm.pid)
    before = node.state_file().read_bytes()

    response = node.delete(namespace="default")

    assert (response.pid, response.exit_status) == (0, 137)
    assert (daemon.poll(), vmm.poll()) == (None, None)
    assert os.path.exists(kept.key)
    assert node.state_file().read_bytes() == before
    assert node.errors == []


def test_a_sandbox_of_the_same_name_and_namespace_of_another_containerd_is_not_touched(node: Node) -> None:
    """Two containerds on one node, as with k3s beside another: only the name of the shim's socket tells them apart."""
    node.socket = socket_path("/run/containerd/s", "/run/one.sock", "k8s.io", SANDBOX)
    vmm = node.process()
    kept = directory(node.root / "vm")
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


def test_a_daemon_on_its_way_out_is_waited_for_not_signalled(node: Node) -> None:
    daemon = node.process("time.sleep(0.2)")
    node.save(directory(node.root / "vm"), daemon=daemon)

    node.delete()

    assert daemon.wait() == 0
    assert node.store.sandbox_ids() == ()
    assert not (node.root / "vm").exists()


def test_a_daemon_that_holds_nothing_more_is_left_alone(node: Node) -> None:
    daemon = node.process()
    node.save(daemon=daemon, containers=(container("app"),))

    node.delete()

    assert daemon.poll() is None
    assert node.store.sandbox_ids() == (SANDBOX,)
    assert node.errors == []


@pytest.mark.parametrize(
    ("code", "end"),
    [
        pytest.param("time.sleep(600)", -signal.SIGTERM, id="obeys"),
        pytest.param("signal.signal(15, signal.SIG_IGN); time.sleep(600)", -signal.SIGKILL, id="hangs"),
    ],
)
def test_a_sandbox_containerd_gave_up_goes_with_its_stuck_daemon(node: Node, code: str, end: int) -> None:
    daemon, vmm = node.process(code), node.process()
    node.save(running(vmm), daemon=daemon)

    node.delete()

    assert vmm.wait() == -signal.SIGKILL
    assert daemon.wait() == end
    assert node.store.sandbox_ids() == ()
    assert node.errors == []


def test_a_successor_of_the_daemons_pid_is_no_daemon(node: Node) -> None:
    other = node.process()
    node.save(directory(node.root / "vm"), daemon=other)
    text = node.state_file().read_text().replace(f'"StartTicks":{processes.start_ticks(other.pid)}', '"StartTicks":1')
    node.state_file().write_text(text)

    node.delete()

    assert other.poll() is None
    assert not (node.root / "vm").exists()


def test_a_daemon_whose_recorded_pid_is_none_has_ended(node: Node) -> None:
    other = node.process()
    node.save(directory(node.root / "vm"), daemon=other)
    node.state_file().write_text(node.state_file().read_text().replace(f'"Pid":{other.pid}', '"Pid":0'))

    node.delete()

    assert node.errors == []
    assert not (node.root / "vm").exists()


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
    node.save(directory(node.root / "vm"), vmm_pid=4711, containers=(container("app"),))

    response = node.delete("app")

    assert response.pid == 4711
    assert not (node.root / "vm").exists()


def test_a_newer_state_is_left_alone_and_reported(node: Node) -> None:
    node.save(directory(node.root / "vm"))
    node.state_file().write_text(node.state_file().read_text().replace('"PersistVersion":2', '"PersistVersion":3'))

    node.delete()

    assert "reads up to" in node.errors[0]
    assert (node.root / "vm").exists()
    assert node.state_file().exists()


def test_katas_own_state_is_none_of_our_business(node: Node) -> None:
    node.save()
    node.state_file().write_text('{"PersistVersion": 2, "State": "running"}')

    response = node.delete()

    assert response.exit_status == 137
    assert node.errors == []
    assert node.state_file().exists()


def test_a_state_directory_without_state_is_no_error(node: Node) -> None:
    os.makedirs(f"{node.store.root}/{SANDBOX}")

    assert node.delete().exit_status == 137
    assert node.errors == []


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("body", ["", "{", "[]", '{"PersistVersion":2,"Pyshim":{}}'])
def test_a_damaged_state_is_cleaned_by_the_names_of_its_directories(node: Node, body: str) -> None:
    vm_dir, shared = Path(conventions.VM_ROOT, SANDBOX), Path(conventions.SHARED_ROOT, SANDBOX)
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


def test_the_conventional_directories_are_those_the_plans_use() -> None:
    assert (conventions.VM_ROOT, conventions.SHARED_ROOT) == (VM_ROOT, HOST_SHARED_ROOT)
    assert (delete.STATE_ROOT, delete.REGISTER) == (ROOT, REGISTER)


def test_every_vmm_of_ours_has_the_word_and_the_name_it_is_known_by() -> None:
    for golden in (PROJECT / "tests/golden/qemu").glob("*.txt"):
        words = [word for line in golden.read_text().splitlines() for word in line.split(" ", 1)]
        assert conventions.VMM_WORD in words, golden.name
        assert words[words.index("-name") + 1].startswith(conventions.VMM_NAME), golden.name


@pytest.mark.parametrize("named_by", ["bundle", "state"])
@pytest.mark.parametrize("listening", [True, False])
def test_a_socket_is_removed_when_nobody_listens(node: Node, named_by: str, listening: bool) -> None:
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


def launch_words(node: Node, container_id: str = SANDBOX) -> list[str]:
    """The real thing: an isolated interpreter without site-packages."""
    program = (
        f"import sys; sys.path.append({str(PROJECT)!r})\n"
        "from pyshim.bootstrap import delete\n"
        "from pyshim.bootstrap.argv import parse\n"
        f"sys.exit(delete.main(parse(sys.argv[1:]), state_root={node.store.root!r}, register={node.register!r}))"
    )
    arguments = ("-namespace", "k8s.io", "-address", "/x", "-id", container_id, "-bundle", str(node.bundle), "delete")
    return [sys.executable, "-I", "-S", "-c", program, *arguments]


def launch(node: Node, container_id: str = SANDBOX) -> "subprocess.Popen[bytes]":
    words = launch_words(node, container_id)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=node.bundle)


def test_stdout_is_the_response_and_nothing_else(node: Node) -> None:
    vmm = node.process()
    node.save(directory(node.root / "vm"), running(vmm), vmm_pid=vmm.pid)

    process = launch(node)
    output, errors = process.communicate()

    assert (process.returncode, errors) == (0, b"")
    response = DeleteResponse.FromString(output)
    assert (response.pid, response.exit_status) == (vmm.pid, 137)
    assert vmm.wait() == -signal.SIGKILL


def test_a_failed_cleanup_is_a_line_on_stderr_and_an_exit_code(node: Node) -> None:
    (node.root / "in-the-way").mkdir()
    node.save(LedgerEntry(kind=ResourceKind.SOCKET, key=f"{node.root}/in-the-way"))

    process = launch(node)
    output, errors = process.communicate()

    assert process.returncode == 1
    assert errors.decode() == f"release socket '{node.root}/in-the-way': Is a directory\n"
    assert DeleteResponse.FromString(output).exit_status == 137


def test_a_pod_whose_shim_died_survives_a_delete_per_container_at_once(node: Node) -> None:
    vmm = node.process()
    names = ("app1", "app2", "app3")
    node.save(directory(node.root / "vm"), running(vmm), vmm_pid=vmm.pid, containers=tuple(container(n) for n in names))

    calls = [launch(node, name) for name in (*names, SANDBOX)]
    ends = [(call.communicate()[1], call.returncode) for call in calls]

    assert ends == [(b"", 0)] * 4
    assert vmm.wait() == -signal.SIGKILL
    assert node.store.sandbox_ids() == ()
    assert not (node.root / "vm").exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_bundles_mounts_and_the_ledgers_go_in_reverse_order(node: Node) -> None:
    inner, rootfs = node.root / "vm/inner", node.bundle / "rootfs"
    node.save(directory(node.root / "vm"), directory(inner), LedgerEntry(kind=ResourceKind.MOUNT, key=str(inner)))
    command = " ".join(shlex.quote(word) for word in launch_words(node))
    script = (
        f"mount -t tmpfs one {inner} && mount -t tmpfs two {inner} && touch {inner}/file"
        f" && mount -t tmpfs three {rootfs} && mount -t tmpfs four {rootfs} && {command} >/dev/null"
        f"; echo $?; grep -c {node.root} /proc/self/mountinfo"
    )

    result = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)

    assert (result.stdout, result.stderr) == ("0\n0\n", "")
    assert not (node.root / "vm").exists()
    assert rootfs.is_dir()
