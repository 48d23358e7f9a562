"""Machines other than the default one carry a pod as well: boot, shared root file system, exec, exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from .framework import shim_config
from .framework.ctr import Ctr
from .framework.images import IMAGE
from .framework.runtime import Runtime


@pytest.mark.vm
def test_pod_runs_on_a_microvm(ctr: Ctr, runtime: Runtime, name: str, scratch: Path) -> None:
    # Emulated, this machine has no timer to calibrate the TSC against; see docs/GUEST.md.
    params = "root=/dev/vda tsc_early_khz=2000000"
    config = shim_config.variant(scratch, machine_type="microvm", kernel_params=params)
    words = ("run", "--detach", "--runtime", runtime.name, "--runtime-config-path", config)

    ctr(*words, IMAGE, name, "sleep", "100000")

    (vmm,) = runtime.vmms(name)
    assert any(word.startswith("microvm,") for word in vmm.command)
    script = "cat /layer-marker; echo new > /created && cat /created; exit 7"
    result = ctr("task", "exec", "--exec-id", "one", name, "sh", "-c", script, check=False)
    assert (result.lines, result.code) == (["upper", "new"], 7)
