"""What a shim imports when it starts: all of its own code, and of others only what every pod uses."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from .project_files import ROOT

HEAVY = (
    "grpc",
    "yaml",
    "pyroute2",
    "psutil",
    "prometheus_client",
    "toml",
    "click",
    "rich",
    "aiohttp",
    "cryptography",
    "opentelemetry",
)
"""Each takes tens of milliseconds or megabytes, and is for few pods, or for a child that answers one question."""
OURS = ("pyshim.", "hypervisors.", "protos.")
NOT_OF_A_POD = ("tests.failpoints", "pyshim.tracing")
"""Only tests ask for the one, only `enable_tracing` for the other: at Create, and a failure is a line in the log."""


@pytest.fixture(scope="module")
def loaded() -> frozenset[str]:
    return _loaded_by("pyshim.serve")


def _loaded_by(module: str) -> frozenset[str]:
    program = f"import json, sys; import {module}; print(json.dumps(list(sys.modules)))"
    path = [str(ROOT), *(each for each in sys.path if each.endswith("site-packages"))]
    program = f"import sys; sys.path += {path!r}; {program}"
    return frozenset(json.loads(subprocess.check_output([sys.executable, "-I", "-S", "-c", program], text=True)))


@pytest.mark.parametrize("name", [*HEAVY, *NOT_OF_A_POD])
def test_serve_does_not_import(loaded: frozenset[str], name: str) -> None:
    assert name not in loaded


def test_neither_the_zygote_nor_delete_imports_what_is_for_operators() -> None:
    loaded = _loaded_by("pyshim.__main__, pyshim.zygote.server, pyshim.zygote.code, pyshim.cleanup.delete")

    assert {name for name in loaded if name.startswith(("click", "rich", "pyshim.node.cli"))} == set()


def test_the_list_was_asked_of_the_right_program(loaded: frozenset[str]) -> None:
    assert {"pyshim.serve", "pyshim.pod.pod", "asyncio"} <= loaded


def test_a_pod_ends_with_the_code_that_it_began_with(loaded: frozenset[str]) -> None:
    """An upgrade replaces the files while pods run: a shim must not import its own code later."""
    own = [name for name in loaded if name.partition(".")[0] in ("pyshim", "hypervisors", "protos")]
    later = {(name, found) for name in own for found in _imported_in_functions(name) if found not in loaded}

    assert {(name, found) for name, found in later if not found.startswith(NOT_OF_A_POD)} == set()


def _imported_in_functions(name: str) -> Iterator[str]:
    """Modules of ours that functions of the module `name` import."""
    path = ROOT / name.replace(".", "/")
    package = path / "__init__.py"  # a directory may be left of a package that is a module now, with its caches
    text = (package if package.exists() else path.with_suffix(".py")).read_text()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                match node:
                    case ast.ImportFrom(module=str(source)) if source.startswith(
                        ("pyshim.", "hypervisors.", "protos.")
                    ):
                        modules = [f"{source}.{alias.name}" for alias in node.names]
                        yield from [each for each in modules if _is_module(each)] or [source]


def _is_module(name: str) -> bool:
    return (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
