"""A template: the saved state of a machine that has booted, from which the VMs of new pods continue."""

import msgspec


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The host's part in the identity of a machine; its configuration is the other part."""

    files: tuple[tuple[str, str], ...]
    """Path and identity (`host/file_answers.py`) of the VMM, the kernel, the images and the firmware."""
    cpu: str
    """The kernel's description of the host's CPU, with its microcode."""
    host_kernel: str


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a template, from the file beside it."""

    key: str
    """Machines with equal keys are equal."""
    kernel: str
    vcpus: int
    memory_mib: int
    state_bytes: int
    made_ns: int
    files: tuple[tuple[str, str], ...]
    """As in `MachineFacts`. After one of them has changed, no VM uses the template."""


class StoredTemplate(msgspec.Struct, frozen=True, kw_only=True):
    template: Template
    directory: str
    used_bytes: int
    used_ns: int
    """When it was last used; the time of its creation if it was not used."""
