"""`delete` beside daemons: whose a sandbox is, who is alive, waited for, let alone or ended."""

import os
import signal

import pytest
from delete_node import DEADLINE_S, SANDBOX, Node, directory, running

from pyshim.cleanup import leftovers
from pyshim.host.processes import identity as processes
from pyshim.start.address import socket_path
from tests.unit.state.states import container

pytestmark = pytest.mark.root  # `delete` unmounts the bundle's root, whether or not it is mounted


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


def test_a_successor_of_the_daemons_pid_is_no_daemon(node: Node) -> None:
    other = node.process()
    node.save(directory(node.own / "vm"), daemon=other)
    text = node.state_file().read_text().replace(f'"StartTicks":{processes.start_ticks(other.pid)}', '"StartTicks":1')
    node.state_file().write_text(text)

    node.delete()

    assert other.poll() is None
    assert not (node.own / "vm").exists()


def test_a_daemon_whose_recorded_pid_is_none_has_ended(node: Node) -> None:
    other = node.process()
    node.save(directory(node.own / "vm"), daemon=other)
    node.state_file().write_text(node.state_file().read_text().replace(f'"Pid":{other.pid}', '"Pid":0'))

    node.delete()

    assert node.errors == []
    assert not (node.own / "vm").exists()


def test_a_process_that_is_no_shim_is_never_signalled(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record's pid and start time are those of another program."""
    monkeypatch.setattr(leftovers, "EXIT_WAIT_S", 0.05)
    other = node.program("sshd", "-D")
    node.save(directory(node.own / "vm"), daemon=other)

    node.delete()

    assert other.poll() is None
    assert not (node.own / "vm").exists()
