"""Machines other than the default one carry a pod as well: boot, shared root file system, exec, exit status."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pyshim.host.tsc import khz_since, reading

from .framework import shim_config
from .framework.ctr import Ctr
from .framework.images import IMAGE
from .framework.runtime import Runtime


@pytest.mark.vm
def test_pod_runs_on_a_microvm(ctr: Ctr, runtime: Runtime, name: str, scratch: Path) -> None:
    params = "root=/dev/vda"
    config = shim_config.variant(scratch, machine_type="microvm", kernel_params=params)
    words = ("run", "--detach", "--runtime", runtime.name, "--runtime-config-path", config)

    ctr(*words, IMAGE, name, "sleep", "100000")

    (vmm,) = runtime.vmms(name)
    assert any(word.startswith("microvm,") for word in vmm.command)
    script = "cat /layer-marker; echo new > /created && cat /created; exit 7"
    result = ctr("task", "exec", "--exec-id", "one", name, "sh", "-c", script, check=False)
    assert (result.lines, result.code) == (["upper", "new"], 7)
    if "accel=tcg" in " ".join(vmm.command):
        # This machine has no timer to measure its counter against.
        shown = ctr("task", "exec", "--exec-id", "two", name, "grep", "-E", "^(cpu MHz|bogomips)", "/proc/cpuinfo")
        mhz, bogomips = (float(line.rpartition(":")[2]) for line in shown.lines[:2])
        assert mhz == pytest.approx(asyncio.run(khz_since(reading())) / 1000, rel=0.01)
        assert bogomips == pytest.approx(2 * mhz, rel=0.01), "kernel_hz is that of the shipped kernel"
