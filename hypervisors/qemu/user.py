"""The two users of a sandbox's programs. A guest that controls one of the programs reaches no other sandbox.

QEMU runs as the first user, the vsock program as the next one: as the same user one program could trace the other and
make the system calls that its own seccomp filter denies. The group of the VM's directory records the first. The
directory is made before QEMU and removed after it, by the shim or from its ledger, so a user is free exactly when no VM
has it.
"""

import fcntl
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress

from hypervisors.qemu.view import may_have_vfio
from pyshim.host.fds import OwnedFd
from pyshim.host.mounts.view import enter_view
from pyshim.host.processes.launch import User, become
from pyshim.host.processes.own_thread import in_own_thread
from pyshim.model.errors import ResourceExhausted
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import VmConfig

COUNT = 65536
"""Users in the range, two for each sandbox: far more than a node needs. The search starts at a hash of the sandbox's
id, so that a pod rarely gets the users of one that has just ended."""
KVM = "/dev/kvm"


def root_reason(config: VmConfig) -> str:
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


def missing_users_reason(config: VmConfig, *, proc: str = "/proc/self") -> str:
    """The reason why the shim cannot use the range of users, for the log; empty if it can.

    A user namespace has only some ids. Source: user_namespaces(7), "User and group ID mappings".
    """
    last = config.first_user_id + COUNT - 1
    for name in ("uid_map", "gid_map"):
        with open(f"{proc}/{name}") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
        if not any(first <= config.first_user_id and last < first + count for first, _, count in ranges):
            return f"the shim's user namespace lacks ids {config.first_user_id} to {last}"
    return ""


async def reserve_user(config: VmConfig) -> User:
    """Reserves this user and the next for the VM, whose directory must exist: its group becomes the user's.

    Both are free again when the directory is removed. Raises ResourceExhausted, OSError.
    """
    return await in_own_thread(_reserve, config)


def _reserve(config: VmConfig) -> User:
    parent = os.path.dirname(config.vm_dir)
    with OwnedFd(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent_fd:
        fcntl.flock(parent_fd.fileno(), fcntl.LOCK_EX)
        taken = set(_groups_below(parent_fd.fileno()))
        start = zlib.crc32(config.sandbox_id.encode())
        pairs = COUNT // 2
        tried = (config.first_user_id + 2 * ((start + step) % pairs) for step in range(pairs))
        # Older shims took one user for a sandbox, so the next one may be taken alone.
        user_id = next((number for number in tried if taken.isdisjoint((number, number + 1))), None)
        if user_id is None:
            raise ResourceExhausted(f"choose user of vm {config.sandbox_id!r}: all {COUNT} are taken")
        os.chown(config.vm_dir, -1, user_id)
    return User(id=user_id, group_ids=_groups(config))


def _groups_below(directory_fd: int) -> Iterator[int]:
    """The groups of the directory's entries, without those removed meanwhile."""
    for name in os.listdir(directory_fd):
        with suppress(FileNotFoundError):
            yield os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_gid


def _groups(config: VmConfig) -> tuple[int, ...]:
    """The group of /dev/kvm, which QEMU opens by name, if it gives access."""
    if config.cpu.accelerator is not Accelerator.KVM:
        return ()
    found = os.stat(KVM)
    return (found.st_gid,) if found.st_gid and found.st_mode & 0o060 == 0o060 else ()


def vsock_user(reserved: User) -> User:
    """The user of the vsock program of a VM whose QEMU runs as `reserved`."""
    return User(id=reserved.id + 1)


def grant_files(config: VmConfig, user: User) -> None:
    """QEMU can use the shim's files in the VM's directory, but cannot create or remove files there."""
    os.chmod(config.vm_dir, 0o710)
    for path, mode in ((config.share.socket_path if config.share else "", 0o660), (config.initdata, 0o640)):
        if path:
            os.chown(path, -1, user.id)
            os.chmod(path, mode)


async def first_unusable(config: VmConfig, user: User, view: OwnedFd | None) -> str:
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


async def first_denied(wanted: Mapping[str, int], user: User, view: OwnedFd | None) -> str:
    """The first path of `wanted` (path -> mode of access(2)) that `user` cannot access in `view`; empty for none."""
    return await in_own_thread(_first_denied, wanted, user, view)


def _first_denied(wanted: Mapping[str, int], user: User, view: OwnedFd | None) -> str:
    if view is not None:
        enter_view(view)
    become(user)
    return next((path for path, mode in wanted.items() if not os.access(path, mode)), "")
