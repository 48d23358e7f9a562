"""A volume's group, as Kubernetes' fsGroup asks for it."""

from __future__ import annotations

import os
import stat

from protos.agent.agent_pb2 import FSGroup
from protos.agent.types_pb2 import FSGroupChangePolicy

_READ_WRITE, _READ_ONLY, _EXECUTE, _SETGID = 0o660, 0o440, 0o110, 0o2000


def set_group(root: str, fs_group: FSGroup, *, read_only: bool) -> None:
    """Everything below `root` belongs to the group, which can use it. New files inherit the group.

    With the policy OnRootMismatch nothing is done if the root is right already. Symlinks get the group and no mode.
    """
    group = fs_group.group_id
    wanted = (_READ_ONLY if read_only else _READ_WRITE) | _EXECUTE | _SETGID
    found = os.stat(root)
    if (
        fs_group.group_change_policy == FSGroupChangePolicy.OnRootMismatch
        and found.st_gid == group
        and found.st_mode & wanted == wanted
    ):
        return
    for folder, _folders, _files, fd in os.fwalk(root, topdown=False):
        with os.scandir(folder) as entries:
            for entry in entries:
                _change(entry.name, group, read_only, fd)
    _change(root, group, read_only, None)


def _change(name: str, group: int, read_only: bool, folder: int | None) -> None:
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    os.chown(name, -1, group, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(mode):
        return
    added = _READ_ONLY if read_only else _READ_WRITE
    if stat.S_ISDIR(mode):
        added |= _EXECUTE | _SETGID
    os.chmod(name, stat.S_IMODE(mode) | added, dir_fd=folder)
