"""What an installed shim without extras has: every module of the shim's house but those that an extra is for."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

from .project_files import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OF_EXTRAS = {
    "pyshim.cdi.yaml_text": "devices",
    "pyshim.resources.devices.host.kubelet": "devices",
    "protos.kubelet.podresources_v1_pb2_grpc": "devices",
    "protos.cri.v1_pb2_grpc": "node",
    "protos.kubelet.dra_v1_pb2_grpc": "node",
    "protos.kubelet.pluginregistration_v1_pb2_grpc": "node",
    "pyshim.tracing.child": "tracing",
}
"""Modules that need an extra: programs that ask the kubelet or send spans, and YAML specs. pyshim.node needs 'node'."""
_REFUSE_OTHERS = """
import importlib.machinery, json, pkgutil, sys
paths, allowed = json.loads(sys.argv[1])
sys.path += paths

class OnlyAllowed(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in (*allowed, *sys.stdlib_module_names):
            return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = OnlyAllowed
"""
_IMPORT_ALL = """
import hypervisors, protos, pyshim
refused = []
for house in (hypervisors, protos, pyshim):
    for found in pkgutil.walk_packages(house.__path__, f"{house.__name__}."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError:
            refused.append(found.name)
print(json.dumps(refused))
"""
_RUN_PYSHIM = "from pyshim.__main__ import operator_main; sys.exit(operator_main(['--version']))"
_ASK_KUBELET = "from pyshim.resources.devices.host.child import _ask; _ask('/k.sock', 'name', 'namespace')"


def modules_of(requirements: list[str]) -> frozenset[str]:
    """The top-level modules of the packages that `requirements` need, those that they need included."""
    found: set[str] = set()
    for requirement in requirements:
        if "extra ==" in requirement:
            continue
        matched = re.match(r"[\w.-]+", requirement)
        assert matched
        try:
            package = metadata.distribution(matched[0])
        except metadata.PackageNotFoundError:
            assert ";" in requirement, "only a marker, as of Windows, leaves a package out"
            continue
        found |= {path.parts[0].partition(".")[0] for path in package.files or ()}
        found |= modules_of(package.requires or [])
    return frozenset(found)


def run_without_extras(program: str, *extras: str) -> subprocess.CompletedProcess[str]:
    packages = [*PROJECT["dependencies"], *(each for extra in extras for each in EXTRAS[extra])]
    paths = [str(ROOT), *(each for each in sys.path if each.endswith("site-packages"))]
    allowed = sorted(modules_of(packages) | {"pyshim", "hypervisors", "protos"})
    command = [sys.executable, "-I", "-S", "-c", _REFUSE_OTHERS + program, json.dumps([paths, allowed])]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def modules_refused(*extras: str) -> list[str]:
    """Our modules that cannot be imported with no more than `extras`."""
    done = run_without_extras(_IMPORT_ALL, *extras)
    assert done.returncode == 0, done.stderr
    refused: list[str] = json.loads(done.stdout)
    return refused


def test_a_shim_without_extras_imports_all_of_its_house_but_what_extras_are_for() -> None:
    assert {name for name in modules_refused() if not name.startswith("pyshim.node.")} == OF_EXTRAS.keys()


@pytest.mark.parametrize("extra", sorted(set(OF_EXTRAS.values())))
def test_each_extra_brings_what_its_modules_need(extra: str) -> None:
    assert not {name for name in modules_refused(extra) if OF_EXTRAS.get(name, "node") == extra}


def test_pyshim_without_its_extra_names_it() -> None:
    done = run_without_extras(_RUN_PYSHIM)

    assert done.returncode == 1
    assert done.stderr == "run 'pyshim': No module named 'click' (hint: install pyshim[node])\n"


def test_a_kubelet_that_cannot_be_asked_names_the_extra() -> None:
    assert "No module named 'grpc' (hint: install pyshim[devices])" in run_without_extras(_ASK_KUBELET).stderr
