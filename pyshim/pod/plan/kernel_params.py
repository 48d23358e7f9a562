"""The guest kernel's command line, in Kata's order: platform, root, console, verbosity, agent, then the operator's.

Source: the parameters of Kata's Go runtime. A parameter of the operator replaces ours of the same name. Pure.
"""

import math
from collections.abc import Mapping

from pyshim.model.config import AGENT_CDH_API_TIMEOUT_S, AGENT_LAUNCH_PROCESS_TIMEOUT_S, Config
from pyshim.model.vm import split_params
from pyshim.pod.plan.verity import read_verity, root_device
from pyshim.resources.sizing.plan.static import is_resizable

SERIAL_AGENT_PORT = "org.pykata.agent.0"

_SYSTEMD_PARAMS = (
    "systemd.unit=kata-containers.target",
    "systemd.mask=systemd-networkd.service",
    "systemd.mask=systemd-networkd.socket",
)
_ONLINE_AT_ONCE = "memhp_default_state=online"
"""The kernel puts added memory online when it finds it, which can be after the agent has tried to. And virtio-mem adds
no more while 1 GiB is not online.
Source: the kernel's admin-guide/mm/memory-hotplug.rst and drivers/virtio/virtio_mem.c (offline_threshold)."""
_MOVABLE = "memory_hotplug.online_policy=auto-movable"
"""Most added memory is for movable pages, the only memory that can be removed again. Source: as above."""
_FASTEST_KHZ = 5_000_000
_ROOT_FLAGS: Mapping[str, str] = {"ext4": "data=ordered,errors=remount-ro", "xfs": "", "erofs": "", "squashfs": ""}


def kernel_params(
    config: Config, *, max_vcpus: int, root_on_pmem: bool, serial_agent: bool, emulated: bool, tsc_khz: int = 0
) -> tuple[str, ...]:
    """All parameters, in order. Raises InvalidArgument for wrong verity parameters.

    `tsc_khz` is the rate of the host's time stamp counter, 0 if it is unknown.
    """
    hypervisor = config.hypervisor
    architecture = hypervisor.machine.architecture
    params = [*architecture.kernel_params]
    if emulated and architecture.measures_clock:
        params += _emulated_clock(tsc_khz, hypervisor.kernel_hz)
    if hypervisor.image and hypervisor.kernel_verity_params:
        params += _verity_root(hypervisor.kernel_verity_params, hypervisor.rootfs_type, on_pmem=root_on_pmem)
    elif hypervisor.image:
        params += _root(
            "/dev/pmem0p1" if root_on_pmem else "/dev/vda1",
            hypervisor.rootfs_type,
            dax=root_on_pmem and architecture.maps_pmem,
        )
    # A panic before the driver of the virtio console is loaded appears on the serial port only.
    params += [architecture.early_console, "console=hvc0", "debug" if hypervisor.enable_debug else "quiet"]
    if hypervisor.image:
        params += [f"systemd.show_status={'true' if hypervisor.enable_debug else 'false'}", *_SYSTEMD_PARAMS]
    params.append("panic=1")
    if not hypervisor.confidential_guest:  # the command line is measured, and this number is not known in advance
        params.append(f"nr_cpus={max_vcpus}")
    params.append("selinux=0")
    if hypervisor.enable_iommu:
        params += architecture.iommu_params
    if is_resizable(config):
        params.append(_ONLINE_AT_ONCE)
        params += [_MOVABLE] if hypervisor.enable_virtio_mem else []
    if hypervisor.block_device_driver == "virtio-scsi":
        params.append("scsi_mod.scan=none")
    if serial_agent:
        params.append(f"agent.server_addr=serial:///dev/virtio-ports/{SERIAL_AGENT_PORT}")
    params.append(f"agent.hotplug_timeout={config.agent.hotplug_timeout_s}")
    if config.agent.enable_debug:
        params.append("agent.log=debug")
    if config.agent.enable_tracing:
        params.append("agent.trace=true")
    if config.agent.visible_cdi_devices:
        params.append("agent.visible_cdi_devices=true")
    if config.agent.debug_console_enabled:
        params += ["agent.debug_console", "agent.debug_console_vport=1026"]
    for name, seconds, default_s in (
        ("cdh_api_timeout", config.agent.cdh_api_timeout_s, AGENT_CDH_API_TIMEOUT_S),
        ("launch_process_timeout", config.agent.launch_process_timeout_s, AGENT_LAUNCH_PROCESS_TIMEOUT_S),
    ):
        if seconds != default_s:
            params.append(f"agent.{name}={math.ceil(seconds)}")
    for image in hypervisor.guest_extension_images:
        params.append(_extension(image))
    own = split_params(hypervisor.kernel_params)
    replaced = {_name(param) for param in own}
    return tuple(param for param in params if _name(param) not in replaced) + own


def _emulated_clock(tsc_khz: int, kernel_hz: int) -> tuple[str, ...]:
    """The rate of an emulated CPU's time stamp counter, which is the host's; `tsc_khz` is 0 if it is unknown.

    - tsc_early_khz: without it the kernel measures the rate for some milliseconds against a timer that QEMU emulates.
      The result is wrong when the host does not run QEMU meanwhile, and stays because of tsc=reliable: a later result
      counts only when it differs by less than one percent. Source: the kernel's arch/x86/kernel/tsc.c.
    - lpj: ticks of the counter per tick of the timer, for short delays. Without it every CPU but the first measures it
      when it comes online, while both spin: this takes seconds, and many on a crowded host. The value depends on the
      kernel's timer rate; one for a lower rate makes delays too long. Above 17 GHz it does not fit lpj's 32 bits, and
      delays are far too short. Source: init/calibrate.c and arch/x86/lib/delay.c.
    """
    lpj = (tsc_khz or _FASTEST_KHZ) * 1000 // kernel_hz if kernel_hz else 0
    return (*((f"lpj={lpj}",) if lpj else ()), *((f"tsc_early_khz={tsc_khz}",) if tsc_khz else ()))


def _extension(image: Mapping[str, str]) -> str:
    """The parameter by which the guest mounts the extension; it has no value without verity.

    Source: Kata's Rust runtime.
    """
    name = f"kata.extension.{image['name']}.verity_params"
    verity = image.get("verity_params", "").strip()
    if verity:
        read_verity(verity, f"read verity_params in guest_extension_images of '{image['name']}'")
    return f"{name}={verity}" if verity else name


def _verity_root(text: str, fs_type: str, *, on_pmem: bool) -> tuple[str, ...]:
    """A root whose blocks are checked against `text`, Kata's kernel_verity_params. Without dax: it has no blocks."""
    data, hashes = ("/dev/pmem0p1", "/dev/pmem0p2") if on_pmem else ("/dev/vda1", "/dev/vda2")
    verity = read_verity(text, "read kernel_verity_params")
    return (root_device(verity, data=data, hashes=hashes), *_root("/dev/dm-0", fs_type, dax=False))


def _root(device: str, fs_type: str, *, dax: bool) -> tuple[str, ...]:
    flags = ",".join(part for part in ("dax" if dax else "", _ROOT_FLAGS[fs_type]) if part)
    return (f"root={device}", f"rootfstype={fs_type}", *((f"rootflags={flags}",) if flags else ()), "ro")


def _name(param: str) -> str:
    return param.partition("=")[0]
