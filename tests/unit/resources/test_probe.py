"""Host facts from made-up /proc, /sys, /dev and /run."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.confidential import NO_TEE
from pyshim.model.host_facts import CgroupMode, HostFacts
from pyshim.resources.probe import probe_host
from tests.fakes.open_files import same_open_files

INTEL = "processor\t: 0\nflags\t\t: fpu vmx sse4_1\n\nprocessor\t: 1\nflags\t\t: fpu\n"


class Roots:
    """Four empty roots; a test writes what its host shows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("proc", "sys", "dev", "run"):
            (path / name).mkdir()

    def write(self, name: str, text: str = "") -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def probe(self, create_vm: Callable[[int], int] | None = None, architecture: str = "x86_64") -> HostFacts:
        options: dict[str, Any] = {f"{name}_root": str(self.path / name) for name in ("proc", "sys", "dev", "run")}
        if create_vm is not None:
            options["create_vm"] = create_vm
        return probe_host(**options, architecture=architecture)


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots(tmp_path)


def make_vm(_kvm_fd: int) -> int:
    return os.open("/dev/null", os.O_RDONLY)


def busy(_kvm_fd: int) -> int:
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def test_a_host_that_shows_nothing_has_one_cpu_and_no_abilities(roots: Roots) -> None:
    facts = roots.probe()

    assert replace(facts, tee=NO_TEE) == HostFacts(
        cpu_count=1,
        memory_mib=0,
        kvm_usable=False,
        kvm_reason="the CPU shows neither vmx nor svm",
        vhost_vsock=False,
        vhost_net=False,
        nested=False,
        cgroup_mode=CgroupMode.NONE,
        systemd=False,
    )


def test_on_arm64_the_device_alone_decides(roots: Roots) -> None:
    """/proc/cpuinfo shows no virtualisation there."""
    roots.write("proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd\n")

    without = roots.probe(make_vm, architecture="aarch64")
    roots.write("dev/kvm")
    facts = roots.probe(make_vm, architecture="aarch64")

    assert not without.kvm_usable
    assert "ENOENT" in without.kvm_reason
    assert (facts.kvm_usable, facts.tsc_khz, facts.architecture) == (True, 0, "aarch64")
    assert facts.kvm_reason.endswith("dev/kvm' makes VMs")


def test_kvm_needs_flag_device_and_a_vm(roots: Roots) -> None:
    roots.write("proc/cpuinfo", INTEL)
    roots.write("dev/kvm")

    with same_open_files():
        facts = roots.probe(make_vm)

    assert facts.kvm_usable
    assert facts.kvm_reason == f"the CPU shows vmx and '{roots.path}/dev/kvm' makes VMs"


def test_a_device_without_the_cpu_flag_is_not_even_opened(roots: Roots) -> None:
    roots.write("proc/cpuinfo", "flags : fpu hypervisor\n")
    roots.write("dev/kvm")

    def forbidden(_fd: int) -> int:
        raise AssertionError("asked the device")

    facts = roots.probe(forbidden)

    assert (facts.kvm_usable, facts.kvm_reason) == (False, "the CPU shows neither vmx nor svm")
    assert facts.nested


@pytest.mark.parametrize(
    ("device", "create_vm", "reason"),
    [
        pytest.param(False, make_vm, "open '{}': ENOENT (no such file or directory)", id="no-device"),
        pytest.param(True, busy, "create a VM on '{}': EBUSY (device or resource busy)", id="other-hypervisor"),
        pytest.param(True, None, "create a VM on '{}': ENOTTY (inappropriate ioctl for device)", id="not-kvm"),
    ],
)
def test_why_kvm_is_not_usable(roots: Roots, device: bool, create_vm: Any, reason: str) -> None:
    roots.write("proc/cpuinfo", INTEL)
    if device:
        roots.write("dev/kvm")

    facts = roots.probe(create_vm)

    assert (facts.kvm_usable, facts.kvm_reason) == (False, reason.format(roots.path / "dev/kvm"))


