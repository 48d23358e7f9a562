"""One pod's figures and its place in the host's cgroups, as the kubelet sees both (cgroup v1)."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from protos.cri import v1_pb2 as pb
from pyshim.model.units import MIB

from .framework import cgroups, crio
from .framework.cgroups import SandboxCgroups, pod_cgroup
from .framework.cri import Container, Cri, Pod, refusal
from .framework.cri_session import GATEWAY, settled
from .framework.waiting import eventually

pytestmark = pytest.mark.vm
_RUNTIME = "io.katacontainers.config.runtime."
_FILES = (
    "cd /sys/fs/cgroup; cat memory.current pids.current; grep -E '^(anon|inactive_file) ' memory.stat; cat cpu.stat"
)


@pytest.fixture(scope="module")
def stats_pod(cri: Cri, module_leaves_nothing: None) -> Iterator[Pod]:
    """A pod whose VM is all in the pod's cgroup, its vCPUs to be pinned."""
    keys = {f"{_RUNTIME}{key}": "true" for key in ("sandbox_cgroup_only", "enable_vcpus_pinning")}
    with pod_cgroup("podstats") as parent, cri.pod("stats", cgroup_parent=parent, annotations=keys) as shared:
        yield settled(shared)


@pytest.fixture
def busy_pod(stats_pod: Pod, leaves_nothing: None) -> Iterator[Pod]:
    yield stats_pod
    stats_pod.remove_containers()


def _stats(container: Container) -> Any:
    return container.cri.call("ContainerStats", container_id=container.id).stats


def _guests_own(container: Container) -> dict[str, int]:
    """The container's cgroup files in the guest."""
    memory, pids, *rest = container.sh(_FILES).splitlines()
    found = {key: int(value) for key, value in (line.split() for line in rest)}
    return {"memory": int(memory), "pids": int(pids), **found}


def test_figures_of_a_container_are_those_of_its_cgroup_in_the_guest(busy_pod: Pod) -> None:
    """Memory within 4 MiB, what a look itself changes; CPU time between that of a look before and one after."""
    hold = (
        "dd if=/dev/zero of=/dev/shm/held bs=1M count=40 2>/dev/null; i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"
    )
    container = busy_pod.start("sh", "-c", f"{hold}; touch /dev/shm/ready; sleep 100000")
    eventually(lambda: container.exec("test", "-e", "/dev/shm/ready").code == 0, what="the load has run")

    before, stats, files = _guests_own(container), _stats(container), _guests_own(container)

    memory = stats.memory
    assert files["memory"] > 40 * MIB
    assert abs(memory.usage_bytes.value - files["memory"]) < 4 * MIB
    assert abs(memory.working_set_bytes.value - (files["memory"] - files["inactive_file"])) < 4 * MIB
    assert abs(memory.rss_bytes.value - files["anon"]) < 4 * MIB
    assert memory.page_faults.value > 0
    assert before["usage_usec"] <= stats.cpu.usage_core_nano_seconds.value // 1000 <= files["usage_usec"]
    table = busy_pod.cri.daemon.ctr("--namespace", "k8s.io", "task", "metrics", "--format", "json", container.id)
    metrics = json.loads(table.out)
    usage = metrics["memory"]["usage"]  # containerd has two forms, of cgroup v1 and v2
    assert abs(int(usage if cgroups.is_v2() else usage["usage"]) - files["memory"]) < 4 * MIB
    assert int(metrics["pids"]["current"]) >= 1
    listed = busy_pod.cri.call("ListContainerStats", filter=pb.ContainerStatsFilter(pod_sandbox_id=busy_pod.id)).stats
    assert {item.attributes.id for item in listed} == {container.id}


@pytest.mark.skipif(not cgroups.has("memory"), reason="needs the cgroup controller memory")
def test_figures_of_the_pod_are_those_of_its_vm(busy_pod: Pod) -> None:
    """containerd reads the pod's cgroup on the host: what the VM costs is in it."""
    sandbox = SandboxCgroups(busy_pod.id)
    busy_pod.start()
    prefix = "crio-" if crio.is_chosen() else ""
    assert sandbox.path("sandbox") == f"/podstats/{prefix}{busy_pod.id}"

    stats = busy_pod.cri.call("PodSandboxStats", pod_sandbox_id=busy_pod.id).stats.linux

    file = "memory.current" if cgroups.is_v2() else "memory.usage_in_bytes"
    usage = int((sandbox.directory("sandbox", "memory") / file).read_text())
    assert usage > 60 * MIB
    assert abs(stats.memory.usage_bytes.value - usage) < 32 * MIB
    assert stats.cpu.usage_core_nano_seconds.value > 0
    assert stats.process.process_count.value > 0


