"""The isolation of QEMU and of the vsock program: mount namespace, user, capabilities and network namespace.

A guest that breaks out into one of these programs finds no files of other sandboxes, of containerd, of the kubelet or
of the host's configuration, and reaches no other sandbox's programs. Where a view or a user cannot be used, the program
runs without it, and the log has the reason.

QEMU runs as the first of the sandbox's two users, the vsock program as the next one: as the same user one program could
trace the other and make the system calls that its own seccomp filter denies. The group of the VM's directory records
the first. The directory is made before QEMU and removed after it, by the shim or from its ledger, so a user is free
exactly when no VM has it.
"""

import asyncio
import fcntl
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress

from pyshim.host.fds import OwnedFd
from pyshim.host.mounts.view import CODE, DEVICES, View, ViewPath, home_of, make_view
from pyshim.host.os_errors import describe_os_error
from pyshim.host.processes.identity import is_script
from pyshim.host.processes.launch import Isolation, User, become
from pyshim.host.syscalls import CAP_DAC_OVERRIDE, CAP_IPC_LOCK
from pyshim.host.threads import ended, in_own_thread
from pyshim.model.confidential import TdxGuard, UnixQuotes
from pyshim.model.errors import ResourceExhausted
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import LocalVm, VfioDevice, VhostUserVsockChannel

log = logging.getLogger(__name__)

ROOT_CAPABILITIES = frozenset({CAP_DAC_OVERRIDE, CAP_IPC_LOCK})
"""The capabilities of a QEMU that runs as root; another user has none. Kernels and images may be of any owner; VFIO
locks all of the guest's memory. Disks, taps, vhost-net, vhost-vsock and QMP come as descriptors."""


async def reserved_user(config: LocalVm) -> User | None:
    """The user reserved for the VM; None if none is configured, or if the shim's user namespace lacks the users."""
    return await reserve_user(config) if config.first_user_id and not missing_users_reason(config) else None


async def isolated_qemu(config: LocalVm, reserved: User | None, fds: ExitStack) -> Isolation:
    """QEMU's isolation, valid until `fds` are closed. `reserved` is the VM's user."""
    view = await _view("qemu", _qemu_paths(config), config, fds)
    user = await _qemu_user(config, reserved, view)
    return _isolation(config, view, user, ROOT_CAPABILITIES if user is None else frozenset())


async def isolated_vsock_program(
    channel: VhostUserVsockChannel, config: LocalVm, reserved: User | None, fds: ExitStack
) -> Isolation:
    """The vsock program's isolation, valid until `fds` are closed. Its directory exists and belongs to its user."""
    sees_host = config.is_privileged or is_script(channel.program)
    view = await _view("vsock program", () if sees_host else vsock_view(channel), config, fds)
    user = None
    directory = os.path.dirname(channel.device_path)
    # Only in the view: on the host the user cannot enter the VM's directory.
    if view is not None and reserved is not None and directory != config.vm_dir:
        user = vsock_user(reserved)
        os.chown(directory, user.id, user.id)
        if path := await first_denied({channel.program: os.X_OK}, user, view):
            reason = f"{path!r} cannot be executed by other users"
            log.warning("vsock program runs as root", extra={"sandbox": config.sandbox_id, "reason": reason})
            os.chown(directory, 0, 0)
            user = None
    return _isolation(config, view, user, frozenset())


def _qemu_paths(config: LocalVm) -> tuple[ViewPath, ...]:
    """The files that QEMU sees; empty for the host's."""
    program = config.hypervisor_path
    if reason := host_view_reason(config, is_script=is_script(program)):
        log.info("qemu sees the host's files", extra={"sandbox": config.sandbox_id, "reason": reason})
        return ()
    return vmm_view(config, program=os.path.realpath(program))


