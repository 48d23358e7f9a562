"""virtiofsd's mount namespace: the programs' files, the share, and mounts that the host does not see. Blocking.

A volume with file systems mounted below it is mounted here when it is to get none of the host's later mounts. In the
host's namespace such a copy would outlive an unmount by the host, whose directory then could not be removed (EBUSY). In
another namespace it cannot hold a directory: rmdir(2) detaches it. The namespace ends with the shim and virtiofsd.
"""

import logging
import os
from collections.abc import Callable

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.host.mounts.mounting import bind_copy, explained, make_target
from pyshim.host.mounts.table import unmount_all
from pyshim.host.mounts.view import CODE, DEVICES, ViewPath, enter_view, home_of, make_view
from pyshim.host.os_errors import describe_os_error
from pyshim.host.processes.identity import is_script
from pyshim.host.threads import in_short_thread
from pyshim.model.volumes import HostMount, VirtiofsdPlan

log = logging.getLogger(__name__)


class ShareNamespace:
    """Owns the namespace's descriptor until `close`."""

    def __init__(self, namespace: OwnedFd, exported_dir: str) -> None:
        self.namespace = namespace
        self._exported_dir = exported_dir
        self._places: dict[str, str] = {}
        """Mount points in the namespace, by the targets that the plan names."""

    def mount(self, mount: HostMount) -> None:
        """The bind is in place for virtiofsd alone; the host has its mount point. Raises ShimError naming it."""
        assert mount.beneath is not None
        place = f"{self._exported_dir}{mount.target.removeprefix(mount.beneath)}"

        def attach() -> None:
            with OwnedFd(os.open(place, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as target:
                syscalls.move_mount(copy.fileno(), target.fileno())

        try:
            make_target(mount)
            with bind_copy(mount) as copy:
                self._inside(attach)
        except OSError as error:
            raise explained(mount, error) from error
        self._places[mount.target] = place

    def unmount(self, target: str) -> None:
        """A mount that `mount` made is gone, for the guest as well. Idempotent; raises OSError."""
        place = self._places.get(target)
        if place is not None and self.namespace.is_open:
            self._inside(lambda: unmount_all(place))
        self._places.pop(target, None)

    def close(self) -> None:
        """Idempotent."""
        self.namespace.close()

    def _inside(self, work: Callable[[], None]) -> None:
        """`work` in a thread that enters the namespace and ends."""

        def run() -> None:
            enter_view(self.namespace)
            work()

        in_short_thread(run)


def share_namespace(plan: VirtiofsdPlan) -> ShareNamespace | None:
    """The namespace for one virtiofsd, entered by the calling thread; None for a script or if the host refuses."""
    program = os.path.realpath(plan.binary)
    if is_script(program):
        log.info("virtiofsd sees the host's files", extra={"reason": f"{plan.binary!r} is a script"})
        return None
    kept = (
        *CODE,
        *DEVICES,
        ViewPath(path=home_of(program), why="virtiofsd's own libraries"),
        ViewPath(path=plan.binary, why="virtiofsd"),
        ViewPath(path=plan.shared_dir, why="the share", is_writable=True, is_shared=True),
    )
    try:
        return ShareNamespace(make_view(kept, os.path.dirname(plan.listen_path)), plan.shared_dir)
    except OSError as error:
        log.warning("virtiofsd sees the host's files", extra={"reason": describe_os_error(error)})
        return None
