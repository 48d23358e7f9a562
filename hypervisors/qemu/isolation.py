"""The isolation of QEMU and of the vsock program: mount namespace, user, capabilities and network namespace.

`view.py` lists the files of the mount namespaces, `user.py` chooses the users. Where one of them cannot be used, the
program runs without it, and the log has the reason.
"""

import asyncio
import logging
import os
from contextlib import ExitStack

from hypervisors.qemu.user import (
    first_denied,
    first_unusable,
    grant_files,
    missing_users_reason,
    reserve_user,
    root_reason,
    vsock_user,
)
from hypervisors.qemu.view import host_view_reason, vmm_view, vsock_view
from pyshim.concurrency.threads import ended
from pyshim.host.fds import OwnedFd
from pyshim.host.mounts.view import ViewPath, make_view
from pyshim.host.os_errors import describe_os_error
from pyshim.host.processes.identity import is_script
from pyshim.host.processes.launch import Isolation, User
from pyshim.host.processes.own_thread import in_own_thread
from pyshim.host.syscalls import CAP_DAC_OVERRIDE, CAP_IPC_LOCK
from pyshim.model.vm import VhostUserVsockChannel, VmConfig

log = logging.getLogger(__name__)

ROOT_CAPABILITIES = frozenset({CAP_DAC_OVERRIDE, CAP_IPC_LOCK})
"""The capabilities of a QEMU that runs as root; another user has none. Kernels and images may be of any owner; VFIO
locks all of the guest's memory. Disks, taps, vhost-net, vhost-vsock and QMP come as descriptors."""


async def reserved_user(config: VmConfig) -> User | None:
    """The user reserved for the VM; None if none is configured, or if the shim's user namespace lacks the users."""
    return await reserve_user(config) if config.first_user_id and not missing_users_reason(config) else None


async def isolated_qemu(config: VmConfig, reserved: User | None, fds: ExitStack) -> Isolation:
    """QEMU's isolation, valid until `fds` are closed. `reserved` is the VM's user."""
    view = await _view("qemu", _qemu_paths(config), config, fds)
    user = await _qemu_user(config, reserved, view)
    return _isolation(config, view, user, ROOT_CAPABILITIES if user is None else frozenset())


async def isolated_vsock_program(
    channel: VhostUserVsockChannel, config: VmConfig, reserved: User | None, fds: ExitStack
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


def _qemu_paths(config: VmConfig) -> tuple[ViewPath, ...]:
    """The files that QEMU sees; empty for the host's."""
    program = config.hypervisor_path
    if reason := host_view_reason(config, is_script=is_script(program)):
        log.info("qemu sees the host's files", extra={"sandbox": config.sandbox_id, "reason": reason})
        return ()
    return vmm_view(config, program=os.path.realpath(program))


async def _view(who: str, paths: tuple[ViewPath, ...], config: VmConfig, fds: ExitStack) -> OwnedFd | None:
    """The mount namespace with `paths`; None without paths, and where it cannot be made.

    Some user namespaces do not allow it, or a file is missing.
    """
    if not paths:
        return None
    made: list[OwnedFd] = []

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


async def _qemu_user(config: VmConfig, reserved: User | None, view: OwnedFd | None) -> User | None:
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


def _isolation(config: VmConfig, view: OwnedFd | None, user: User | None, capabilities: frozenset[int]) -> Isolation:
    return Isolation(
        netns_path=config.netns_path,
        empty_netns=config.has_empty_netns,
        view=view,
        capabilities=None if config.is_privileged else capabilities,
        user=user,
        labels=config.labels,
    )
