"""The host's files that QEMU and the vsock program see, each with its reason. Pure.

A guest that breaks out into one of these programs finds no files of other sandboxes, of containerd, of the kubelet or
of the host's configuration.
"""

import os

from pyshim.host.mounts.view import CODE, DEVICES, ViewPath, home_of
from pyshim.model.confidential import TdxGuard, UnixQuotes
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import VfioDevice, VhostUserVsockChannel, VmConfig


def host_view_reason(config: VmConfig, *, is_script: bool) -> str:
    """The reason why QEMU has to see all files of the host, for the log; empty if it need not."""
    if config.is_privileged:
        return "privileged_vmm is set"
    if config.opens_sockets:
        return "connecting again to vhost-user programs (vhost_user_reconnect_timeout_sec) needs their sockets"
    if is_script:
        return f"{config.hypervisor_path!r} is a script, which may need any file"
    return ""


def vmm_view(config: VmConfig, *, program: str) -> tuple[ViewPath, ...]:
    """The files that QEMU sees. `program` is the configured path of QEMU with its links resolved.

    Disks, taps, vhost-net, vhost-vsock, QMP and consoles are inherited open; memory is anonymous.
    """
    paths = [*CODE, ViewPath(path=home_of(program), why="QEMU's own libraries, firmware and data")]
    paths.append(ViewPath(path=config.hypervisor_path, why="QEMU"))
    paths.append(ViewPath(path="/sys", why="CPUs, memory nodes, limits of disks", is_recursive=False, may_lack=True))
    if config.guard is not None or may_have_vfio(config):
        # The nodes that VFIO and the guards open depend on the device, and may appear while QEMU runs. The cgroup's
        # device list decides which nodes QEMU may open.
        paths.append(ViewPath(path="/dev", why="VFIO, or the host's encryption", is_recursive=False, is_writable=True))
    else:
        paths += DEVICES
        if config.cpu.accelerator is Accelerator.KVM:
            paths.append(ViewPath(path="/dev/kvm", why="the accelerator"))
    boot = config.boot
    files: dict[str | None, str] = {
        boot.kernel: "the kernel",
        boot.initrd: "the initrd",
        boot.image: "the root image",
        boot.firmware: "the firmware",
        config.initdata: "initdata",
        config.entropy_source: "the entropy source",
        **{disk.path: f"extension {disk.name!r}" for disk in config.extensions},
        **{nic.socket_path: f"vhost-user interface {nic.id!r}" for nic in config.vhost_user_nics},
    }
    if config.share is not None:
        files[config.share.socket_path] = "virtiofsd's socket"
    paths += (ViewPath(path=path, why=why) for path, why in files.items() if path)
    if isinstance(config.guard, TdxGuard) and isinstance(config.guard.quotes, UnixQuotes):
        paths.append(ViewPath(path=os.path.dirname(config.guard.quotes.path), why="the quoting service", may_lack=True))
    return tuple(paths)


def vsock_view(channel: VhostUserVsockChannel) -> tuple[ViewPath, ...]:
    directory = os.path.dirname(channel.device_path)
    return (
        *CODE,
        *DEVICES,
        ViewPath(path=channel.program, why="the program"),
        ViewPath(path=directory, why="its sockets", is_writable=True),
    )


def may_have_vfio(config: VmConfig) -> bool:
    """The VM boots with a VFIO device, or one can be plugged."""
    return config.pci.hot_plug is not None or any(isinstance(each.device, VfioDevice) for each in config.pci.placed)
