"""Plugs and unplugs disks that a program of the host serves (vhost-user).

While QEMU adds such a disk, it waits for the program without a limit, and serves neither guest nor monitor. So the shim
makes the connection and QEMU gets a copy: when the program does not answer, the shim shuts the connection down, which
ends QEMU's wait. With `reconnect_s` QEMU has to connect by itself, and only the program can end the wait.
"""

import socket
from contextlib import suppress

from hypervisors.qemu import block
from hypervisors.qemu.bridges import Bridges
from hypervisors.qemu.options import chardev_id, qdev_id
from hypervisors.qemu.qmp import Monitor, QmpCommandFailed, QmpTimeout
from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import DeadlineExceeded, ShimError, Unavailable
from pyshim.model.vm import BlockDevice, GuestLocation

ANSWER_TIMEOUT_S = 10.0
"""Seconds for the program to answer QEMU; the whole VM stands still meanwhile. After 25 s of that a guest took longer
than UNPLUG_TIMEOUT_S to release the disk."""


class VhostUserDisks:
    def __init__(self, monitor: Monitor, bridges: Bridges) -> None:
        self._qmp = monitor
        self._bridges = bridges
        self._unanswered: set[str] = set()
        """Disks whose plug timed out; QEMU may have completed it since, or may yet."""

    async def plug(self, disk: BlockDevice) -> GuestLocation:
        """Raises Unavailable when the program cannot be reached, DeadlineExceeded when it does not answer.

        Also raises Unavailable while QEMU still has the disk of an earlier attempt that timed out.
        """
        if disk.id in self._unanswered:
            await self._remove_unanswered(disk)
        connection = (
            None if disk.vhost_user is None or disk.vhost_user.reconnect_s else connect_program(disk.id, disk.path)
        )
        try:
            await self._add_chardev(disk, connection)
            return await self._add_device(disk, connection)
        finally:
            # QEMU has its own copy. As long as this one is open, the program does not see QEMU's end.
            if connection is not None:
                connection.close()

    async def unplug(self, disk: BlockDevice) -> None:
        """The guest has released the disk and QEMU has closed the connection to the program."""
        await self._qmp.device_remove(qdev_id(disk.id))
        await self._qmp.chardev_remove(chardev_id(disk.id))

    async def _add_chardev(self, disk: BlockDevice, connection: socket.socket | None) -> None:
        fd_name = chardev_id(disk.id) if connection is not None else ""
        chardev = block.vhost_user_chardev(disk, self._qmp.version, fd_name=fd_name)
        if connection is not None:
            await self._qmp.getfd(fd_name, connection.fileno())
        try:
            await self._qmp.chardev_add(chardev)
        except QmpCommandFailed as error:
            if connection is not None:
                with suppress(ShimError):
                    await self._qmp.closefd(fd_name)
            raise Unavailable(f"plug {disk.id!r}: connect to {disk.path!r}: {error}") from error

    async def _add_device(self, disk: BlockDevice, connection: socket.socket | None) -> GuestLocation:
        try:
            fields = block.vhost_user_blk(disk)
            return await self._bridges.plug("vhost-user-blk-pci", disk.id, fields, ANSWER_TIMEOUT_S)
        except QmpTimeout as error:
            self._unanswered.add(disk.id)
            if connection is not None:
                with suppress(OSError):  # the program may have closed it
                    connection.shutdown(socket.SHUT_RDWR)
                with suppress(ShimError):
                    await self._remove(disk)
            raise DeadlineExceeded(
                f"plug {disk.id!r}: the program at {disk.path!r} does not answer: {error}"
            ) from error
        except ShimError:
            with suppress(ShimError):
                await self._qmp.chardev_remove(chardev_id(disk.id))
            raise

    async def _remove_unanswered(self, disk: BlockDevice) -> None:
        try:
            await self._remove(disk)
        except ShimError as error:
            raise Unavailable(
                f"plug {disk.id!r}: qemu still has it from an attempt that the program at {disk.path!r} did not "
                f"answer: {error} (hint: with vhost_user_reconnect_timeout_sec qemu waits until that program ends)"
            ) from error

    async def _remove(self, disk: BlockDevice) -> None:
        """QEMU has no part of the disk, even if its plug succeeded after the timeout; its slot is free."""
        await self.unplug(disk)
        self._bridges.free(disk.id)
        self._unanswered.discard(disk.id)


def connect_program(device_id: str, path: str) -> socket.socket:
    """A connection to the program that listens at `path`, for QEMU. Raises Unavailable."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # Non-blocking, so that a program with a full listen queue counts as unreachable.
        connection.connect(path)
        connection.setblocking(True)  # also for QEMU: the mode belongs to the open file
    except OSError as error:
        connection.close()
        raise Unavailable(f"plug {device_id!r}: connect to {path!r}: {describe_os_error(error)}") from error
    return connection
