"""The guest kernel's command line, in Kata's order: platform, root, console, verbosity, agent, then the operator's own.

Source: the parameters Kata's Go runtime passes on x86; a parameter of the operator replaces ours of the same name.
"""

from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument
from pyshim.model.kernel_line import split_params
from pyshim.plan.sizing import is_resizable
from pyshim.plan.verity import root_device

SERIAL_AGENT_PORT = "org.pykata.agent.0"

X86_PARAMS = (
    "tsc=reliable",
    "no_timer_check",
    "rcupdate.rcu_expedited=1",
    "i8042.direct=1",
    "i8042.dumbkbd=1",
    "i8042.nopnp=1",
    "i8042.noaux=1",
    "noreplace-smp",
    "reboot=k",
    "cryptomgr.notests",
    "net.ifnames=0",
    "pci=lastbus=0",
)
_LEFT_OUT = "initcall_blacklist=ftrace_check_for_weak_functions,init_acpi_pm_clocksource"
"""What the kernel does while it starts and can do without.

- ftrace_check_for_weak_functions: it looks up, by name, every function that can be traced, and takes out those that
  another of their name has replaced. Left in, they are listed by a name that says so. Source: kernel/trace/ftrace.c.
- init_acpi_pm_clocksource: it checks the ACPI timer as a clock, ten times, and waits 4.5 ms between, on any CPU. Guests
  take the time from the time stamp counter or from KVM's clock, with the HPET to fall back to. Source:
  drivers/clocksource/acpi_pm.c. What measures other timers against this one reads it by itself.
"""
_SAME_ADDRESSES = "agent.crun_fixed_addresses=true"
"""Else QEMU translates crun's code, and its libraries', anew at each start, for they lie elsewhere. A word of our own
agent: kata-agent passes over what it does not know."""
_SYSTEMD_PARAMS = (
    "systemd.unit=kata-containers.target",
    "systemd.mask=systemd-networkd.service",
    "systemd.mask=systemd-networkd.socket",
)
_ONLINE_AT_ONCE = "memhp_default_state=online"
"""Added memory is used as soon as the guest's kernel finds it, which can be after the agent was asked to put it online;
and virtio-mem stops at 1 GiB that nobody has put online.
Source: the kernel's admin-guide/mm/memory-hotplug.rst and drivers/virtio/virtio_mem.c (offline_threshold)."""
_MOVABLE = "memory_hotplug.online_policy=auto-movable"
"""Most added memory is kept for pages that can move: only their memory can be given back. Source: as above."""
_FASTEST_KHZ = 5_000_000
FOR_SPEED = (_LEFT_OUT,)
"""What Kata does not pass and a kernel boots as well without, only later."""
_ROOT_FLAGS = {"ext4": "data=ordered,errors=remount-ro", "xfs": "", "erofs": "", "squashfs": ""}


def kernel_params(
    config: Config, *, max_vcpus: int, root_on_pmem: bool, serial_agent: bool, emulated: bool, tsc_khz: int = 0
) -> tuple[str, ...]:
    """The parameters of one guest, final and in order. Raises InvalidArgument for an unknown root file system type.

    `tsc_khz` is the rate of the host's time stamp counter, if that is known.
    """
    hypervisor = config.hypervisor
    params = [*X86_PARAMS, *(_emulated_clock(tsc_khz, hypervisor.kernel_hz) if emulated else ())]
    if not hypervisor.confidential_guest:  # its command line is measured: who computed it in advance has it unchanged
        params.append(_LEFT_OUT)
    if hypervisor.image and hypervisor.kernel_verity_params:
        params += verity_params(hypervisor.kernel_verity_params, hypervisor.rootfs_type, on_pmem=root_on_pmem)
    elif hypervisor.image:
        params += _root_params(hypervisor.rootfs_type, root_on_pmem)
    params += _consoles("debug" if hypervisor.enable_debug else "quiet", measured=hypervisor.confidential_guest)
    if hypervisor.image:
        params += [f"systemd.show_status={'true' if hypervisor.enable_debug else 'false'}", *_SYSTEMD_PARAMS]
    params.append("panic=1")
    if not hypervisor.confidential_guest:  # measured with the rest, and nobody could say in advance what it will be
        params.append(f"nr_cpus={max_vcpus}")
    params.append("selinux=0")
    if hypervisor.enable_iommu:
        params += ["intel_iommu=on", "iommu=pt"]
    if is_resizable(config):
        params.append(_ONLINE_AT_ONCE)
        params += [_MOVABLE] if hypervisor.enable_virtio_mem else []
    if hypervisor.block_device_driver == "virtio-scsi":
        params.append("scsi_mod.scan=none")
    if serial_agent:
        params.append(f"agent.server_addr=serial:///dev/virtio-ports/{SERIAL_AGENT_PORT}")
    if emulated:
        params.append(_SAME_ADDRESSES)
    if config.agent.enable_debug:
        params.append("agent.log=debug")
    if config.agent.visible_cdi_devices:
        params.append("agent.visible_cdi_devices=true")
    if config.agent.debug_console_enabled:
        params += ["agent.debug_console", "agent.debug_console_vport=1026"]
    own = split_params(hypervisor.kernel_params)
    replaced = {_name(param) for param in own}
    return tuple(param for param in params if _name(param) not in replaced) + own


