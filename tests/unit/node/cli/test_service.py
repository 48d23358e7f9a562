"""What all verbs have that serve until a signal ends them."""

import subprocess
import sys

import pytest

_WAVES = """
import os, sys
from pyshim.node.cli.service import return_freed_memory

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

if sys.argv[1] == "service":
    return_freed_memory()
before = resident_mib()
del (large := [bytes(24 << 20)])[:]
bodies, kept = [], []
for _ in range(100):
    bodies.append(b"x" * (1 << 20))
    kept.append(b"y" * 40_000)
bodies.clear()
print(resident_mib() - before)
"""


@pytest.mark.parametrize("kind", ["service", "control"])
def test_a_service_gives_the_memory_of_large_requests_back(kind: str) -> None:
    """glibc alone keeps it: the control."""
    left_mib = int(subprocess.check_output([sys.executable, "-c", _WAVES, kind], text=True, timeout=60))

    assert (left_mib < 20) is (kind == "service")
