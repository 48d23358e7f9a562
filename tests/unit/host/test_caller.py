"""A fork takes the properties of the process that asked for it."""

import multiprocessing
import os

import pytest

from pyshim.host.processes.caller import run_on

OFFLINE = max(os.sched_getaffinity(0)) + 1000
"""No test can take a CPU away. To the kernel, one that never was is the same: no CPU of the mask can run us."""


def _runs_on(cpus: set[int]) -> set[int]:
    run_on(cpus)
    return os.sched_getaffinity(0)


@pytest.mark.parametrize(
    "cpus", [set(), {OFFLINE}, {min(os.sched_getaffinity(0))}, {min(os.sched_getaffinity(0)), OFFLINE}]
)
def test_a_fork_runs_on_its_callers_cpus_and_where_it_did_if_those_went_offline(cpus: set[int]) -> None:
    own = os.sched_getaffinity(0)

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_runs_on, (cpus,)) == (cpus & own or own)
