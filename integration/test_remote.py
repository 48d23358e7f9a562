"""Containers in VMs that a peer makes: the whole life of a task, without a hypervisor of the shim's own.

The VM of most tests was made by a peer that took its time and said everything twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import GROUND, own_name
from .framework import load, processes
from .framework.ctr import Ctr, Result
from .framework.remote_peer import MEMORY_MIB, RemotePeer, RemoteRun
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = pytest.mark.vm

Exec = Callable[..., Result]
_ids = itertools.count(1)
H = "io.katacontainers.config.hypervisor."


@pytest.fixture(scope="module")
def container(ctr: Ctr, peer: RemotePeer, remote_run: RemoteRun) -> Iterator[str]:
    copied = GROUND / "remote-file"
    copied.write_text("from the node\n")
    faults = "CreateVM:before=delay(1),CreateVM:after=twice,StartVM:after=twice"
    with own_name(ctr) as name:
        mount = f"type=bind,src={copied},dst=/copied,options=bind:ro"
        with peer.faults(faults):
            ctr(*remote_run("web", "--mount", mount, detach=True), name, "sleep", "100000")
        yield name


@pytest.fixture
def execute(ctr: Ctr, container: str) -> Exec:
    """Runs a command in the container."""

    def run(*command: str, input: bytes | None = None) -> Result:
        words = ("task", "exec", "--exec-id", f"e{next(_ids)}", container, *command)
        return ctr(*words, input=input, check=False)

    return run


def test_the_peer_was_told_what_the_pod_is(peer: RemotePeer, container: str, remote_run: RemoteRun) -> None:
    record = peer.record(container)

    assert record["netns"] == str(remote_run.network.namespace)
    told = {
        "io.kubernetes.cri.sandbox-name": "web",
        "io.kubernetes.cri.sandbox-namespace": "tests",
        "io.kubernetes.cri.sandbox-uid": "uid-of-web",
        H + "default_vcpus": "1",
        H + "default_memory": str(MEMORY_MIB),
        H + "default_gpus": "0",
        H + "default_gpu_model": "",
        H + "machine_type": "",
        H + "image": "",
        H + "cc_init_data": "",
    }
    assert {key: record["annotations"].get(key) for key in told} == told


def test_the_only_vm_is_the_peers_and_the_image_was_pulled_in_it(
    runtime: Runtime, peer: RemotePeer, container: str, execute: Exec
) -> None:
    result = execute("sh", "-c", "cat /layer-marker; uname -v; ls /sys/class/net")

    (vm,) = peer.vms()
    (shim,) = runtime.shims(container)
    assert vm not in processes.descendants(shim.pid)
    assert result.lines[0] == "upper"
    assert "Debian" in result.lines[1]
    assert result.lines[2:] == ["lo"], "neither the VM's interface nor the forwarder is the containers' business"


def test_an_exec_has_its_output_error_and_status(execute: Exec) -> None:
    result = execute("sh", "-c", "echo said; echo to the other >&2; exit 3")

    assert (result.out, result.err, result.code) == ("said\n", "to the other\n", 3)


def test_much_goes_through_tls_and_back_whole(execute: Exec) -> None:
    # `ctr` may miss the end of an input that it has read before the process is there, so this one is not short.
    large = b"".join(b"%d\n" % number for number in range(300_000))

    result = execute("cat", input=large)

    assert hashlib.sha256(result.stdout).hexdigest() == hashlib.sha256(large).hexdigest()


def test_a_file_of_the_node_is_copied_into_the_vm(execute: Exec) -> None:
    assert execute("cat", "/copied").out == "from the node\n"


def test_a_signal_reaches_the_process_and_its_status_comes_back(
    ctr: Ctr, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path
) -> None:
    script = "trap 'echo got it; exit 7' TERM; echo up; while :; do sleep 0.1; done"
    stopped = peer.asked("StopVM")

    with ctr.background(scratch, *remote_run("life"), name, "sh", "-c", script) as running:
        running.wait_for("up")
        ctr("task", "kill", "--signal", "TERM", name)
        result = running.wait()

    assert (result.out, result.code) == ("up\ngot it\n", 7)
    assert name not in [record["id"] for record in peer.records()]
    assert peer.asked("StopVM") == stopped + 1


def test_pods_start_at_once_and_each_has_a_vm_of_its_own(
    ctr: Ctr, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path
) -> None:
    others = {record["id"] for record in peer.records()}
    names = [f"{name}-{number}" for number in range(load.amount(2, 10))]
    for one in names:
        (scratch / one).mkdir()
    with contextlib.ExitStack() as ends:
        running = {
            one: ends.enter_context(
                ctr.background(scratch / one, *remote_run(one), one, "sh", "-c", "echo $HOSTNAME up; sleep 100000")
            )
            for one in names
        }
        for process in running.values():
            process.wait_for("up", within_s=240)
        records = {record["id"]: record for record in peer.records() if record["id"] not in others}
        vms = len(peer.vms())
        for one in names:
            ctr("task", "kill", "--signal", "KILL", one)
        codes = {process.wait().code for process in running.values()}

    assert set(records) == set(names)
    assert {record["annotations"]["io.kubernetes.cri.sandbox-name"] for record in records.values()} == set(names)
    assert len({record["running"]["port"] for record in records.values()}) == len(names)
    assert vms == len(names) + len(others)
    assert codes == {128 + signal.SIGKILL}
    eventually(lambda: {record["id"] for record in peer.records()} == others, what="the peer has stopped them")