def test_traffic_is_counted_once_for_the_pod_and_for_no_container(busy_pod: Pod) -> None:
    """The host's end of the pod's interface has it; the tap beside it and the guest's card are of the same bytes."""
    container = busy_pod.start()

    def sent() -> int:
        network = busy_pod.cri.call("PodSandboxStats", pod_sandbox_id=busy_pod.id).stats.linux.network
        assert network.default_interface.name == "eth0"
        every = {each.name: each.tx_bytes.value for each in (network.default_interface, *network.interfaces)}
        return sum(every.values())

    with socket.create_server((GATEWAY, 0)) as server:
        before = sent()
        script = f"head -c {MIB} /dev/zero | nc {GATEWAY} {server.getsockname()[1]}"
        with ThreadPoolExecutor(1) as one:
            running = one.submit(container.sh, script)
            connection, _ = server.accept()
            with connection:
                received = sum(len(data) for data in iter(lambda: connection.recv(65536), b""))
            running.result()

    assert received == MIB
    assert MIB < sent() - before < 1.5 * MIB
    shown = busy_pod.cri.daemon.ctr("--namespace", "k8s.io", "task", "metrics", "--format", "json", container.id)
    assert "network" not in json.loads(shown.out)


def _numbers(text: str) -> set[int]:
    """`0-2,5` as a set."""
    ends = (part.partition("-")[::2] for part in text.split(","))
    return {number for first, last in ends for number in range(int(first), int(last or first) + 1)}


def test_cpu_sets_of_the_containers_are_the_sandboxs_and_pin_its_vcpus(busy_pod: Pod, cri: Cri) -> None:
    sandbox = SandboxCgroups(busy_pod.id)
    cpuset = sandbox.directory("sandbox", "cpuset")
    effective = "cpuset.cpus.effective" if cgroups.is_v2() else "cpuset.effective_cpus"
    everything = (cpuset.parent / effective).read_text().strip()
    cpus = _numbers(everything)
    first, last = min(cpus), max(cpus)
    only_first = pb.LinuxContainerResources(cpuset_cpus=str(first), cpuset_mems="0")

    container = busy_pod.start(resources=only_first)

    assert (cpuset / effective).read_text().strip() == str(first)
    assert sandbox.record["Pinned"] == {"0": first}
    assert [os.sched_getaffinity(tid) for tid in sandbox.vcpu_threads] == [{first}]
    with cri.pod("second", annotations={f"{_RUNTIME}enable_vcpus_pinning": "true"}) as second:
        second.start(resources=only_first)
        record = SandboxCgroups(second.id).record
        assert (record["Pinned"], record["Pinning"]) == (
            {},
            f"not pinned: CPU {first} is pinned by sandbox '{busy_pod.id}'",
        )
    absent = pb.LinuxContainerResources(cpuset_cpus="4000")
    assert "4000 of" in refusal(lambda: busy_pod.start(resources=absent))
    container.cri.call("UpdateContainerResources", container_id=container.id, linux={"cpuset_cpus": str(last)})
    assert (cpuset / effective).read_text().strip() == str(last)
    assert [os.sched_getaffinity(tid) for tid in sandbox.vcpu_threads] == [{last}]
    busy_pod.start()
    assert (cpuset / effective).read_text().strip() == everything
    assert sandbox.record["Pinned"] == {}
    assert [os.sched_getaffinity(tid) for tid in sandbox.vcpu_threads] == [cpus]


def test_a_container_out_of_memory_leaves_its_sibling_alive(busy_pod: Pod) -> None:
    sibling = busy_pod.start()
    limit = pb.LinuxContainerResources(memory_limit_in_bytes=32 << 20)
    greedy = busy_pod.start("sh", "-c", "x=x; while :; do x=$x$x; done", resources=limit)

    assert greedy.exit_code() == 137
    eventually(lambda: greedy.status.reason == "OOMKilled", what="the reason is OOMKilled")

    assert sibling.is_running
    assert sibling.sh("echo alive") == "alive\n"
    assert busy_pod.is_ready
    assert SandboxCgroups(busy_pod.id).state["Pyshim"]["Snapshot"]["Failure"] == ""