async def _view(who: str, paths: tuple[ViewPath, ...], config: LocalVm, fds: ExitStack) -> View | None:
    """The mount namespace with `paths`; None without paths, and where it cannot be made.

    Some user namespaces do not allow it, or a file is missing.
    """
    if not paths:
        return None
    made: list[View] = []

    def make() -> None:
        made.append(make_view(paths, config.vm_dir))

    try:
        await ended(asyncio.ensure_future(in_own_thread(make)))
    except OSError as error:
        reason = describe_os_error(error) + (f" {error.filename!r}" if error.filename else "")
        log.warning(f"{who} sees the host's files", extra={"sandbox": config.sandbox_id, "reason": reason})
        return None
    finally:
        for view in made:
            fds.enter_context(view)
    return made[0]


async def _qemu_user(config: LocalVm, reserved: User | None, view: View | None) -> User | None:
    """The user that QEMU runs as; None for root."""
    if not config.first_user_id:
        return None
    reason = root_reason(config) or missing_users_reason(config)
    if not reason and reserved is not None:
        grant_files(config, reserved)
        path = await first_unusable(config, reserved, view)
        if not path:
            return reserved
        reason = f"{path!r} cannot be opened by other users"
    log.warning("qemu runs as root", extra={"sandbox": config.sandbox_id, "reason": reason})
    return None


def _isolation(config: LocalVm, view: View | None, user: User | None, capabilities: frozenset[int]) -> Isolation:
    return Isolation(
        netns_path=config.netns_path,
        empty_netns=config.has_empty_netns,
        view=view,
        capabilities=None if config.is_privileged else capabilities,
        user=user,
        labels=config.labels,
    )


def host_view_reason(config: LocalVm, *, is_script: bool) -> str:
    """The reason why QEMU has to see all files of the host, for the log; empty if it need not."""
    if config.is_privileged:
        return "privileged_vmm is set"
    if config.opens_sockets:
        return "connecting again to vhost-user programs (vhost_user_reconnect_timeout_sec) needs their sockets"
    if is_script:
        return f"{config.hypervisor_path!r} is a script, which may need any file"
    return ""


def vmm_view(config: LocalVm, *, program: str) -> tuple[ViewPath, ...]:
    """The files that QEMU sees. `program` is the configured path of QEMU with its links resolved.

    Disks, taps, vhost-net, vhost-vsock, QMP and consoles are inherited open; memory is anonymous.
    """
    paths = [*CODE, ViewPath(path=home_of(program), why="QEMU's own libraries, firmware and data")]
    paths.append(ViewPath(path=config.hypervisor_path, why="QEMU"))
    paths.append(ViewPath(path="/sys", why="CPUs, memory nodes, limits of disks", is_recursive=False, may_lack=True))
    if config.guard is not None or may_have_vfio(config):
        # The nodes that VFIO and the guards open depend on the device, and may appear while QEMU runs. The cgroup's
        # device list decides which nodes QEMU may open.
        paths.append(ViewPath(path="/dev", why="VFIO, or the host's encryption", is_recursive=False))
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


def may_have_vfio(config: LocalVm) -> bool:
    """The VM boots with a VFIO device, or one can be plugged."""
    return config.pci.hot_plug is not None or any(isinstance(each.device, VfioDevice) for each in config.pci.placed)


USER_COUNT = 65536
"""Users in the range, two for each sandbox: far more than a node needs. The search starts at a hash of the sandbox's
id, so that a pod rarely gets the users of one that has just ended."""
KVM = "/dev/kvm"


def root_reason(config: LocalVm) -> str:
    """The reason why QEMU has to run as root, for the log; empty if it need not."""
    if config.is_privileged:
        return "privileged_vmm is set"
    if config.guard is not None:
        return "a confidential guest needs the host's encryption devices"
    if may_have_vfio(config):
        return "VFIO devices, or a port for them (hot_plug_vfio), need /dev/vfio"
    if config.opens_sockets:
        return "connecting again to vhost-user programs (vhost_user_reconnect_timeout_sec) needs their sockets"
    return ""


