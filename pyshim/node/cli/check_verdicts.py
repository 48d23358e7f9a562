"""Verdicts on a host's facts, each with a hint. Pure."""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from fractions import Fraction

from msgspec import Struct

from pyshim.model.architecture import ARCHITECTURES
from pyshim.model.config import Config
from pyshim.model.errors import ShimError
from pyshim.model.host_facts import CgroupMode, lacks_groups
from pyshim.model.units import MIB
from pyshim.node.cli.check_host import HostReport
from pyshim.node.install.containerd_config import rewrite_hint
from pyshim.node.install.runtime import CRIO
from pyshim.node.kubernetes.overhead import class_overhead
from pyshim.node.kubernetes.pod_size import cpu_text, memory_text
from pyshim.node.kubernetes.pod_vm import policy_in_force
from pyshim.pod.plan.sandbox import check_machine
from pyshim.resources.sizing.plan.capacity import host_side_mib
from pyshim.start.dialect import BINARY, RUNTIME

QEMU_AT_LEAST = (7, 2)
"""Debian 12's, the oldest that the tests run."""
CONTAINERD_AT_LEAST = (1, 6)
_NETWORK_MODULES = ("tun", "sch_ingress", "cls_u32", "act_mirred")
_DIRECTORIES = ("overlayfs", "native", "fuse-overlayfs", "overlay", "vfs")
"""Snapshotters of containerd and storage drivers of CRI-O whose root file systems are directories of the host."""
_LAYERS_SINCE = (2, 2)
"""The version of containerd that passes layers of the EROFS snapshotter on to the shim."""
_VERSION = re.compile(r"(\d+)\.(\d+)")


