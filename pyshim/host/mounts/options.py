"""Words of fstab as arguments of the mount calls; pure.

The words and their meaning are containerd's (core/mount, parseMountOptions).
"""

import msgspec

from pyshim.host import syscalls as s
from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.model.volumes import Propagation

# word -> (flags, whether the word clears them)
_FLAGS: dict[str, tuple[int, bool]] = {
    "async": (s.MS_SYNCHRONOUS, True),
    "atime": (s.MS_NOATIME, True),
    "bind": (s.MS_BIND, False),
    "defaults": (0, False),
    "dev": (s.MS_NODEV, True),
    "diratime": (s.MS_NODIRATIME, True),
    "dirsync": (s.MS_DIRSYNC, False),
    "exec": (s.MS_NOEXEC, True),
    "mand": (s.MS_MANDLOCK, False),
    "noatime": (s.MS_NOATIME, False),
    "nodev": (s.MS_NODEV, False),
    "nodiratime": (s.MS_NODIRATIME, False),
    "noexec": (s.MS_NOEXEC, False),
    "nomand": (s.MS_MANDLOCK, True),
    "norelatime": (s.MS_RELATIME, True),
    "nostrictatime": (s.MS_STRICTATIME, True),
    "nosuid": (s.MS_NOSUID, False),
    "rbind": (s.MS_BIND | s.MS_REC, False),
    "relatime": (s.MS_RELATIME, False),
    "remount": (s.MS_REMOUNT, False),
    "ro": (s.MS_RDONLY, False),
    "rw": (s.MS_RDONLY, True),
    "strictatime": (s.MS_STRICTATIME, False),
    "suid": (s.MS_NOSUID, True),
    "sync": (s.MS_SYNCHRONOUS, False),
}

_PROPAGATION: dict[str, tuple[int, bool]] = {
    "private": (s.MS_PRIVATE, False),
    "rprivate": (s.MS_PRIVATE, True),
    "shared": (s.MS_SHARED, False),
    "rshared": (s.MS_SHARED, True),
    "slave": (s.MS_SLAVE, False),
    "rslave": (s.MS_SLAVE, True),
    "unbindable": (s.MS_UNBINDABLE, False),
    "runbindable": (s.MS_UNBINDABLE, True),
}


class PropagationChange(msgspec.Struct, frozen=True, kw_only=True):
    flag: int
    """One of MS_PRIVATE, MS_SHARED, MS_SLAVE, MS_UNBINDABLE."""
    recursive: bool


class MountOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one mount, sorted by who handles them; the last word of a contradicting pair has won."""

    flags: int
    data: tuple[str, ...]
    """Words the file system itself reads."""
    propagation: tuple[PropagationChange, ...]
    loop: bool
    read_only_recursive: bool

    @property
    def is_bind(self) -> bool:
        return bool(self.flags & s.MS_BIND)

    @property
    def is_read_only(self) -> bool:
        return bool(self.flags & s.MS_RDONLY)

    @property
    def bind_attributes(self) -> int:
        """The MOUNT_ATTR_ bits that a bind mount gets beside those of its source, all of which it keeps."""
        pairs = (
            (s.MS_RDONLY, s.MOUNT_ATTR_RDONLY),
            (s.MS_NOSUID, s.MOUNT_ATTR_NOSUID),
            (s.MS_NODEV, s.MOUNT_ATTR_NODEV),
            (s.MS_NOEXEC, s.MOUNT_ATTR_NOEXEC),
            (s.MS_NODIRATIME, s.MOUNT_ATTR_NODIRATIME),
        )
        return sum(attribute for flag, attribute in pairs if self.flags & flag)

    @property
    def bind_atime(self) -> int | None:
        """The MOUNT_ATTR__ATIME choice a bind mount asks for, None when it keeps its source's."""
        if self.flags & s.MS_NOATIME:
            return s.MOUNT_ATTR_NOATIME
        return s.MOUNT_ATTR_STRICTATIME if self.flags & s.MS_STRICTATIME else None


def parse_mount_options(words: tuple[str, ...], propagation: Propagation | None, *, target: str) -> MountOptions:
    """`words` sorted; `propagation`, if given, is applied after those of the words.

    Raises Unimplemented for id-mapped mounts and InvalidArgument for words containerd's mount manager should have
    consumed (mounting without them would mount something else).
    """
    flags = 0
    data: list[str] = []
    changes: list[PropagationChange] = []
    loop = read_only_recursive = False
    for word in words:
        if word in _FLAGS:
            bits, clears = _FLAGS[word]
            flags = flags & ~bits if clears else flags | bits
        elif word in _PROPAGATION:
            flag, recursive = _PROPAGATION[word]
            changes.append(PropagationChange(flag=flag, recursive=recursive))
        elif word == "loop":
            loop = True
        elif word == "rro":
            flags |= s.MS_RDONLY
            read_only_recursive = True
        elif word.startswith(("uidmap=", "gidmap=")):
            raise Unimplemented(f"mount {target!r}: id-mapped mounts are not supported (option {word!r})")
        elif word.startswith("X-containerd."):
            raise InvalidArgument(f"mount {target!r}: option {word!r} was not resolved by containerd's mount manager")
        elif word:
            data.append(word)
    if propagation is not None:
        flag, _ = _PROPAGATION[propagation.value]
        changes.append(PropagationChange(flag=flag, recursive=False))
    return MountOptions(
        flags=flags, data=tuple(data), propagation=tuple(changes), loop=loop, read_only_recursive=read_only_recursive
    )


class OverlayData(msgspec.Struct, frozen=True, kw_only=True):
    """Overlay options that fit in a page when the mounting thread's working directory is `directory`."""

    directory: str | None
    data: str


def overlay_data(words: tuple[str, ...], *, limit_bytes: int) -> OverlayData:
    """`words` joined; when that takes more than `limit_bytes`, lower directories are given relative to their parent.

    Nothing else is made relative: upper and work directory come once each, lower directories by the hundred.
    Source: containerd core/mount, compactLowerdirOption.
    """
    joined = ",".join(words)
    if len(joined.encode()) < limit_bytes:
        return OverlayData(directory=None, data=joined)
    index = next((i for i, word in enumerate(words) if word.startswith("lowerdir=")), None)
    if index is None:
        return OverlayData(directory=None, data=joined)
    lowers = _split_escaped(words[index].removeprefix("lowerdir="))
    if not all(lower.startswith("/") for lower in lowers):
        return OverlayData(directory=None, data=joined)
    parent = _common_parent(lowers)
    if parent == "/" or "\\" in parent:
        return OverlayData(directory=None, data=joined)
    relative = ":".join(lower[len(parent) + 1 :] for lower in lowers)
    return OverlayData(directory=parent, data=",".join((*words[:index], f"lowerdir={relative}", *words[index + 1 :])))


def _split_escaped(value: str) -> list[str]:
    """`value` split at colons that no backslash precedes (overlay's own escaping)."""
    parts = [""]
    escaped = False
    for character in value:
        if character == ":" and not escaped:
            parts.append("")
        else:
            parts[-1] += character
        escaped = character == "\\" and not escaped
    return parts


def _common_parent(paths: list[str]) -> str:
    """The deepest directory above every path (never one of the paths)."""
    split = [path.rstrip("/").split("/")[:-1] for path in paths]
    common = []
    for components in zip(*split, strict=False):
        if len(set(components)) > 1:
            break
        common.append(components[0])
    return "/".join(common) or "/"
