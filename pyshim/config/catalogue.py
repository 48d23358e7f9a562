"""All keys, and the ways to find one."""

import difflib
from collections.abc import Mapping
from functools import cache

from pyshim.config import keys_devices, keys_machine, keys_runtime
from pyshim.config.keys import Alias, Key, Table

GROUPS: tuple[tuple[str, tuple[Key, ...]], ...] = (
    ("What is booted", keys_machine.BOOT),
    ("Size", keys_machine.SIZE),
    ("Safety", keys_machine.SAFETY),
    ("What pods may choose", keys_machine.PERMISSIONS),
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
    """Every place a key may be written at, its own and its aliases'."""
    return {(alias.table, alias.name): (key, alias) for key in KEYS for alias in key.spellings}


@cache
def annotated() -> Mapping[str, Key]:
    """The key each annotation overrides, by the annotation's full name."""
    return {name: key for key in KEYS for name in key.annotations}


def nearest(table: Table, name: str) -> str:
    """The known key most like `name`: one of its table, else one of another table; empty when none is like it."""
    own = [known for where, known in spellings() if where is table]
    near = difflib.get_close_matches(name, own, n=1, cutoff=0.75)
    if near:
        return near[0]
    others = [f"{where}.{known}" for where, known in spellings() if known == name]
    return others[0] if others else ""
