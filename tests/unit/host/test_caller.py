"""A fork takes the properties of the process that asked for it."""

import os
import subprocess
import sys

import pytest

OFFLINE = max(os.sched_getaffinity(0)) + 1000
"""No test can take a CPU away. To the kernel, one that never was is the same: no CPU of the mask can run us."""

_SCRIPT = """
import os, sys
from pyshim.host.processes.caller import run_on
run_on({int(cpu) for cpu in sys.argv[1:]})
print(*sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize(
    "cpus", [set(), {OFFLINE}, {min(os.sched_getaffinity(0))}, {min(os.sched_getaffinity(0)), OFFLINE}]
)
def test_a_fork_runs_on_its_callers_cpus_and_where_it_did_if_those_went_offline(cpus: set[int]) -> None:
    own = os.sched_getaffinity(0)

    done = subprocess.run([sys.executable, "-c", _SCRIPT, *map(str, cpus)], capture_output=True, check=True, text=True)

    assert {int(cpu) for cpu in done.stdout.split()} == (cpus & own or own)
