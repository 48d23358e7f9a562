"""A running VM follows its containers where it may, and refuses beyond its size where it may not: seen in the guest."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pyshim.model.units import MIB
from pyshim.ttrpc import RemoteError

from .framework import shim_config
from .framework.ctr import Ctr
from .framework.direct import update_task
from .framework.waiting import eventually

pytestmark = pytest.mark.vm
FAILED_PRECONDITION = 9
_PYSHIM = Path(__file__).resolve().parents[1] / "bin" / "pyshim"
_BLOCK_MIB = 128


@dataclass(slots=True)
class Guest:
    """A running container and the VM around it."""

    ctr: Ctr
    name: str

    def look(self) -> tuple[int, int]:
        """CPUs and MiB the guest itself counts."""
        result = self.ctr.inside(self.name, "sh", "-c", "nproc; grep MemTotal /proc/meminfo")
        cpus, total = result.lines
        return int(cpus), int(total.split()[1]) // 1024

    def comes_to(self, cpus: int, mib: int) -> None:
        """A DIMM is in the machine at once, and in the guest when its kernel has heard of it."""
        eventually(lambda: self.look() == (cpus, mib), what=lambda: f"{cpus} CPUs, {mib} MiB, not {self.look()}")

    def record(self) -> Any:
        shown = subprocess.run(
            [str(_PYSHIM), "sizing", "show", "--json", self.name], capture_output=True, check=True, timeout=30
        )
        return json.loads(shown.stdout)

    def granted(self) -> tuple[int, int]:
        record = self.record()
        return record["vcpus"]["granted"], record["memory_mib"]["granted"]


def _config(scratch: Path, policy: str = "overhead", *, plugs_vcpus: bool = False, **hypervisor: object) -> Path:
    runtime = {"static_sandbox_resource_mgmt": policy == "sum", "sizing_policy": policy}
    guest = shim_config.guest_that_takes_vcpus() if plugs_vcpus else {}
    return shim_config.with_keys(scratch, guest, hypervisor=hypervisor, runtime=runtime)


def _run(ctr: Ctr, name: str, config: Path, *options: str) -> Guest:
    ctr.start(name, *options, config=config)
    return Guest(ctr, name)


def _agrees(guest: Guest) -> bool:
    """The guest counts the record's CPUs, and its memory less what its kernel keeps for itself."""
    vcpus, memory_mib = guest.granted()
    seen_cpus, seen_mib = guest.look()
    return seen_cpus == vcpus and memory_mib * 0.85 - 32 < seen_mib <= memory_mib


def test_static_vm_takes_updates_up_to_its_size(ctr: Ctr, name: str, scratch: Path) -> None:
    config = _config(scratch, "sum", default_vcpus=1, default_memory=512)
    cgroup = ("--mount", "type=cgroup,src=cgroup,dst=/sys/fs/cgroup,options=ro")
    guest = _run(ctr, name, config, "--memory-limit", str(300 * MIB), *cgroup)
    size = guest.granted()

    update_task(guest.name, memory={"limit": 200 * MIB}, cpu={"quota": 50_000, "period": 100_000})
    with pytest.raises(RemoteError, match="900 MiB for all containers are more than the 812 MiB") as refused:
        update_task(guest.name, memory={"limit": 900 * MIB})

    assert int(refused.value.code) == FAILED_PRECONDITION
    limits = guest.ctr.inside(name, "sh", "-c", "cd /sys/fs/cgroup; cat memory.max cpu.max")
    assert limits.lines == [str(200 * MIB), "50000 100000"]
    assert guest.granted() == size == (1, 812)
    assert _agrees(guest), (guest.record(), guest.look())


