"""`delete` as containerd runs it: an isolated interpreter, its stdout, stderr and exit code."""

import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from delete_node import DEADLINE_S, SANDBOX, Node, directory, running, until

from protos.containerd.task_v2_pb2 import DeleteResponse
from pyshim.host.fds import OwnedFd
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.node.cli.launcher import import_paths
from tests.unit.state.states import container

pytestmark = pytest.mark.root  # `delete` unmounts the bundle's root, whether or not it is mounted


def launch_words(
    node: Node, container_id: str = SANDBOX, *, deadline_s: float = DEADLINE_S, starts_in_s: float = 0
) -> list[str]:
    """The program of the launcher, with time enough on a busy machine."""
    program = (
        f"import time; time.sleep({starts_in_s})\n"
        f"import sys; sys.path += {list(import_paths())!r}\n"
        "from pyshim.cleanup import delete, leftovers\n"
        f"leftovers.LOCK_WAIT_S = {DEADLINE_S}\n"
        "from pyshim.start.argv import parse\n"
        f"delete.DEADLINE_S = {deadline_s}\n"
        f"sys.exit(delete.main(parse(sys.argv[1:]), state_root={node.store.root!r}, register={node.register!r}))"
    )
    arguments = ("-namespace", "k8s.io", "-address", "/x", "-id", container_id, "-bundle", str(node.bundle), "delete")
    return [sys.executable, "-I", "-S", "-c", program, *arguments]


def launch(node: Node, container_id: str = SANDBOX) -> "subprocess.Popen[bytes]":
    words = launch_words(node, container_id)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=node.bundle)


def test_stdout_is_the_response_and_nothing_else(node: Node) -> None:
    vmm = node.process()
    node.save(directory(node.own / "vm"), running(vmm), vmm_pid=vmm.pid)

    process = launch(node)
    output, errors = process.communicate()

    assert (process.returncode, errors) == (0, b"")
    response = DeleteResponse.FromString(output)
    assert (response.pid, response.exit_status) == (vmm.pid, 137)
    assert vmm.wait() == -signal.SIGKILL


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
        words = launch_words(node, deadline_s=0.2, starts_in_s=0.3)
        ended = subprocess.run(words, capture_output=True, cwd=node.bundle, check=False)
        assert not is_clean(node)

    assert ended.returncode == 0
    logged = re.fullmatch(
        rf"sandbox '{SANDBOX}': process (\d+) goes on with undoing what is left of it\n", ended.stderr.decode()
    )
    assert logged is not None
    assert DeleteResponse.FromString(ended.stdout).exit_status == 137
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


def test_a_failed_cleanup_is_a_line_on_stderr_and_an_exit_code(node: Node) -> None:
    (node.own / "in-the-way").mkdir(parents=True)
    node.save(LedgerEntry(kind=ResourceKind.SOCKET, key=f"{node.own}/in-the-way"))

    process = launch(node)
    output, errors = process.communicate()

    assert process.returncode == 1
    assert errors.decode() == f"release socket '{node.own}/in-the-way': not a socket\n"
    assert DeleteResponse.FromString(output).exit_status == 137


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
