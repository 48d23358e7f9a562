"""What `start` may import: it stands in the way of every container, so the standard library and its own room only."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BENCH = REPOSITORY / "tests" / "unit" / "start"
OWN = "pyshim.start"
SLOW = ("asyncio", "dataclasses", "enum", "json", "re", "socket", "subprocess", "typing")
"""Each takes a third to all of what the bare interpreter takes to start; `start` may take twice that altogether."""


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not pytest's tmp_path: a socket's path must stay below 108 bytes.
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        yield Path(name)


def imports_of_start(directory: Path) -> dict[str, str]:
    """Module name to importing file, of one whole `start` that makes a daemon."""
    for name in ("bundle", "s"):
        (directory / name).mkdir()
    pod = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "pod1"}
    (directory / "bundle" / "config.json").write_text(json.dumps({"annotations": pod}))
    daemon = directory / "daemon.py"
    daemon.write_text("")
    words = ["-namespace", "n", "-address", "/c.sock", "-id", "c1", "start"]
    driver = BENCH / "start_driver.py"
    result = subprocess.run(
        [sys.executable, "-I", "-S", str(driver), str(REPOSITORY), str(directory / "s"), str(daemon), *words],
        cwd=directory / "bundle",
        env=os.environ | {"START_IMPORTS_TO": str(directory / "imports")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    rows = [line.split("\t") for line in (directory / "imports").read_text().splitlines()]
    return dict(rows)


def strangers(imports: dict[str, str]) -> list[str]:
    return [f"{name} (imported by {importer})" for name, importer in imports.items() if not is_allowed(name)]


def is_allowed(name: str) -> bool:
    if name in ("__main__", "pyshim", OWN) or name.startswith(f"{OWN}."):
        return True
    return name.partition(".")[0] in sys.stdlib_module_names and name not in SLOW


def test_start_imports_only_what_it_may(directory: Path) -> None:
    imports = imports_of_start(directory)

    assert strangers(imports) == []
    assert {"pyshim.start.zygote_client", "pyshim.start.daemonize"} <= imports.keys()
