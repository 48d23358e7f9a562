"""The host's files that QEMU and the vsock program see, each with its reason. Pure.

A guest that breaks out into one of them finds these files, as they are for every user, and no others: none of other
sandboxes, of containerd, of the kubelet, of the host's configuration.
"""

import os

from pyshim.host.mounts.view import CODE, DEVICES, ViewPath, home_of
from pyshim.model.confidential import TdxGuard, UnixQuotes
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import VfioDevice, VhostUserVsockChannel, VmConfig


def host_view_reason(config: VmConfig, *, is_script: bool) -> str:
    """Why QEMU has to see the host's files as they are, in words for a person; empty where it need not."""
    if config.is_privileged:
        return "privileged_vmm is set"
    if config.opens_sockets:
        return "connecting again to vhost-user programs (vhost_user_reconnect_timeout_sec) needs their sockets"
    if is_script:
        return f"{config.hypervisor_path!r} is a script, which may need any file"
    return ""


def vmm_view(config: VmConfig, *, program: str) -> tuple[ViewPath, ...]:
    """`program` is where links from the configured path of QEMU lead to.

    Disks, taps, vhost-net, vhost-vsock, QMP and consoles are handed over open, memory has no name.
    """
    paths = [*CODE, ViewPath(path=home_of(program), why="QEMU's own libraries, firmware and data")]
    paths.append(ViewPath(path=config.hypervisor_path, why="QEMU"))
    paths.append(ViewPath(path="/sys", why="CPUs, memory nodes, limits of disks", is_recursive=False, may_lack=True))
    if config.guard is not None or _passes_devices(config):
        # Which of them VFIO and the guards open depends on the device, and they come while it runs. The list of the
        # cgroup says which it may open.
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


def _passes_devices(config: VmConfig) -> bool:
    return config.pci.hot_plug is not None or any(isinstance(each.device, VfioDevice) for each in config.pci.placed)