@pytest.mark.parametrize(
    ("online", "cpuset", "allowed", "count"),
    [
        pytest.param("0-7\n", "0-7", "0-7", 8, id="all"),
        pytest.param("0-2,5\n", "0-127", "0-127", 4, id="online-limits"),
        pytest.param("0-7\n", "0-7", "0", 8, id="a-confined-containerd-confines-no-vms"),
        pytest.param("0-7\n", "", "0", 8, id="no-cpuset"),
        pytest.param("0-7\n", "1,3", "0-7", 2, id="node-in-a-container"),
        pytest.param("0-3\n", "2-5", "0-7", 2, id="a-cpu-went-offline"),
        pytest.param("", "0-3", "0", 4, id="no-sysfs"),
        pytest.param("", "", "0-3", 4, id="affinity-at-last"),
        pytest.param("garbage", "x-y,1", "x", 1, id="malformed"),
    ],
)
@pytest.mark.parametrize("file", ["cpuset.cpus.effective", "cpuset/cpuset.effective_cpus", "cpuset/cpuset.cpus"])
def test_cpus_are_those_online_that_pods_may_have(
    roots: Roots, online: str, cpuset: str, allowed: str, count: int, file: str
) -> None:
    roots.write("sys/devices/system/cpu/online", online)
    roots.write(f"sys/fs/cgroup/{file}", cpuset)
    roots.write("proc/self/status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n")

    assert roots.probe().cpu_count == count


def test_memory_is_whole_mebibytes(roots: Roots) -> None:
    roots.write("proc/meminfo", "MemTotal:        2049999 kB\nMemFree: 1 kB\n")

    assert roots.probe().memory_mib == 2001


@pytest.mark.parametrize(
    ("files", "mode"),
    [
        pytest.param(["cgroup.controllers", "cgroup.procs"], CgroupMode.V2, id="unified"),
        pytest.param(
            ["memory/cgroup.procs", "unified/cgroup.procs", "unified/cgroup.controllers"], CgroupMode.V1, id="hybrid"
        ),
        pytest.param(["memory/cgroup.procs"], CgroupMode.V1, id="legacy"),
        pytest.param([], CgroupMode.NONE, id="none"),
    ],
)
def test_the_mode_of_cgroups_is_known_by_their_files(roots: Roots, files: list[str], mode: CgroupMode) -> None:
    for file in files:
        roots.write(f"sys/fs/cgroup/{file}")

    assert roots.probe().cgroup_mode is mode


def test_devices_and_systemd_are_seen(roots: Roots) -> None:
    roots.write("dev/vhost-vsock")
    roots.write("dev/vhost-net")
    (roots.path / "run/systemd/system").mkdir(parents=True)

    facts = roots.probe()

    assert (facts.vhost_vsock, facts.vhost_net, facts.systemd) == (True, True, True)


@pytest.mark.parametrize(
    ("cpuinfo", "khz"),
    [
        pytest.param("flags : fpu constant_tsc\nbogomips : 4600.00\n\nbogomips : 1.00\n", 2_300_000, id="usual"),
        pytest.param("flags : fpu constant_tsc\nbogomips : 5987.83\n", 2_993_915, id="fractions"),
        pytest.param("flags : fpu\nbogomips : 4600.00\n", 0, id="rate-varies"),
        pytest.param("flags : constant_tsc\n", 0, id="not-said"),
        pytest.param("flags : constant_tsc\nbogomips : many\n", 0, id="malformed"),
        pytest.param("flags : constant_tsc\nbogomips : inf\n", 0, id="infinite"),
        pytest.param("flags : constant_tsc\nbogomips : 0.02\n", 0, id="implausible"),
    ],
)
def test_the_rate_of_the_time_stamp_counter_is_what_the_kernel_says_of_a_constant_one(
    roots: Roots, cpuinfo: str, khz: int
) -> None:
    roots.write("proc/cpuinfo", cpuinfo)

    assert roots.probe().tsc_khz == khz


def test_this_host_answers_without_an_error() -> None:
    facts = probe_host()

    assert facts.cpu_count == len(os.sched_getaffinity(0))
    assert facts.memory_mib > 0
    assert facts.kvm_reason
