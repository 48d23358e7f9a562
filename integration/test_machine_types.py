"""Machines other than the default one carry a pod as well: boot, shared root file system, exec, exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyshim.resources.probe import probe_host

from .framework import shim_config
from .framework.ctr import Ctr
from .framework.runtime import Runtime


@pytest.mark.vm
def test_pod_runs_with_its_root_image_as_persistent_memory(ctr: Ctr, name: str, scratch: Path) -> None:
    """Kata's default: the guest mounts the device that root= names, whatever disks it has."""
    config = shim_config.variant(scratch, disable_image_nvdimm=False)

    result = ctr.run(name, "cat", "/layer-marker", "/proc/cmdline", config=config)

    assert result.lines[0] == "upper"
    assert " root=/dev/pmem0p1 " in result.out


@pytest.mark.vm
def test_pod_runs_on_a_microvm(ctr: Ctr, runtime: Runtime, name: str, scratch: Path) -> None:
    config = shim_config.variant(scratch, machine_type="microvm")

    ctr.start(name, config=config)

    (vmm,) = runtime.vmms(name)
    assert any(word.startswith("microvm,") for word in vmm.command)
    script = "cat /layer-marker; echo new > /created && cat /created; exit 7"
    result = ctr.inside(name, "sh", "-c", script, check=False)
    assert (result.lines, result.code) == (["upper", "new"], 7)
    if "accel=tcg" in " ".join(vmm.command):
        # This machine has no timer to measure its counter against.
        shown = ctr.inside(name, "grep", "-E", "^(cpu MHz|bogomips)", "/proc/cpuinfo")
        mhz, bogomips = (float(line.rpartition(":")[2]) for line in shown.lines[:2])
        assert mhz == pytest.approx(probe_host().tsc_khz / 1000, rel=0.01)
        assert bogomips == pytest.approx(2 * mhz, rel=0.01), "kernel_hz is that of the shipped kernel"