def _emulated_clock(tsc_khz: int, kernel_hz: int) -> tuple[str, ...]:
    """How fast an emulated CPU counts, so that the kernel need not find out on a host that may be crowded; 0: unknown.

    - tsc_early_khz: else measured in some milliseconds against a timer that QEMU emulates, and wrong when QEMU does not
      run meanwhile; believed for ever with tsc=reliable. What the kernel measures later it takes only when it differs
      by less than one percent. Source: its arch/x86/kernel/tsc.c.
    - lpj: ticks of the counter in one of the timer, by which short delays are made. Every CPU but the first else finds
      it out as it comes online, spinning from one tick of the first CPU to the next while that one spins too: seconds,
      and many on a crowded host. None will do for every kernel: one for fewer ticks a second makes the delays of others
      too long, and beyond 17 GHz far too short, as 32 bits are all they have. Source: init/calibrate.c and
      arch/x86/lib/delay.c.
    """
    lpj = (tsc_khz or _FASTEST_KHZ) * 1000 // kernel_hz if kernel_hz else 0
    return (*((f"lpj={lpj}",) if lpj else ()), *((f"tsc_early_khz={tsc_khz}",) if tsc_khz else ()))


def _consoles(verbosity: str, *, measured: bool) -> tuple[str, ...]:
    """Until the virtio console's driver is there, a panic is only heard on the serial port every VM has.

    The port opens at its parameter and gets at once all that was logged so far, a character at a time, unless `quiet`
    came before: QEMU writes and the shim reads 1600 times. A measured command line keeps its order.
    """
    early = ("earlyprintk=ttyS0,115200", "console=hvc0")
    return (*early, verbosity) if measured else (verbosity, *early)


def _root_params(fs_type: str, on_pmem: bool) -> tuple[str, ...]:
    device = "/dev/pmem0p1" if on_pmem else "/dev/vda1"
    return _root(device, fs_type, dax=on_pmem)


def verity_params(text: str, fs_type: str, *, on_pmem: bool) -> tuple[str, ...]:
    """A root every block of which is checked against `text`, Kata's kernel_verity_params. No dax: it has no blocks."""
    data, hashes = ("/dev/pmem0p1", "/dev/pmem0p2") if on_pmem else ("/dev/vda1", "/dev/vda2")
    return (root_device(text, data=data, hashes=hashes), *_root("/dev/dm-0", fs_type, dax=False))


def _root(device: str, fs_type: str, *, dax: bool) -> tuple[str, ...]:
    if fs_type not in _ROOT_FLAGS:
        known = ", ".join(sorted(_ROOT_FLAGS))
        raise InvalidArgument(f"read rootfs_type {fs_type!r}: not one of {known}")
    flags = ",".join(part for part in ("dax" if dax else "", _ROOT_FLAGS[fs_type]) if part)
    return (f"root={device}", f"rootfstype={fs_type}", *((f"rootflags={flags}",) if flags else ()), "ro")


def _name(param: str) -> str:
    return param.partition("=")[0]