class VerdictLevel(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """Pods run, but slower, or with less than this configuration asks for."""
    MISSING = "missing"
    """No pod of this configuration runs."""


class HostVerdict(Struct, frozen=True, kw_only=True):
    subject: str
    level: VerdictLevel
    text: str
    hint: str = ""
    """The remedy; empty if none is needed."""


def verdicts(host: HostReport, runtime_class: Mapping[str, Fraction] | None = None) -> tuple[HostVerdict, ...]:
    """Every verdict. `runtime_class` is the podFixed of the node's RuntimeClass, if one was given."""
    return (
        *_machine(host),
        *_kernel(host),
        _filter(host),
        *_configuration(host),
        *_confidential(host),
        *_runtime(host),
        *_overhead(host, runtime_class),
    )


_C_VIRTIOFSD = "virtiofsd version"
"""The beginning of what QEMU's C program says of itself; Rust's says `virtiofsd 1.13.0`."""


def _ok(subject: str, text: str) -> HostVerdict:
    return HostVerdict(subject=subject, level=VerdictLevel.OK, text=text)


def _warning(subject: str, text: str, hint: str) -> HostVerdict:
    return HostVerdict(subject=subject, level=VerdictLevel.WARNING, text=text, hint=hint)


def _missing(subject: str, text: str, hint: str) -> HostVerdict:
    return HostVerdict(subject=subject, level=VerdictLevel.MISSING, text=text, hint=hint)


def _machine(host: HostReport) -> Iterator[HostVerdict]:
    facts = host.facts
    nested = ", itself a virtual machine" if facts.nested else ""
    if host.machine in ARCHITECTURES:
        yield _ok("cpu", f"{host.machine}, {facts.cpu_count} CPUs, {facts.memory_mib} MiB{nested}")
    else:
        known = " or ".join(ARCHITECTURES)
        yield _missing("cpu", f"{host.machine}: VMs are made for {known}", f"use a node of {known}")
    if host.config is not None and not host.config.is_remote:
        try:
            check_machine(host.config, facts)
        except ShimError as error:
            yield _missing("machine type", str(error), "use the machine types and the QEMU of this node's processor")
    if not host.is_root:
        yield _warning("user", "not root: devices may look as if they were not usable", "run it as root")
    wanted = host.config.hypervisor.accelerator if host.config and not host.config.is_remote else "auto"
    if host.config is not None and host.config.is_remote:
        yield _ok("kvm", "not needed: VMs are remote")
    elif facts.kvm_usable:
        unused = ', and the configuration says accelerator = "tcg"' if wanted == "tcg" else ""
        yield _ok("kvm", facts.kvm_reason + unused)
    elif wanted == "kvm":
        yield _missing("kvm", facts.kvm_reason, f'{_kvm_hint(host)}, or set accelerator = "auto"')
    else:
        yield _warning("kvm", f"{facts.kvm_reason}: QEMU emulates the CPU, many times slower", _kvm_hint(host))


def _kvm_hint(host: HostReport) -> str:
    if "neither vmx nor svm" not in host.facts.kvm_reason:
        known = ARCHITECTURES.get(host.machine)
        return f"{known.kvm_advice if known else 'load kvm'}, and let root open /dev/kvm"
    if host.facts.nested:
        return "enable nested virtualization where this virtual machine is made"
    return "enable VT-x or AMD-V in the firmware"


def _kernel(host: HostReport) -> Iterator[HostVerdict]:
    if host.config is None or not host.config.is_remote:
        yield _vsock(host)
        yield _vhost_net(host)
    modules = {each.name: each for each in host.modules}
    tun = host.device_errors.get("/dev/net/tun")
    lacking = [name for name in _NETWORK_MODULES if not modules[name].is_there and not (name == "tun" and tun is None)]
    unknown = [name for name in lacking if not modules[name].is_loadable]
    if tun is not None and "tun" in unknown:
        yield _missing("tun", f"'/dev/net/tun': {tun}: pods have no network card", "use a kernel with CONFIG_TUN")
    if others := [name for name in unknown if name != "tun"]:
        yield _warning(
            "modules",
            f"neither loaded nor found: {', '.join(others)}; the tcfilter network model needs them",
            "use a kernel with them, unless they are part of this one",
        )
    elif lacking:
        yield _ok("modules", f"the kernel loads {', '.join(lacking)} when they are needed")
    else:
        yield _ok("modules", "tun and the modules of traffic control are there")
    mode = host.facts.cgroup_mode
    manager = ", systemd manages them" if host.facts.systemd else ""
    if mode is CgroupMode.NONE:
        yield _missing("cgroups", "none is mounted", "mount cgroup v2 at /sys/fs/cgroup")
    elif mode is CgroupMode.V1:
        yield _warning("cgroups", f"version 1{manager}", "boot with systemd.unified_cgroup_hierarchy=1 for version 2")
    else:
        yield _ok("cgroups", f"version 2{manager}")


def _filter(host: HostReport) -> HostVerdict:
    if host.config is not None and not host.config.runtime.confine_shim:
        return _ok("seccomp", "not needed: confine_shim is false")
    if host.has_filter:
        return _ok("seccomp", "libseccomp is there")
    return _warning("seccomp", "no libseccomp.so.2: shims have no filter of system calls", "install libseccomp2")


def _vsock(host: HostReport) -> HostVerdict:
    wanted = host.config.hypervisor.agent_channel if host.config else "auto"
    error = host.device_errors.get("/dev/vhost-vsock", "")
    if wanted == "vhost-user":
        return _ok("vhost-vsock", "not needed: agent_channel is vhost-user")
    if not error:
        return _ok("vhost-vsock", "/dev/vhost-vsock opens")
    text = f"'/dev/vhost-vsock': {error}"
    if wanted == "vhost-vsock":
        return _missing("vhost-vsock", text, f'{_modprobe(host, "vhost_vsock")}, or set agent_channel = "auto"')
    return _warning(
        "vhost-vsock",
        f"{text}: the agent is reached over a serial port, and 'pyshim exec' does not work",
        _modprobe(host, "vhost_vsock"),
    )


def _vhost_net(host: HostReport) -> HostVerdict:
    error = host.device_errors.get("/dev/vhost-net", "")
    if host.config is not None and host.config.hypervisor.disable_vhost_net:
        return _ok("vhost-net", "not needed: disable_vhost_net is true")
    if not error:
        return _ok("vhost-net", "/dev/vhost-net opens")
    return _warning("vhost-net", f"'/dev/vhost-net': {error}: QEMU copies packets itself", _modprobe(host, "vhost_net"))


def _modprobe(host: HostReport, name: str) -> str:
    module = next(each for each in host.modules if each.name == name)
    if module.is_there:
        return "let root open the device"
    return f"modprobe {name}" if module.is_loadable else f"use a kernel that has {name}"


def _configuration(host: HostReport) -> Iterator[HostVerdict]:
    config = host.config
    if config is None:
        yield _missing("configuration", host.config_error, "pyshim config check")
        return
    yield _ok("configuration", config.source)
    if config.is_remote:
        return
    if host.qemu.error or not host.qemu.text:
        yield _missing(
            "qemu",
            f"'{host.qemu.path}': {host.qemu.error or 'it says no version'}",
            "install QEMU: Debian's qemu-system-x86, or qemu-system-arm on arm64",
        )
    elif (version := _version(host.qemu.text)) and version < QEMU_AT_LEAST:
        wanted = ".".join(map(str, QEMU_AT_LEAST))
        yield _missing("qemu", f"{host.qemu.text}: older than {wanted}", f"install QEMU {wanted} or newer")
    else:
        yield _ok("qemu", host.qemu.text)
    if config.hypervisor.shared_fs == "none":
        yield _ok("virtiofsd", 'not needed: shared_fs is "none"')
    elif host.virtiofsd.error:
        yield _missing(
            "virtiofsd",
            f"'{host.virtiofsd.path}': {host.virtiofsd.error}",
            "install virtiofsd (Debian 12: qemu-system-common), and name it in virtio_fs_daemon",
        )
    elif host.virtiofsd.text.startswith(_C_VIRTIOFSD):
        yield _warning(
            "virtiofsd",
            f"{host.virtiofsd.text}: supplementary groups (fsGroup) give no rights on shared files",
            "install Rust's virtiofsd (Debian 13: package virtiofsd), and name it in virtio_fs_daemon",
        )
    elif lacks_groups(host.kernel_release):
        yield _warning(
            "virtiofsd",
            f"Linux {host.kernel_release} in the guest: supplementary groups (fsGroup) give no rights on shared files",
            "a guest with Linux 6.3 or newer, as 'make guest' builds it",
        )
    else:
        yield _ok("virtiofsd", host.virtiofsd.text or host.virtiofsd.path)
    if host.missing_files:
        yield _missing(
            "guest",
            f"not there: {', '.join(host.missing_files)}",
            "make guest, or name a kernel and an image in the configuration",
        )
    elif host.foreign_files:
        text = f"of another processor than {config.hypervisor.machine_type}'s: {', '.join(host.foreign_files)}"
        yield _missing("guest", text, "a guest of this node's processor: make guest")
    else:
        yield _ok("guest", f"kernel '{config.hypervisor.kernel}' and its root are there")


def _confidential(host: HostReport) -> Iterator[HostVerdict]:
    tee = host.facts.tee
    offered = ", ".join(sorted(tee.available))
    asked = host.config is not None and host.config.hypervisor.confidential_guest
    if offered:
        yield _ok("tee", offered)
    elif asked:
        yield _missing("tee", f"none, and confidential_guest is true: {'; '.join(tee.probed)}", "use another node")
    else:
        yield _ok("tee", "none; this configuration asks for none")


def _runtime(host: HostReport) -> Iterator[HostVerdict]:
    found, runtime = host.runtime, host.runtime.runtime
    version = _version(found.version.text)
    is_containerd = runtime.name != CRIO.name
    wanted = f"install {runtime.name}{' 1.6 or newer' if is_containerd else ''}"
    if found.version.error:
        yield _missing(runtime.name, f"'{runtime.program}': {found.version.error}", wanted)
    elif is_containerd and version is not None and version < CONTAINERD_AT_LEAST:
        yield _missing(runtime.name, f"{found.version.text}: older than 1.6", wanted)
    elif found.socket_error:
        yield _warning(runtime.name, f"{found.version.text}; {found.socket_error}", f"systemctl start {runtime.unit}")
    else:
        yield _ok(runtime.name, found.version.text)
    if found.error:
        yield _missing("handler", found.error, "containerd config dump" if is_containerd else "crio config")
    elif lacking := _lacks_handler(host, version) if is_containerd else _lacks_handler_of_crio(host):
        yield lacking
    else:
        for handler in found.handlers:
            options = f", configuration '{handler.config_path}'" if handler.config_path else ""
            yield _ok("handler", f"{handler.name}{options}")
        if is_containerd and version and version[0] == 1 and "runc" not in found.runtimes:
            text = f"'{found.config_path}' names runtimes, but not runc: containerd 1.x does not load its CRI plugin"
            yield _missing("handler", text, f"add the section of runc, as {_shipped_file(version)} has it")
        yield _shim(host)
        yield from _snapshotters(host)


def _lacks_handler_of_crio(host: HostReport) -> HostVerdict | None:
    if host.runtime.handlers:
        return None
    text = f"'{host.runtime.config_path}' and its drop-ins name no runtime of type vm whose program is {BINARY}"
    return _missing("handler", text, "pyshim install; then restart crio")


def _lacks_handler(host: HostReport, version: tuple[int, ...] | None) -> HostVerdict | None:
    found = host.runtime
    major = version[0] if version else 0
    file = _shipped_file(version)
    if found.config_version == 1:
        text = f"'{found.config_path}' has version 1, which has no runtime types"
        return _missing("handler", text, rewrite_hint((major, 0), 1))
    if found.config_version > 2 and major == 1:
        text = f"'{found.config_path}' has version {found.config_version}, and containerd 1.x reads up to 2"
        return _missing("handler", text, f"write it as version 2, with {file}")
    if not found.handlers:
        named = f" (it names {', '.join(found.runtimes)})" if found.runtimes else ""
        text = f"'{found.config_path}' names no runtime of type {RUNTIME}{named}"
        return _missing("handler", text, f"pyshim install, or add {file}; then restart containerd")
    return None


def _shipped_file(version: tuple[int, ...] | None) -> str:
    return f"configs/containerd/containerd-{2 if version and version[0] >= 2 else 1}.x-pykata.toml"


def _shim(host: HostReport) -> HostVerdict:
    path = next((each.runtime_path for each in host.runtime.handlers if each.runtime_path), host.shim_path)
    return (
        _ok("shim", path) if path else _missing("shim", f"{BINARY} is not on the PATH of containerd", "pyshim install")
    )


def _snapshotters(host: HostReport) -> Iterator[HostVerdict]:
    for handler in host.runtime.handlers:
        name = handler.snapshotter or host.runtime.snapshotter
        if problem := _unreachable_root(host, name):
            yield _missing("snapshotter", f"{name}: {problem}", "another snapshotter, or experimental_force_guest_pull")
        else:
            yield _ok("snapshotter", f"{name} (runtime {handler.name})")


def _unreachable_root(host: HostReport, snapshotter: str) -> str:
    """Why a VM of the configuration cannot have a root file system of this snapshotter; empty if it can."""
    config = host.config
    if config is None or config.runtime.experimental_force_guest_pull:
        return ""
    gets_layers = snapshotter == "erofs" and (_version(host.runtime.version.text) or _LAYERS_SINCE) >= _LAYERS_SINCE
    if gets_layers and (config.is_remote or not config.hypervisor.machine.is_pci):
        return "an image's layers are disks, which this VM cannot take while it runs"
    no_share = not config.is_remote and config.hypervisor.shared_fs == "none"
    if no_share and not gets_layers and snapshotter in (*_DIRECTORIES, "erofs"):
        return 'shared_fs is "none", so that a root file system has to be on a disk'
    return ""


def _overhead(host: HostReport, runtime_class: Mapping[str, Fraction] | None) -> Iterator[HostVerdict]:
    config: Config | None = host.config
    if config is None:
        return
    least = class_overhead(config, policy_in_force(config), host_side_mib(config, host.facts))
    wanted = f"cpu: {cpu_text(least.cpus)}, memory: {memory_text(least.memory_mib)}"
    if runtime_class is None:
        yield _ok("overhead", f"the configuration needs podFixed of {wanted}; --runtimeclass FILE compares it")
        return
    cpus, memory_mib = runtime_class.get("cpu", Fraction(0)), runtime_class.get("memory", Fraction(0)) / MIB
    stated = f"RuntimeClass has cpu: {cpu_text(cpus)}, memory: {memory_text(memory_mib)}"
    if cpus < least.cpus or memory_mib < least.memory_mib:
        yield _warning(
            "overhead", f"{stated}: less than VMs of the configuration take", f"set podFixed to {wanted}, or more"
        )
    elif memory_mib > 2 * least.memory_mib or cpus > 2 * max(least.cpus, Fraction(1, 4)):
        yield _warning(
            "overhead", f"{stated}: more than twice what VMs take, so that few pods fit a node", f"podFixed of {wanted}"
        )
    else:
        yield _ok("overhead", f"{stated}; the configuration needs {wanted}")


def _version(text: str) -> tuple[int, ...] | None:
    match = _VERSION.search(text)
    return (int(match[1]), int(match[2])) if match else None
