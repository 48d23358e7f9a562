"""What `serve` may not import before it answers: the Create that made containerd execute it is waiting."""

import json
import subprocess
import sys

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
