"""What importing the protocol core loads: `delete` has only seconds, and uses the core alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BARE = "import sys; sys.path.insert(0, sys.argv[1]); import struct; before = set(sys.modules); "


def loaded_by(statement: str) -> set[str]:
    """Modules that `statement` adds to a bare interpreter with `struct`."""
    program = BARE + statement + "; print(*sorted(set(sys.modules) - before))"
    command = [sys.executable, "-I", "-S", "-c", program, str(ROOT)]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_the_package_loads_none_of_its_modules() -> None:
    assert {name for name in loaded_by("import pyshim.ttrpc") if name.startswith("pyshim")} == {
        "pyshim",
        "pyshim.ttrpc",
    }


@pytest.mark.parametrize("module", ["framing", "messages", "status", "events", "connection"])
def test_the_core_loads_of_ours_only_itself_and_no_event_loop(module: str) -> None:
    core = {f"pyshim.ttrpc.{name}" for name in ("framing", "messages", "status", "events", "connection")}
    loaded = loaded_by(f"import pyshim.ttrpc.{module}")

    assert {name for name in loaded if name.startswith("pyshim")} <= core | {"pyshim", "pyshim.ttrpc"}
    assert not {"asyncio", "socket", "google"} & loaded


def test_every_public_name_resolves() -> None:
    import pyshim.ttrpc

    missing = [name for name in pyshim.ttrpc._HOME if not hasattr(pyshim.ttrpc, name)]

    assert missing == []
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = pyshim.ttrpc.Nothing
