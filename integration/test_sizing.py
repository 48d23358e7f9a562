"""The size a VM boots with: what was recorded is what the guest sees, and what cannot fit never boots."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pyshim.model.units import MIB

from .framework import oci, shim_config
from .framework.ctr import Ctr
from .framework.runtime import Runtime

pytestmark = pytest.mark.vm
HOST_CPUS = len(os.sched_getaffinity(0))
_PYSHIM = Path(__file__).resolve().parents[1] / "bin" / "pyshim"


def configuration(directory: Path, policy: str = "sum", **hypervisor: object) -> Path:
    return shim_config.with_keys(directory, hypervisor=hypervisor, runtime={"sizing_policy": policy})


def sizing_of(runtime: Runtime, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(runtime.persisted(name).read_text())["Pyshim"]["Snapshot"]["Sizing"]
    return found


@pytest.mark.parametrize(
    ("hypervisor", "policy", "cpus", "mib", "vcpus", "memory"),
    [
        ({"default_vcpus": 0.5, "default_memory": 512}, "sum", "0.25", 300, 1, 812),
        ({"default_memory": 2048, "overhead_vcpus": 0.2, "overhead_memory": 32}, "overhead", "1.2", 600, 2, 632),
    ],
    ids=["sum", "overhead"],
)
def test_the_guest_has_what_the_record_says(
    ctr: Ctr,
    runtime: Runtime,
    name: str,
    scratch: Path,
    hypervisor: dict[str, float],
    policy: str,
    cpus: str,
    mib: int,
    vcpus: int,
    memory: int,
) -> None:
    config = configuration(scratch, policy, **hypervisor)
    limits = ["--cpus", cpus, *(["--memory-limit", str(mib * MIB)] if mib else [])]
    ctr.start(name, *limits, config=config)

    sizing = sizing_of(runtime, name)
    count = int(ctr.inside(name, "nproc").out)
    lines = ctr.inside(name, "cat", "/proc/meminfo").out.splitlines()
    seen_mib = int(lines[0].split()[1]) / 1024

    assert (sizing["policy"], sizing["vcpus"]["rounded"], sizing["memory_mib"]["granted"]) == (policy, vcpus, memory)
    assert count == sizing["vcpus"]["granted"] == min(vcpus, HOST_CPUS)
    # The guest's kernel keeps its image and a page table entry's worth of each page to itself.
    assert memory * 0.85 - 16 < seen_mib <= memory


def test_the_guest_has_the_numa_nodes_of_the_mapping(ctr: Ctr, name: str, plain_rootfs: Path, scratch: Path) -> None:
    """This host has one node: both of the guest's are on it."""
    numa = {"enable_numa": True, "numa_mapping": ["0", "0"]}
    config = configuration(scratch, "sum", default_memory=512, default_vcpus=2, **numa)
    spec = oci.spec("sleep", "999", name=name, rootfs=plain_rootfs)
    spec["linux"].setdefault("resources", {})["cpu"] = {"mems": "0"}
    words = ctr.run_words("--detach", "--config", oci.write(spec, scratch), config=config)
    script = (
        "cd /sys/devices/system/node; cat node0/cpulist node1/cpulist node1/distance; grep -h MemTotal */meminfo; "
        "grep Mems_allowed_list /proc/self/status"
    )
    ctr(*words, name)

    cpus_0, cpus_1, distances, *memory, own = ctr.inside(name, "sh", "-c", script).lines
    shown = subprocess.run([_PYSHIM, "status", "--cgroups", name], capture_output=True, text=True, timeout=60).stdout

    assert (cpus_0, cpus_1, distances.split()) == ("0", "1", ["11", "10"])
    assert [150 < int(line.split()[3]) / 1024 <= 256 for line in memory] == [True, True]
    assert own.split()[1] == "0-1"
    assert "numa      2 nodes, as numa_mapping says\n" in shown
    cpus_of_node = Path("/sys/devices/system/node/node0/cpulist").read_text().strip()
    assert f"    node 1    vCPUs 1 on CPUs {cpus_of_node}, 256 MiB of host node 0\n" in shown


def test_a_container_that_asks_has_swap_in_the_guest_and_its_file_goes_with_the_sandbox(
    ctr: Ctr, name: str, scratch: Path
) -> None:
    directory = scratch / "swap"
    config = configuration(scratch, "overhead", default_memory=512, enable_guest_swap=True, guest_swap_path=directory)
    options = ["--annotation", "io.katacontainers.container.resource.swappiness=60", "--memory-limit", str(64 * MIB)]
    # From 6.12 on Linux counts pages of zeros apart, as it does not write them.
    counts = r"sed -n 's/^\(pswpout\|swpout_zero\) //p' /proc/vmstat"
    script = f"tail -n 1 /proc/swaps; dd if=/dev/zero of=/dev/null bs=100000000 count=1; {counts}"

    area, *swapped = ctr.run(name, "sh", "-c", script, options=options, config=config).lines

    assert area.split()[1:3] == ["partition", str(64 * 1024)]
    assert sum(map(int, swapped)) * 4096 > 20_000_000
    assert list(directory.iterdir()) == []


def test_what_the_host_does_not_have_is_refused_with_the_numbers(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path
) -> None:
    config = configuration(scratch, default_memory=512)
    limit = 1 << 50

    refused = ctr.run(name, "true", options=["--memory-limit", str(limit)], config=config, check=False)

    assert refused.code != 0
    assert f"its {512 + limit // MIB} MiB of RAM (default_memory 512 MiB + {limit // MIB} MiB)" in refused.err
    assert "MiB are available" in refused.err
    assert not runtime.persisted(name).exists()
    assert runtime.vmms(name) == []
