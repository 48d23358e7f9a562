"""SELinux and AppArmor labels of the host's programs that serve a guest. Pure."""

import re

import msgspec

from pyshim.model.errors import InvalidArgument

_SELINUX = re.compile(r"(?P<user>[\w.-]+):(?P<role>[\w.-]+):(?P<type>[\w.-]+)(?P<level>:[\w.:,-]+)?", re.ASCII)
_TYPE = re.compile(r"[\w.-]+", re.ASCII)
_MAX_CHARS = 4096


class ProcessLabels(msgspec.Struct, frozen=True):
    """The labels that a program gets when it is executed; an empty one is not set."""

    selinux: str = ""
    """`user:role:type:level`; ignored on a host without SELinux."""
    apparmor: str = ""
    """The name of a profile that the host has loaded."""


NO_LABELS = ProcessLabels()


def vmm_selinux_label(text: str, vmm_type: str) -> str:
    """`text`, a spec's `process.selinuxLabel`, with `vmm_type` in place of its type; empty if `text` is empty.

    The level is kept: its pair of categories separates the pod from other pods. Raises InvalidArgument.
    """
    if not text:
        return ""
    found = _SELINUX.fullmatch(text)
    if found is None or len(text) > _MAX_CHARS:
        raise InvalidArgument(f"read spec: process.selinuxLabel {text[:200]!r} is not user:role:type:level")
    if not _TYPE.fullmatch(vmm_type):
        raise InvalidArgument(f"read configuration: selinux_vmm_type {vmm_type[:200]!r} is not an SELinux type")
    return f"{found['user']}:{found['role']}:{vmm_type}{found['level'] or ''}"
