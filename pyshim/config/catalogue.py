"""All keys, functions to find one, and the keys for remote VMs.

A service outside this node makes a remote VM. From the hypervisor's table it gets the VM's size, the names of a machine
type and an image, and the GPUs. Keys about a VMM, a guest kernel or directories of this host have no effect.
"""

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec.structs import replace

from pyshim.config import keys_devices, keys_machine, keys_runtime
from pyshim.config.keys import Alias, Key, Table, Verdict
from pyshim.config.keys_devices import REMOTE
from pyshim.config.values import TEXT, VCPUS, memory

GROUPS: tuple[tuple[str, tuple[Key, ...]], ...] = (
    ("Boot", keys_machine.BOOT),
    ("Size", keys_machine.SIZE),
    ("Safety", keys_machine.SAFETY),
    ("Annotations that pods may set", keys_machine.PERMISSIONS),
    ("Shared directories", keys_devices.SHARE),
    ("Disks", keys_devices.BLOCK),
    ("Devices", keys_devices.DEVICES),
    ("Debugging", keys_devices.DEBUG),
    ("Remote VMs", keys_devices.REMOTE),
    ("Agent", keys_runtime.AGENT),
    ("The agent's memory reclaim", keys_runtime.MEM_AGENT),
    ("Runtime", keys_runtime.RUNTIME),
    ("Factory", keys_runtime.FACTORY),
)
KEYS: tuple[Key, ...] = tuple(key for _, group in GROUPS for key in group)


@cache
def spellings() -> Mapping[tuple[Table, str], tuple[Key, Key | Alias]]:
    """By table and name: the key that is spelled so, and this spelling of it."""
    return {(each.table, each.name): (key, each) for key in KEYS for each in key.spellings}


@cache
def annotated() -> Mapping[str, Key]:
    """The key that an annotation overrides, by the annotation's full name."""
    return {name: key for key in KEYS for name in key.annotations}


def nearest(table: Table, name: str) -> str:
    """The most similar key of `table`, else the key of this name in another table; empty if there is neither."""
    own = [known for where, known in spellings() if where is table]
    near = difflib.get_close_matches(name, own, n=1, cutoff=0.75)
    if near:
        return near[0]
    others = [f"{where}.{known}" for where, known in spellings() if known == name]
    return others[0] if others else ""


NAME = "remote"
_ONLY_REMOTE = frozenset((key.table, key.name) for key in REMOTE)
_SERVICE_DECIDES = "the service that makes remote VMs decides"
FIXED_VALUES: Mapping[tuple[Table, str], tuple[Any, str]] = {
    (Table.HYPERVISOR, "shared_fs"): ("none", "a remote VM shares no files with this host"),
    (Table.RUNTIME, "internetworking_model"): ("none", "the service connects the pod's network"),
    (Table.RUNTIME, "static_sandbox_resource_mgmt"): (True, "a remote VM keeps its size"),
    (Table.RUNTIME, "emptydir_mode"): ("shared-fs", "a remote VM has no disks of this host"),
}
"""By key: its only permitted value with remote VMs, which is also its default, and the reason."""
_DEFAULTS: Mapping[tuple[Table, str], Any] = {(Table.RUNTIME, "experimental_force_guest_pull"): True}
"""The guest pulls its images: it cannot use one that is unpacked on this host."""
_NAMES = frozenset({"machine_type", "image"})
"""Keys whose values are names of the service's, not a QEMU machine and a file of this host."""
_USED = frozenset(
    {
        *("default_vcpus", "default_maxvcpus", "default_memory", "default_maxmemory", "overhead_vcpus"),
        *("overhead_memory", "enable_annotations", "annotation_match", "initdata", "enable_debug"),
        *("cold_plug_vfio", "hot_plug_vfio"),
    }
)
"""The other keys of the hypervisor's table that have an effect."""
_CONFIDENTIAL = frozenset({"confidential_guest", "sev_snp_guest"})


@cache
def keys_for(hypervisor: str) -> tuple[Key, ...]:
    """All keys, with the verdicts, kinds and defaults that they have for sandboxes on `hypervisor`."""
    if hypervisor == NAME:
        return tuple(_for_remote(key) for key in KEYS)
    return tuple(
        replace(key, verdict=Verdict.NO_EFFECT, why="only remote VMs have it")
        if (key.table, key.name) in _ONLY_REMOTE
        else key
        for key in KEYS
    )


def _for_remote(key: Key) -> Key:
    at = (key.table, key.name)
    if at in FIXED_VALUES:
        return replace(key, default=FIXED_VALUES[at][0])
    if at in _DEFAULTS:
        return replace(key, default=_DEFAULTS[at])
    if at == (Table.HYPERVISOR, "default_vcpus"):
        return replace(key, kind=VCPUS, blank=None)  # the VM is on no host that this one knows
    if at == (Table.HYPERVISOR, "default_memory"):
        # The service's webhook writes small sizes into the annotation, and Kata has no minimum for remote VMs.
        return replace(key, kind=memory(1))
    if key.table is not Table.HYPERVISOR or at in _ONLY_REMOTE or key.name in _USED:
        return key
    if key.name in _NAMES:
        aliases = tuple(replace(alias, kind=TEXT) for alias in key.aliases)
        return replace(key, kind=TEXT, default="", blank=None, aliases=aliases)
    if key.name in _CONFIDENTIAL:
        return replace(key, verdict=Verdict.REFUSED, why="the service decides whether a remote VM is confidential")
    return key if key.verdict is Verdict.REFUSED else replace(key, verdict=Verdict.NO_EFFECT, why=_SERVICE_DECIDES)
