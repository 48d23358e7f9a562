"""Several pods at the same time."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest

from .framework import load, shim_config
from .framework.ctr import Ctr, Result
from .framework.runtime import Runtime

_TOGETHER = load.amount(4, 10)


@pytest.mark.timeout(600)
def test_containers_at_once_each_give_their_own_output_and_code(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path
) -> None:
    # Emulated guests boot at once on two CPUs which other tests use as well.
    config = shim_config.variant(scratch, dial_timeout=400) if runtime.has_vm else None

    def one(number: int) -> Result:
        script = f"echo container {number}; hostname > /mine; cat /mine | wc -l; exit {number}"
        return ctr.run(f"{name}-{number}", "sh", "-c", script, config=config, check=False, within_s=500)

    with concurrent.futures.ThreadPoolExecutor(_TOGETHER) as pool:
        results = list(pool.map(one, range(_TOGETHER)))

    assert [(r.code, r.out) for r in results] == [(n, f"container {n}\n1\n") for n in range(_TOGETHER)], results
