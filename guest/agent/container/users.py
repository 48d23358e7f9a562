"""Names of users and groups, looked up in the container's own /etc/passwd and /etc/group."""

from __future__ import annotations

import os

from protos.agent.agent_pb2 import StringUser
from protos.agent.oci_pb2 import User

from guest.agent.errors import InvalidArgument
from guest.agent.files import opened
from guest.agent.syscalls import open_beneath

_MAX_FILE_BYTES = 4 << 20


def apply_string_user(user: User, wanted: StringUser, rootfs: str) -> None:
    """`user` (UID, GID, AdditionalGids) has the ids of the names or numbers in `wanted`; empty names change nothing.

    Without a group, a user found in passwd gets its primary group. Symlinks in the root file system cannot lead out of
    it.
    """
    if not (wanted.uid or wanted.gid or wanted.additionalGids):
        return
    with opened(rootfs, os.O_PATH | os.O_DIRECTORY) as root:
        passwd, group = _table(root, "etc/passwd"), _table(root, "etc/group")
    found = User()
    found.CopyFrom(user)
    if wanted.uid:
        entry = _find(passwd, wanted.uid)
        if entry is None and not wanted.uid.isdigit():
            raise InvalidArgument(f"user {wanted.uid!r}: not in the container's /etc/passwd")
        found.UID = _id(entry[2] if entry else wanted.uid, "user")
        if entry and len(entry) > 3 and not wanted.gid:
            found.GID = _id(entry[3], "group")
    if wanted.gid:
        found.GID = _group_id(group, wanted.gid)
    found.AdditionalGids.extend(_group_id(group, name) for name in wanted.additionalGids)
    user.CopyFrom(found)


def _table(root: int, name: str) -> list[list[str]]:
    try:
        fd = open_beneath(root, name, os.O_RDONLY)
    except OSError:
        return []  # an image without the file has numbers only
    with os.fdopen(fd, "rb") as file:
        text = file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    return [fields for fields in (line.split(":") for line in text.splitlines()) if len(fields) > 2]


def _find(table: list[list[str]], name: str) -> list[str] | None:
    """The entry of that name, else the one of that number."""
    return next((fields for column in (0, 2) for fields in table if fields[column] == name), None)


def _group_id(table: list[list[str]], name: str) -> int:
    entry = _find(table, name)
    if entry is None and not name.isdigit():
        raise InvalidArgument(f"group {name!r}: not in the container's /etc/group")
    return _id(entry[2] if entry else name, "group")


def _id(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 32):
        raise InvalidArgument(f"{what} id {text!r}: not a number below 2^32")
    return int(text)
