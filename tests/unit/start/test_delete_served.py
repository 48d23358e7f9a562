"""`delete` for a container of a pod whose shim lives: answered from the state, without any other work."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from delete_node import SANDBOX, Node

from protos.containerd.task_v2_pb2 import DeleteResponse
from pyshim.model.places import STATE_ROOT
from pyshim.model.task import ExitStatus
from pyshim.start import delete
from pyshim.start.invocation import CommandError, Invocation
from pyshim.state.schema import OLDEST_VERSION, VERSION
from pyshim.state.store import _sealed
from tests.style.test_start_imports import SLOW
from tests.unit.state.states import container

GOLDEN = Path(__file__).parents[2] / "golden/state"
EXITED_AT_NS = 1_700_000_000_000_000_007


@pytest.fixture
def served(node: Node) -> Node:
    """A pod of two containers, whose shim lives; the bundle is one of theirs."""
    pod = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": SANDBOX}
    (node.bundle / "config.json").write_text(json.dumps({"annotations": pod}))
    exited = container("ended", ExitStatus(status=3, exited_at_ns=EXITED_AT_NS))
    node.save(daemon=node.process(), vmm_pid=4711, containers=(exited, container("running")))
    return node


def answer(node: Node, container_id: str, namespace: str = "k8s.io", address: str = "/run/c.sock") -> bytes | None:
    call = Invocation()
    call.id, call.bundle, call.namespace, call.address = container_id, str(node.bundle), namespace, address
    return delete.served_answer(call, state_root=node.store.root)


def test_the_exit_in_the_state_is_the_answer(served: Node) -> None:
    found = DeleteResponse.FromString(answer(served, "ended") or b"")

    assert (found.pid, found.exit_status, found.exited_at.ToNanoseconds()) == (4711, 3, EXITED_AT_NS)


@pytest.mark.parametrize("container_id", ["running", "deleted-before"])
def test_without_an_exit_the_answer_is_a_kill_at_this_moment(served: Node, container_id: str) -> None:
    before = time.time_ns()

    found = DeleteResponse.FromString(answer(served, container_id) or b"")

    assert (found.pid, found.exit_status) == (4711, 137)
    assert before <= found.exited_at.ToNanoseconds() <= time.time_ns()


def test_the_shim_itself_is_not_asked_and_nothing_changes(served: Node) -> None:
    before = served.state_file().read_bytes()

    assert answer(served, "ended") == answer(served, "ended")
    assert served.state_file().read_bytes() == before


def _dead(node: Node) -> None:
    node.save(daemon=None, containers=(container("ended"),))


def _another_start(node: Node) -> None:
    shim = json.loads(node.state_file().read_text())["Pyshim"]["Shim"]
    node.rewrite(f'"StartTicks":{shim["StartTicks"]}', '"StartTicks":7')


def _fifo(node: Node) -> None:
    node.state_file().unlink()
    os.mkfifo(node.state_file())


CHANGES: dict[str, Callable[[Node], object]] = {
    "its shim is dead": _dead,
    "another process has the shim's pid": _another_start,
    "a later release wrote the state": lambda node: node.rewrite('"Version":4', '"Version":5'),
    "the shim is of another pid namespace": lambda node: node.rewrite('"PidNamespace":', '"PidNamespace":1'),
    "a digit of the state is another": lambda node: node.state_file().write_bytes(
        node.state_file().read_bytes().replace(b'"Status":3', b'"Status":0')
    ),
    "the state is a FIFO": _fifo,
    "the state is cut": lambda node: node.state_file().write_bytes(node.state_file().read_bytes()[:-300]),
    "the state is no state": lambda node: node.state_file().write_bytes(_sealed(b'{"Pyshim":{"Version":[]')),
    "the state is nested without end": lambda node: node.state_file().write_bytes(_sealed(b"[" * 200_000)),
    "the state is gone": lambda node: node.state_file().unlink(),
    "the bundle has no spec": lambda node: (node.bundle / "config.json").unlink(),
    "the bundle's spec is cut": lambda node: (node.bundle / "config.json").write_text('{"annotations": {'),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_other_case_is_left_to_the_whole_delete(served: Node, change: Callable[[Node], object]) -> None:
    change(served)

    assert answer(served, "ended") is None


def test_a_sandboxs_own_container_and_those_of_others_are_left_to_the_whole_delete(served: Node) -> None:
    assert answer(served, SANDBOX) is None
    assert answer(served, "ended", namespace="other") is None


@pytest.mark.root
def test_a_root_file_system_that_is_still_mounted_is_left_to_the_whole_delete(served: Node) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(served.bundle / "rootfs")], check=True)
    try:
        assert answer(served, "ended") is None
    finally:
        subprocess.run(["umount", str(served.bundle / "rootfs")], check=True)


def test_an_id_that_is_none_is_refused(served: Node) -> None:
    with pytest.raises(CommandError, match="-id"):
        answer(served, "../x")


def test_the_exit_in_an_earlier_releases_state_is_known(tmp_path: Path) -> None:
    (tmp_path / "sb1").mkdir()
    shutil.copy(GOLDEN / f"pyshim-{delete.OLDEST_STATE_VERSION}.json", tmp_path / "sb1/persist.json")
    call = Invocation()
    call.id, call.namespace = "c2", "k8s.io"

    assert delete.recorded_exit(call, "sb1", state_root=str(tmp_path)) == (12, 137, 1_700_000_000_000_000_001)


def test_it_knows_what_the_state_says_elsewhere() -> None:
    assert (delete.STATE_VERSION, delete.OLDEST_STATE_VERSION) == (VERSION, OLDEST_VERSION)
    assert delete.STATE_ROOT == STATE_ROOT


def test_it_imports_what_start_may(served: Node) -> None:
    """containerd waits for it at the end of every container."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); "
        "from pyshim.start import delete, invocation; call = invocation.parse(sys.argv[1:]); "
        f"print(delete.print_served_answer(call, state_root={served.store.root!r}), *sys.modules, file=sys.stderr)"
    )
    words = ["-namespace", "k8s.io", "-address", "/run/c.sock", "-id", "ended", "-bundle", str(served.bundle), "delete"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, *words], capture_output=True, env=os.environ, check=True, timeout=60
    )
    printed, *modules = done.stderr.decode().split()

    assert printed == "True"
    assert DeleteResponse.FromString(done.stdout).exit_status == 3
    assert not {*SLOW, "msgspec"} & {*modules}
    assert all(name.startswith("pyshim.start") for name in modules if name.startswith("pyshim."))
