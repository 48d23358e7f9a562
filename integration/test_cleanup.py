"""`pyshim cleanup`: a shim dies while containerd is away, so `delete` is not called."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.unit.state.kata_shape import SANDBOX_STATE, check

from .framework.containerd import Containerd
from .framework.ctr import Ctr
from .framework.runtime import Runtime
from .framework.waiting import eventually

PROGRAM = Path(__file__).resolve().parents[1] / "bin" / "pyshim"


def pyshim(*words: str, within_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=within_s, check=False)


@pytest.mark.vm
@pytest.mark.parametrize("state", ["whole", "damaged", "lost"])
def test_what_a_shim_left_that_died_while_containerd_was_away_is_cleaned(
    containerd: Containerd, ctr: Ctr, runtime: Runtime, name: str, state: str
) -> None:
    ctr.start(name)
    assert pyshim("cleanup", name).returncode == 4
    assert pyshim("cleanup", "--all").stdout == ""
    persisted = runtime.persisted(name)
    document = json.loads(persisted.read_bytes())
    del document["Pyshim"]
    check(document, SANDBOX_STATE)
    assert document["HypervisorState"]["Pid"] == runtime.vmms(name)[0].pid

    containerd.stop(signal.SIGKILL)
    shims = runtime.shims(name)
    for process in shims:
        os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not runtime.shims(name), what="the shim is dead")
    if state == "damaged":
        persisted.write_text(persisted.read_text()[:100])
    elif state == "lost":
        persisted.unlink()
    would = pyshim("cleanup", "--all", "--dry-run")
    done = pyshim("cleanup", "--all")
    again = pyshim("cleanup", name)

    assert (would.returncode, would.stderr) == (3, "")
    assert f"sandbox '{name}': known by" in would.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert "  undone: directory /run/vc/vm/" in done.stdout
    assert (again.returncode, again.stdout) == (0, f"sandbox '{name}': nothing is left of it\n")
    assert not (runtime.vmms(name) + runtime.virtiofsds(name))
    assert not persisted.parent.exists()
    containerd.start()
    ctr.wait_for_state(name, None)
