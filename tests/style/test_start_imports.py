"""What `start` may import: it stands in the way of every container, and each module is paid for each time."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BENCH = REPOSITORY / "tests" / "unit" / "bootstrap"

ALLOWED = frozenset(
    {
        # Modules in C, without a Python module around them. Not os: the interpreter itself does without.
        *("_json", "_sha256", "_socket", "errno", "fcntl", "time"),
        # Ours.
        *("pyshim", "pyshim.bootstrap", "pyshim.bootstrap.address", "pyshim.bootstrap.argv"),
        *("pyshim.bootstrap.daemon", "pyshim.bootstrap.daemonize", "pyshim.bootstrap.dialect"),
        *("pyshim.bootstrap.errors", "pyshim.bootstrap.spec", "pyshim.bootstrap.start", "pyshim.bootstrap.wire"),
        "pyshim.bootstrap.zygote",
    }
)


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not pytest's tmp_path: a socket's path must stay below 108 bytes.
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        yield Path(name)


def imports_of_start(directory: Path, *, guilty_line: str = "") -> dict[str, str]:
    """Module name to importing file, of one whole `start` that makes a daemon."""
    for name in ("bundle", "s"):
        (directory / name).mkdir()
    pod = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "pod1"}
    (directory / "bundle" / "config.json").write_text(json.dumps({"annotations": pod}))
    daemon = directory / "daemon.py"
    daemon.write_text("")
    driver = directory / "driver.py"
    first_line = "from pyshim.bootstrap import"
    driver.write_text((BENCH / "start_driver.py").read_text().replace(first_line, f"{guilty_line}\n{first_line}"))
    words = ["-namespace", "n", "-address", "/c.sock", "-id", "c1", "start"]
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


def modules_of_the_bare_interpreter() -> set[str]:
    names = subprocess.check_output([sys.executable, "-I", "-S", "-c", "import sys; print(*sys.modules)"], text=True)
    return set(names.split())


def strangers(imports: dict[str, str]) -> list[str]:
    known = ALLOWED | modules_of_the_bare_interpreter()
    return [f"{name} (imported by {importer})" for name, importer in imports.items() if name not in known]


def test_start_imports_nothing_off_the_list(directory: Path) -> None:
    imports = imports_of_start(directory)

    assert strangers(imports) == []
    assert "pyshim.bootstrap.zygote" not in imports


def test_nor_does_it_where_a_zygote_could_be(directory: Path) -> None:
    (directory / "s.z").mkdir()
    imports = imports_of_start(directory)

    assert strangers(imports) == []
    assert "pyshim.bootstrap.zygote" in imports


@pytest.mark.parametrize("module", ["os", "json", "socket", "asyncio"])
def test_a_module_off_the_list_is_named_with_its_importer(directory: Path, module: str) -> None:
    found = strangers(imports_of_start(directory, guilty_line=f"import {module}"))

    assert f"{module} (imported by {directory / 'driver.py'})" in found
