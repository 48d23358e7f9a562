"""Probes the host. Nothing is changed."""

import fcntl
import os
from collections.abc import Callable

from pyshim.host.fds import OwnedFd, open_error
from pyshim.host.os_errors import describe_os_error
from pyshim.model.architecture import ARCHITECTURES
from pyshim.model.host_facts import CgroupMode, HostFacts, known_cpus
from pyshim.resources.cgroups.host.hierarchies import read
from pyshim.resources.confidential.host import QUOTE_SOCKET, probe_tee

_KVM_CREATE_VM = 0xAE01
_KHZ_PER_BOGOMIPS = 500
"""The kernel counts two instructions for each loop. With a constant rate of the time stamp counter, one tick is one
loop. Source: arch/x86/kernel/tsc.c (lpj_fine), arch/x86/kernel/cpu/proc.c.
"""
_PLAUSIBLE_KHZ = range(100_000, 10_000_001)


def create_kvm_vm(kvm_fd: int) -> int:
    """The fd of a new, empty VM. Source: the kernel's Documentation/virt/kvm/api.rst, 4.2."""
    return fcntl.ioctl(kvm_fd, _KVM_CREATE_VM, 0)


def probe_host(
    *,
    proc_root: str = "/proc",
    sys_root: str = "/sys",
    dev_root: str = "/dev",
    run_root: str = "/run",
    create_vm: Callable[[int], int] = create_kvm_vm,
    architecture: str = os.uname().machine,
) -> HostFacts:
    """The facts on which plans are based. A file that cannot be read means "no" and raises nothing."""
    cpuinfo = read(f"{proc_root}/cpuinfo")
    flags = frozenset(_field(cpuinfo, "flags").split())
    known = ARCHITECTURES.get(architecture)
    wanted = known.virtualisation_flags if known else frozenset()
    kvm_usable, kvm_reason = _probe_kvm(flags, wanted, f"{dev_root}/kvm", create_vm)
    return HostFacts(
        cpu_count=_cpu_count(proc_root, sys_root),
        memory_mib=_memory_mib(proc_root),
        kvm_usable=kvm_usable,
        kvm_reason=kvm_reason,
        vhost_vsock=open_error(f"{dev_root}/vhost-vsock") is None,
        vhost_net=open_error(f"{dev_root}/vhost-net") is None,
        nested="hypervisor" in flags,
        cgroup_mode=_cgroup_mode(sys_root),
        # systemd's own test. Source: sd_booted(3).
        systemd=os.path.isdir(f"{run_root}/systemd/system"),
        tee=probe_tee(
            sys_root=sys_root, dev_root=dev_root, quote_socket=f"{run_root}{QUOTE_SOCKET.removeprefix('/run')}"
        ),
        tsc_khz=_tsc_khz(cpuinfo, flags),
        hostname=read(f"{proc_root}/sys/kernel/hostname").strip(),
        architecture=architecture,
    )


def _probe_kvm(
    flags: frozenset[str], wanted: frozenset[str], device: str, create_vm: Callable[[int], int]
) -> tuple[bool, str]:
    """True if KVM is usable, and the reason.

    The CPU's flags decide first, where it has some: a paravirtual kvm module offers a device on which stock kernels
    hang.
    """
    if wanted and not flags & wanted:
        return False, f"the CPU shows neither {' nor '.join(sorted(wanted, reverse=True))}"
    try:
        with OwnedFd(os.open(device, os.O_RDWR | os.O_CLOEXEC)) as kvm:
            try:
                OwnedFd(create_vm(kvm.fileno())).close()
            except OSError as error:
                return False, f"create a VM on {device!r}: {describe_os_error(error)}"
    except OSError as error:
        return False, f"open {device!r}: {describe_os_error(error)}"
    flag = " and ".join(sorted(flags & wanted))
    return True, f"the CPU shows {flag} and {device!r} makes VMs" if flag else f"{device!r} makes VMs"


def _field(text: str, name: str) -> str:
    """The value of the first `name: value` line."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _tsc_khz(cpuinfo: str, flags: frozenset[str]) -> int:
    """The rate of the time stamp counter, to 5 kHz; 0 if the host does not show it.

    In /proc and /sys only `bogomips` shows it: `cpu MHz` is the CPU's present rate.
    """
    if "constant_tsc" not in flags:
        return 0
    try:
        khz = round(float(_field(cpuinfo, "bogomips")) * _KHZ_PER_BOGOMIPS)
    except (ValueError, OverflowError):
        return 0
    return khz if khz in _PLAUSIBLE_KHZ else 0


def _cpu_count(proc_root: str, sys_root: str) -> int:
    """CPUs that are online and that pods may have; at least 1.

    The affinity of this process says nothing of pods: the container runtime may have been given few CPUs (CPUAffinity
    of its unit). The cpuset at the top of the mounted cgroups does, on a node that is itself a container.
    """
    online = known_cpus(read(f"{sys_root}/devices/system/cpu/online"))
    tops = ("cpuset.cpus.effective", "cpuset/cpuset.effective_cpus", "cpuset/cpuset.cpus")
    given = next(filter(None, (known_cpus(read(f"{sys_root}/fs/cgroup/{name}")) for name in tops)), frozenset())
    allowed = given or online or known_cpus(_field(read(f"{proc_root}/self/status"), "Cpus_allowed_list"))
    usable = online & allowed if online else allowed
    return max(1, len(usable))


def _memory_mib(proc_root: str) -> int:
    words = _field(read(f"{proc_root}/meminfo"), "MemTotal").split()
    return int(words[0]) // 1024 if words and words[0].isdecimal() else 0


def _cgroup_mode(sys_root: str) -> CgroupMode:
    """V2 only when the root is the unified tree; a hybrid host keeps its controllers in v1."""
    root = f"{sys_root}/fs/cgroup"
    if os.path.exists(f"{root}/cgroup.controllers"):
        return CgroupMode.V2
    try:
        trees = sorted(os.listdir(root))
    except OSError:
        return CgroupMode.NONE
    return CgroupMode.V1 if any(os.path.exists(f"{root}/{tree}/cgroup.procs") for tree in trees) else CgroupMode.NONE
