"""What `serve` may not import before it answers: the Create that made containerd execute it is waiting."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pyshim.later import LATER

from .project_files import ROOT

# Each is needed by few pods, or not before the VMM runs, and costs half a millisecond to ten.
NOT_YET = (
    *LATER,
    *("protos.agent", "protos.cgroups", "qemu.qmp", "hypervisors.remote", "pyshim.failpoints", "pyshim.devices"),
    *("difflib", "hashlib", "random", "urllib.parse", "uuid", "tempfile", "email", "http"),
    *("psutil", "pyroute2", "jeepney", "yaml", "grpc", "toml"),
)
# What few pods have.
SELDOM = {
    *("hypervisors.remote.vm", "hypervisors.qemu.guards.launch", "pyshim.failpoints.wrapping", "pyshim.devices.finder"),
    *("pyshim.plan.initdata", "pyshim.plan.direct_network", "pyshim.task.monitor_socket", "pyshim.bootstrap.leftovers"),
    *("pyshim.host.cgroups.systemd_scope", "pyshim.host.vfio", "pyshim.host.remote_vms", "pyshim.sandbox.health"),
    "pyshim.zygote.rest",
}
# What every pod comes to before its first container runs.
AT_ONCE = {"pyshim.host.sources"}


@pytest.fixture(scope="module")
def loaded() -> frozenset[str]:
    program = "import json, sys; import pyshim.serve; print(json.dumps(list(sys.modules)))"
    path = [str(ROOT), *(each for each in sys.path if each.endswith("site-packages"))]
    program = f"import sys; sys.path += {path!r}; {program}"
    return frozenset(json.loads(subprocess.check_output([sys.executable, "-I", "-S", "-c", program], text=True)))


@pytest.mark.parametrize("name", NOT_YET)
def test_serve_does_not_wait_for(loaded: frozenset[str], name: str) -> None:
    assert name not in loaded


def test_the_list_was_asked_of_the_right_program(loaded: frozenset[str]) -> None:
    assert {"pyshim.serve", "pyshim.sandbox.pod", "asyncio"} <= loaded


def test_what_a_pod_comes_to_later_is_loaded_when_its_shim_is_idle(loaded: frozenset[str]) -> None:
    """Whatever is installed in the meantime, the end of a pod is of one version with its beginning."""
    own = {name for name in (*loaded, *LATER) if name.partition(".")[0] in ("pyshim", "hypervisors")}
    late = {found for name in own for found in _imported_in_functions(name)} - loaded

    assert late - SELDOM - AT_ONCE <= {*LATER}


def _imported_in_functions(name: str) -> Iterator[str]:
    """Modules of ours that functions of the module `name` import."""
    path = ROOT / name.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                match node:
                    case ast.ImportFrom(module=str(source)) if source.startswith(("pyshim.", "hypervisors.")):
                        modules = [f"{source}.{alias.name}" for alias in node.names]
                        yield from [each for each in modules if _is_module(each)] or [source]


def _is_module(name: str) -> bool:
    return (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
