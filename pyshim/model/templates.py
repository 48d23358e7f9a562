"""A template: a machine that has booted once, saved, from which VMs of new pods continue."""

import msgspec


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts, besides its configuration, that determine a machine."""

    files: tuple[tuple[str, str], ...]
    """Path and identity of the VMM, kernel, images, firmware."""
    cpu: str
    """The host's CPU, as its kernel describes it, microcode included."""
    host_kernel: str


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """A saved machine, as its own file says."""

    key: str
    """Of its machine: equal keys, equal machines."""
    kernel: str
    vcpus: int
    memory_mib: int
    state_bytes: int
    made_ns: int
    files: tuple[tuple[str, str], ...]
    """As in `MachineFacts`: when one has changed, no machine is like this one any more."""


class StoredTemplate(msgspec.Struct, frozen=True, kw_only=True):
    template: Template
    directory: str
    used_bytes: int
    used_ns: int
    """Last; when it was made, if never."""