@pytest.mark.parametrize("on_a_disk", [True, False], ids=["root on a disk", "root as persistent memory"])
def test_dynamic_vm_grows_by_hotplug_for_its_container_and_by_update(
    ctr: Ctr, name: str, scratch: Path, on_a_disk: bool
) -> None:
    """Persistent memory lies where DIMMs do, and the image's size is none of a DIMM's."""
    size: dict[str, Any] = {"default_vcpus": 0.5, "default_memory": 256, "default_maxmemory": 1280}
    config = _config(scratch, plugs_vcpus=True, **size, disable_image_nvdimm=on_a_disk)

    guest = _run(ctr, name, config, "--memory-limit", str(200 * MIB))

    assert guest.granted() == (1, 256 + 2 * _BLOCK_MIB)
    eventually(lambda: _agrees(guest), what=lambda: f"{guest.record()} in the guest, not {guest.look()}")
    (cpus, before_mib) = guest.look()
    update_task(guest.name, cpu={"quota": 150_000, "period": 100_000}, memory={"limit": 500 * MIB})
    assert guest.granted() == (2, 256 + 4 * _BLOCK_MIB)
    guest.comes_to(cpus + 1, before_mib + 2 * _BLOCK_MIB)
    update_task(guest.name, memory={"limit": 2048 * MIB})
    record = guest.record()
    assert record["memory_mib"]["granted"] == 1280
    assert record["memory_mib"]["limited_by"] == "default_maxmemory"
    assert any("limited by default_maxmemory" in warning for warning in record["warnings"])
    guest.comes_to(cpus + 1, before_mib + 6 * _BLOCK_MIB)


def test_vm_of_a_pod_follows_its_containers_as_they_come_and_end(ctr: Ctr, name: str, scratch: Path) -> None:
    """One VM: what the first container sees grows for the second and shrinks when that one ends."""
    config = _config(scratch, plugs_vcpus=True, default_vcpus=0.5, default_memory=256, enable_virtio_mem=True)
    _run(ctr, name, config, *_member_of(name, "sandbox"))
    first = _run(ctr, f"{name}-a", config, *_member_of(name, "container"), "--memory-limit", str(100 * MIB))
    pod = Guest(ctr, name)
    cpus, before_mib = first.look()
    assert (cpus, pod.granted()) == (1, (1, 256 + _BLOCK_MIB))

    limits = ("--cpu-period", "100000", "--cpu-quota", "75000", "--memory-limit", str(200 * MIB))
    second = _run(ctr, f"{name}-b", config, *_member_of(name, "container"), *limits)

    # 100 and 200 MiB, rounded up together.
    assert pod.granted() == (2, 256 + 3 * _BLOCK_MIB)
    assert first.look() == second.look() == (2, before_mib + 2 * _BLOCK_MIB)
    ctr("task", "kill", "--signal", "KILL", second.name)
    eventually(lambda: pod.granted()[1] == 256 + _BLOCK_MIB, what=lambda: f"memory given back: {pod.record()}")
    assert first.look()[1] == before_mib
    # Emulated vCPUs are not taken away.
    assert pod.record()["vcpus"]["rounded"] == 1


def _member_of(sandbox: str, kind: str) -> tuple[str, ...]:
    keys = {"container-type": kind, "sandbox-id": sandbox}
    return tuple(word for key, value in keys.items() for word in ("--annotation", f"io.kubernetes.cri.{key}={value}"))


@pytest.mark.timeout(600)
def test_virtio_mem_follows_updates_up_and_down(ctr: Ctr, name: str, scratch: Path) -> None:
    config = _config(scratch, default_memory=256, default_maxmemory=2816, enable_virtio_mem=True)
    guest = _run(ctr, name, config)
    _, boot_mib = guest.look()
    assert guest.granted() == (1, 256)

    update_task(guest.name, memory={"limit": 2560 * MIB})
    assert guest.granted() == (1, 2816)
    assert guest.look()[1] == boot_mib + 2560
    update_task(guest.name, memory={"limit": 256 * MIB})

    # Each of 18 blocks is emptied by the guest, which takes seconds on a busy machine.
    eventually(lambda: guest.granted() == (1, 512), what=lambda: f"given back: {guest.record()}", within_s=400)
    assert guest.look()[1] == boot_mib + 256
