"""Variants of the shipped configuration file, for tests that point `--runtime-config-path` at a broken or
different one.
"""

from __future__ import annotations

import re
from pathlib import Path

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "configuration-qemu.toml"


def variant(directory: Path, **changes: object) -> Path:
    """The shipped file with keys replaced, in `directory`. Its relative paths stay true: they become absolute.

    A change names a key of `[hypervisor.qemu]` that the shipped file sets; naming any other is a mistake of the test.
    """
    text = re.sub(r'"\.\./', f'"{SHIPPED.parents[1]}/', SHIPPED.read_text())
    for key, value in changes.items():
        literal = str(value).lower() if isinstance(value, bool | int) else f'"{value}"'
        text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {literal}", text)
        if count != 1:
            raise AssertionError(f"{SHIPPED.name} sets {key!r} {count} times")
    path = directory / "configuration.toml"
    path.write_text(text)
    return path
