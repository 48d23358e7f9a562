"""`delete` on real leftovers: processes, directories, sockets, and states of every kind of shim."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from delete_node import PROJECT, SANDBOX, Node, directory, running

from pyshim.cleanup import conventions, delete
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.task import ExitStatus
from pyshim.pod.plan.sandbox import VM_ROOT
from pyshim.resources.volumes.plan.share import HOST_SHARED_ROOT
from pyshim.start.errors import BootstrapError
from pyshim.state.store import REGISTER, ROOT
from tests.unit.state.states import container

pytestmark = pytest.mark.root  # `delete` unmounts the bundle's root, whether or not it is mounted


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
    node.save(directory(node.own / "vm"), running(vmm), vmm_pid=vmm.pid)

    response = node.delete()

    assert vmm.wait() == -signal.SIGKILL
    assert not (node.own / "vm").exists()
    assert node.store.sandbox_ids() == ()
    assert (response.pid, response.exit_status) == (vmm.pid, 137)
    assert node.errors == []


def test_deleting_again_is_harmless(node: Node) -> None:
    node.save(directory(node.own / "vm"))
    node.delete()

    assert node.delete().exit_status == 137
    assert node.errors == []


def test_a_process_started_but_never_recorded_is_found(node: Node) -> None:
    vmm = node.process(key=f"{node.own}/vm/qmp.sock")
    node.save(
        LedgerEntry(kind=ResourceKind.PROCESS, key=f"{node.own}/vm/qmp.sock", detail={"program": sys.executable}),
        planned=False,
    )

    node.delete()

    assert vmm.wait() == -signal.SIGKILL
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


def test_a_state_directory_without_state_is_no_error(node: Node) -> None:
    os.makedirs(f"{node.store.root}/{SANDBOX}")

    assert node.delete().exit_status == 137
    assert node.errors == []


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


def test_without_a_state_programs_of_the_sandboxs_own_users_are_found(node: Node) -> None:
    """The group of the VM's directory says which users these are."""
    user, vm_dir = 1879048192 + os.getpid() % 1000 * 2, Path(conventions.VM_ROOT, SANDBOX)
    node.save()
    node.state_file().write_text("{")
    directory(vm_dir)
    programs = [vm_dir / "qemu-system-x86_64", vm_dir / "vhost-device-vsock"]
    for program in programs:
        shutil.copy("/bin/cat", program)
    os.chown(vm_dir, -1, user)
    os.chmod(vm_dir, 0o755)
    started: list[subprocess.Popen[bytes]] = []
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
