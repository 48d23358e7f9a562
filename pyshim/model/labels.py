"""Labels of the host's security modules for the programs that serve a guest: SELinux, AppArmor. Pure."""

import re

import msgspec

from pyshim.model.errors import InvalidArgument

_SELINUX = re.compile(r"(?P<user>[\w.-]+):(?P<role>[\w.-]+):(?P<type>[\w.-]+)(?P<level>:[\w.:,-]+)?", re.ASCII)
_TYPE = re.compile(r"[\w.-]+", re.ASCII)
_MAX_CHARS = 4096


class ProcessLabels(msgspec.Struct, frozen=True):
    """Each empty for none; the kernel gives it to the program when that is executed."""

    selinux: str = ""
    """`user:role:type:level`; left out where the host has no SELinux."""
    apparmor: str = ""
    """The name of a profile that the host has loaded."""


NO_LABELS = ProcessLabels()


def vmm_selinux_label(text: str, vmm_type: str) -> str:
    """The label of a spec's `process.selinuxLabel` with the VMM's type in place of the container's.

    The level stays: its pair of categories is the pod's own, and other pods' programs and files have others. Empty for
    an empty one. Raises InvalidArgument.
    """
    if not text:
        return ""
    found = _SELINUX.fullmatch(text)
    if found is None or len(text) > _MAX_CHARS:
        raise InvalidArgument(f"read spec: process.selinuxLabel {text[:200]!r} is not user:role:type:level")
    if not _TYPE.fullmatch(vmm_type):
        raise InvalidArgument(f"read configuration: selinux_vmm_type {vmm_type[:200]!r} is not an SELinux type")
    return f"{found['user']}:{found['role']}:{vmm_type}{found['level'] or ''}"
