"""/sys/devices/system to a machine: trees as kernels show them, and trees that lack something or make no sense."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.model.host_facts import Machine, MachineError, cpuset_text
from pyshim.model.units import MIB
from pyshim.node.nri.description import Description, machine
from pyshim.resources.machine import machine_of, read_machine
from tests.fakes.machines import ALL, SOME_OFFLINE, TWO_SOCKETS, with_device_memory

Files = dict[str, str]


def shown(there: Machine) -> Files:
    """A machine as its kernel shows it."""
    online = [cpu for cpu in there.cpus if cpu.online]
    files = {
        "cpu/online": f"{cpuset_text(cpu.id for cpu in online)}\n",
        "cpu/present": f"{cpuset_text(cpu.id for cpu in there.cpus)}\n",
        "node/online": f"{cpuset_text(node.id for node in there.nodes)}\n",
    }
    for cpu in online:

        def same(level: str, number: int) -> str:
            return f"{cpuset_text(each.id for each in online if getattr(each, level) == number)}\n"

        at = f"cpu/cpu{cpu.id}"
        files[f"{at}/topology/core_cpus_list"] = files[f"{at}/topology/thread_siblings_list"] = same("core", cpu.core)
        files[f"{at}/topology/die_cpus_list"] = same("die", cpu.die)
        files[f"{at}/topology/package_cpus_list"] = same("socket", cpu.socket)
        files[f"{at}/topology/core_siblings_list"] = same("socket", cpu.socket)
        for index, (level, of) in enumerate((("1", "core"), ("1", "core"), ("2", "core"), ("3", "l3"))):
            files[f"{at}/cache/index{index}/level"] = f"{level}\n"
            files[f"{at}/cache/index{index}/shared_cpu_list"] = same(of, getattr(cpu, of))
    for node in there.nodes:
        files[f"node/node{node.id}/cpulist"] = f"{cpuset_text(cpu.id for cpu in online if cpu.node == node.id)}\n"
        files[f"node/node{node.id}/distance"] = f"{' '.join(map(str, node.distances))}\n"
        files[f"node/node{node.id}/meminfo"] = (
            f"\nNode {node.id} MemTotal:       {node.memory_bytes // 1024} kB\nNode {node.id} MemFree:  17 kB\n"
        )
    return files


def alike(there: Machine) -> object:
    """A machine without the numbers of its groups: who is with whom."""
    online = [cpu for cpu in there.cpus if cpu.online]
    levels = ("core", "l3", "die", "socket")
    together = {
        level: {frozenset(each.id for each in online if getattr(each, level) == getattr(cpu, level)) for cpu in online}
        for level in levels
    }
    return together, [(cpu.id, cpu.node) for cpu in online], {cpu.id for cpu in there.cpus}, there.nodes


@pytest.mark.parametrize("of", [pytest.param(of, id=name) for name, of in ALL.items()])
def test_what_a_kernel_shows_is_the_machine(of: Description) -> None:
    there = machine(of)

    assert alike(machine_of(shown(there))) == alike(there)


def test_a_node_of_memory_alone_is_a_node() -> None:
    there = with_device_memory(TWO_SOCKETS, 4096)

    assert machine_of(shown(there)).nodes == there.nodes


def without(*parts: str) -> Callable[[Files], Files]:
    return lambda files: {path: text for path, text in files.items() if not any(part in path for part in parts)}


def with_(path: str, text: str) -> Callable[[Files], Files]:
    return lambda files: {**files, path: text}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(without("core_cpus_list", "package_cpus_list"), id="names before Linux 5.3"),
        pytest.param(without("cpu/present"), id="no list of present CPUs"),
    ],
)
def test_older_kernels_show_the_same(change: Callable[[Files], Files]) -> None:
    there = machine(TWO_SOCKETS)

    assert alike(machine_of(change(shown(there)))) == alike(there)


def test_without_dies_a_socket_is_one_and_without_caches_it_is_the_die() -> None:
    found = machine_of(without("die_cpus_list", "/cache/")(shown(machine(TWO_SOCKETS))))

    assert {(cpu.die, cpu.l3) for cpu in found.cpus} == {(0, 0), (8, 8)}


def test_without_an_l3_a_cluster_of_cores_is_what_shares() -> None:
    files = without("/cache/index3")(shown(machine(TWO_SOCKETS)))
    clusters = {
        f"cpu/cpu{cpu}/topology/cluster_cpus_list": files[f"cpu/cpu{cpu}/topology/die_cpus_list"] for cpu in (0, 1)
    }

    found = machine_of({**files, **clusters, "cpu/cpu2/topology/cluster_cpus_list": "2,18\n"})

    assert [cpu.l3 for cpu in found.cpus[:3]] == [0, 0, found.cpus[2].die]


def test_a_kernel_without_numa_shows_one_node() -> None:
    files = without("node/")(shown(machine(TWO_SOCKETS)))

    found = machine_of({**files, "meminfo": "MemTotal:    2048 kB\nMemFree: 1 kB\n"})

    assert [(node.id, node.memory_bytes) for node in found.nodes] == [(0, 2 * MIB)]
    assert {cpu.node for cpu in found.cpus} == {0}


def test_offline_cpus_are_known_and_nowhere() -> None:
    found = machine_of(shown(machine(SOME_OFFLINE)))

    assert [cpu.id for cpu in found.cpus if not cpu.online] == [2, 5, 17, 20, 27, 28, 29]


def test_isolated_cpus_are_told() -> None:
    files = {**shown(machine(TWO_SOCKETS)), "cpu/isolated": "2-3,18\n"}

    assert [cpu.id for cpu in machine_of(files).cpus if cpu.isolated] == [2, 3, 18]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("cpu/online"), "read 'cpu/online': it is missing"),
        (with_("cpu/online", "zero"), r"read 'cpu/online': not a list of CPUs below 8192: 'zero'"),
        (with_("cpu/online", "\n"), "read machine: no CPU is online"),
        (without("cpu3/topology"), "read 'cpu/cpu3/topology/core_cpus_list': it is missing"),
        (
            without("cpu3/topology/package", "cpu3/topology/core_sib"),
            "read 'cpu/cpu3/topology/package_cpus_list': it is missing",
        ),
        (
            with_("cpu/cpu3/topology/core_cpus_list", "4-5\n"),
            r"read 'cpu/cpu3/topology/core_cpus_list': CPU 3 is not in it: '4-5\\n'",
        ),
        (with_("cpu/cpu3/cache/index3/shared_cpu_list", ""), "index3/shared_cpu_list': CPU 3 is not in it: ''"),
        (without("node1/cpulist"), "read 'node/node1/cpulist': it is missing"),
        (with_("node/node1/cpulist", "9-15,24-31"), r"read 'node/node\*/cpulist': CPU 8 is online and of no node"),
        (without("node1/distance"), "read 'node/node1/distance': it is missing"),
        (with_("node/node1/distance", "10 far"), "read 'node/node1/distance': not a row of distances: '10 far'"),
        (with_("node/node1/distance", f"10 {'9' * 5000}"), "not a row of distances: '10 9999"),
        (with_("node/node1/distance", "10"), "read node 1: 1 distances to 2 nodes"),
        (with_("node/node1/meminfo", "MemFree: 3 kB"), "read 'node/node1/meminfo': no line MemTotal in kB"),
        (with_("node/online", "0-2"), "read 'node/node2/distance': it is missing"),
    ],
)
def test_what_is_missing_or_odd_is_named(change: Callable[[Files], Files], problem: str) -> None:
    with pytest.raises(MachineError, match=problem):
        machine_of(change(shown(machine(TWO_SOCKETS))))


def test_files_are_read_from_the_trees_given(tmp_path: Path) -> None:
    there = machine(SOME_OFFLINE)
    for path, text in shown(there).items():
        file = tmp_path / "sys/devices/system" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    assert alike(read_machine(sys_root=str(tmp_path / "sys"))) == alike(there)


def test_this_machine_is_one() -> None:
    assert any(cpu.online for cpu in read_machine().cpus)


def test_a_tree_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="read 'cpu/online': it is missing"):
        read_machine(sys_root=str(tmp_path))
