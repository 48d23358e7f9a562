"""All keys, and functions to find one."""

import difflib
from collections.abc import Mapping
from functools import cache

from pyshim.config import keys_devices, keys_machine, keys_runtime
from pyshim.config.keys import Alias, Key, Table

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