def missing_users_reason(config: LocalVm, *, proc: str = "/proc/self") -> str:
    """The reason why the shim cannot use the range of users, for the log; empty if it can.

    A user namespace has only some ids. Source: user_namespaces(7), "User and group ID mappings".
    """
    last = config.first_user_id + USER_COUNT - 1
    for name in ("uid_map", "gid_map"):
        with open(f"{proc}/{name}") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
        if not any(first <= config.first_user_id and last < first + count for first, _, count in ranges):
            return f"the shim's user namespace lacks ids {config.first_user_id} to {last}"
    return ""


async def reserve_user(config: LocalVm) -> User:
    """Reserves this user and the next for the VM, whose directory must exist: its group becomes the user's.

    Both are free again when the directory is removed. Raises ResourceExhausted, OSError.
    """
    return await in_own_thread(_reserve, config)


def _reserve(config: LocalVm) -> User:
    parent = os.path.dirname(config.vm_dir)
    with OwnedFd(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent_fd:
        fcntl.flock(parent_fd.fileno(), fcntl.LOCK_EX)
        taken = set(_groups_below(parent_fd.fileno()))
        start = zlib.crc32(config.sandbox_id.encode())
        pairs = USER_COUNT // 2
        tried = (config.first_user_id + 2 * ((start + step) % pairs) for step in range(pairs))
        # Older shims took one user for a sandbox, so the next one may be taken alone.
        user_id = next((number for number in tried if taken.isdisjoint((number, number + 1))), None)
        if user_id is None:
            raise ResourceExhausted(f"choose user of vm {config.sandbox_id!r}: all {USER_COUNT} are taken")
        os.chown(config.vm_dir, -1, user_id)
    return User(id=user_id, group_ids=_groups(config))


def _groups_below(directory_fd: int) -> Iterator[int]:
    """The groups of the directory's entries, without those removed meanwhile."""
    for name in os.listdir(directory_fd):
        with suppress(FileNotFoundError):
            yield os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_gid


def _groups(config: LocalVm) -> tuple[int, ...]:
    """The group of /dev/kvm, which QEMU opens by name, if it gives access."""
    if config.cpu.accelerator is not Accelerator.KVM:
        return ()
    found = os.stat(KVM)
    return (found.st_gid,) if found.st_gid and found.st_mode & 0o060 == 0o060 else ()


def vsock_user(reserved: User) -> User:
    """The user of the vsock program of a VM whose QEMU runs as `reserved`."""
    return User(id=reserved.id + 1)


def grant_files(config: LocalVm, user: User) -> None:
    """QEMU can use the shim's files in the VM's directory, but cannot create or remove files there."""
    os.chmod(config.vm_dir, 0o710)
    for path, mode in ((config.share.socket_path if config.share else "", 0o660), (config.initdata, 0o640)):
        if path:
            os.chown(path, -1, user.id)
            os.chmod(path, mode)


async def first_unusable(config: LocalVm, user: User, view: View | None) -> str:
    """The first file of the configuration that `user` cannot open in the mount namespace `view`; empty for none."""
    boot = config.boot
    wanted = {config.hypervisor_path: os.X_OK}
    for path in (boot.kernel, boot.initrd, boot.image, boot.firmware, config.initdata, config.entropy_source):
        if path:
            wanted[path] = os.R_OK
    wanted |= {disk.path: os.R_OK for disk in config.extensions}
    wanted |= {device.socket_path: os.R_OK | os.W_OK for device in config.vhost_user_nics}
    if config.share is not None:
        wanted[config.share.socket_path] = os.R_OK | os.W_OK
    if config.cpu.accelerator is Accelerator.KVM:
        wanted[KVM] = os.R_OK | os.W_OK
    return await first_denied(wanted, user, view)


async def first_denied(wanted: Mapping[str, int], user: User, view: View | None) -> str:
    """The first path of `wanted` (path -> mode of access(2)) that `user` cannot access in `view`; empty for none."""
    return await in_own_thread(_first_denied, wanted, user, view)


def _first_denied(wanted: Mapping[str, int], user: User, view: View | None) -> str:
    if view is not None:
        view.enter()
    become(user)
    return next((path for path, mode in wanted.items() if not os.access(path, mode)), "")
