"""A host and its operator's habits as they are found: a confined containerd, a kubelet without quotas, a narrow cpuset,
files of Kata's and of other VMMs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from protos.cri import v1_pb2 as pb
from pyshim.model.units import GIB

from .framework import oci, shim_config
from .framework.cgroups import SandboxCgroups, pod_cgroup
from .framework.containerd import Containerd
from .framework.cri import Cri, refusal
from .framework.ctr import Ctr
from .framework.runtime import Runtime

pytestmark = pytest.mark.vm
CPUS = os.sched_getaffinity(0)
SMALL = {"default_memory": 256, "default_vcpus": 1}
several_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


@contextlib.contextmanager
def confined(pid: int, cpu: int) -> Iterator[None]:
    """Every thread of the process, and what it starts, has one CPU only, as by `CPUAffinity=` of its unit."""
    _run_on(pid, {cpu})
    try:
        yield
    finally:
        _run_on(pid, CPUS)


def _run_on(pid: int, cpus: set[int]) -> None:
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cpus)


def _vcpus(sandbox: str) -> dict[str, Any]:
    record: dict[str, Any] = SandboxCgroups(sandbox).state["Pyshim"]["Snapshot"]["Sizing"]
    return record


def _cpus_of_threads(pids: Sequence[int]) -> set[frozenset[int]]:
    tasks = [int(task) for pid in pids for task in os.listdir(f"/proc/{pid}/task")]
    return {frozenset(os.sched_getaffinity(task)) for task in tasks}


# First those with CRI, whose containerd the leak checks must find.


def test_a_kubelet_without_quotas_gets_the_vcpus_that_its_pods_request(cri: Cri, runtime: Runtime) -> None:
    without = pb.LinuxContainerResources(cpu_shares=4096, memory_limit_in_bytes=GIB // 4)
    limited = pb.LinuxContainerResources(cpu_period=100_000, cpu_shares=4096, memory_limit_in_bytes=GIB // 4)

    with cri.pod(resources=without) as pod, cri.pod(resources=limited) as other:
        sized, unsized = _vcpus(pod.id), _vcpus(other.id)

    assert sized["vcpus"]["requested"] == "4"
    assert sized["vcpus"]["requested_source"].endswith("cpu-shares, quota off")
    assert [text for text in sized["warnings"] if "cpuCFSQuota" in text]
    assert unsized["vcpus"]["requested"] == "0"


def test_a_quota_without_a_period_is_refused_by_name(cri: Cri) -> None:
    resources = pb.LinuxContainerResources(cpu_quota=200_000)

    assert "200000 without a period gives no ratio" in refusal(lambda: cri.run_pod("no-period", resources=resources))


@several_cpus
@pytest.mark.parametrize("by", ["quota", "cpuset"])
def test_a_confined_containerd_confines_no_vm(
    ctr: Ctr, containerd: Containerd, name: str, plain_rootfs: Path, scratch: Path, by: str
) -> None:
    config = shim_config.with_keys(scratch, hypervisor=SMALL, runtime={"sizing_policy": "sum"})
    cpu = {"quota": 200_000, "period": 100_000} if by == "quota" else {"cpus": ",".join(map(str, sorted(CPUS)[:2]))}
    spec = oci.spec("sleep", "999", name=name, rootfs=plain_rootfs)
    spec["linux"].setdefault("resources", {})["cpu"] = cpu

    with confined(containerd.pid, min(CPUS)):
        ctr(*ctr.run_words("--detach", "--config", oci.write(spec, scratch), config=config), name)
        vcpus = int(ctr.inside(name, "nproc").out)

    sandbox = SandboxCgroups(name)
    expected = min(3, len(CPUS))
    allowed = CPUS if by == "quota" else set(sorted(CPUS)[:2])
    assert _vcpus(name)["vcpus"]["granted"] == vcpus == expected
    assert _cpus_of_threads((sandbox.vmm, sandbox.virtiofsd)) == {frozenset(allowed)}


@several_cpus
def test_a_cpuset_narrower_than_the_size_bounds_it_and_cpus_beyond_it_are_refused(
    ctr: Ctr, name: str, plain_rootfs: Path, scratch: Path
) -> None:
    config = shim_config.with_keys(scratch, hypervisor=SMALL, runtime={"sizing_policy": "sum"})
    spec = oci.spec("true", name=f"{name}-wide", rootfs=plain_rootfs)
    spec["linux"].setdefault("resources", {})["cpu"] = {"cpus": str(max(CPUS))}

    with pod_cgroup(f"narrow-{name}", cpus=str(min(CPUS))) as parent:
        spec["linux"]["cgroupsPath"] = f"{parent}/wide"
        words = ctr.run_words("--rm", "--config", oci.write(spec, scratch), config=config)
        refused = ctr(*words, f"{name}-wide", check=False)
        ctr.start(name, "--cpus", "2", "--cgroup", f"{parent}/{name}", config=config)
        vcpus, record = ctr.inside(name, "nproc").out.strip(), _vcpus(name)["vcpus"]
        ctr.remove([name, f"{name}-wide"])

    assert (vcpus, record["granted"], record["limited_by"]) == ("1", 1, f"the CPUs of cgroup '{parent}'")
    assert refused.code != 0
    beyond = f"CPUs {max(CPUS)} of '{max(CPUS)}' are not there: the cgroup above has {min(CPUS)}"
    assert f"set cpuset of '{parent}/wide': {beyond}" in refused.err


def test_kata_s_special_values_start_a_vm_with_kata_s_meaning(
    ctr: Ctr, containerd: Containerd, name: str, scratch: Path
) -> None:
    empty = dict.fromkeys(
        ("machine_type", "shared_fs", "block_device_driver", "block_device_aio", "cold_plug_vfio"), ""
    )
    values = {"default_vcpus": -1, "default_memory": 256, "default_bridges": 7, "use_vsock": True, "my_key": 1, **empty}
    config = shim_config.with_keys(scratch, hypervisor=values, runtime={"internetworking_model": "", "vfio_mode": ""})

    result = ctr.run(name, "nproc", config=config)

    assert result.out.strip() == str(len(CPUS))
    said = [line for line in containerd.log.read_text().splitlines() if "problem=" in line and str(scratch) in line]
    for warning in ("default_bridges is limited to 5", "use_vsock was removed from Kata", "my_key is not a known key"):
        assert len([line for line in said if warning in line]) == 1, (warning, said)


def test_a_file_for_another_vmm_is_named_as_such(ctr: Ctr, name: str, scratch: Path) -> None:
    config = scratch / "configuration.toml"
    config.write_text('[hypervisor.firecracker]\npath = "/f"\nkernel = "/k"\nblock_device_driver = "virtio-mmio"\n')

    refused = ctr.run(name, "true", config=config, check=False)

    assert refused.code != 0
    said = "line 1: hypervisor.firecracker is not supported, only qemu and remote: the file is for another VMM"
    assert said in refused.err
    assert "block_device_driver" not in refused.err
