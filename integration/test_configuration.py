"""An operator's file and a pod's annotations, as a real VM has them, and what is refused of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .framework import releases, shim_config
from .framework.ctr import Ctr, Result

H = "io.katacontainers.config.hypervisor."
CONFIGS = shim_config.SHIPPED.parent


def _run(ctr: Ctr, name: str, config: Path, annotations: dict[str, str], script: str) -> Result:
    words = [word for key, value in annotations.items() for word in ("--annotation", f"{key}={value}")]
    return ctr.run(name, "sh", "-c", script, options=words, config=config, check=False, within_s=100)


@pytest.mark.vm
def test_annotations_and_a_drop_in_reach_the_guest(ctr: Ctr, name: str, scratch: Path) -> None:
    config = shim_config.with_keys(scratch, hypervisor={"kernel_params": "from.file a=1"})
    pod = {H + "default_vcpus": "1.5", H + "default_memory": "512 MiB", H + "kernel_params": "a=2"}

    result = _run(ctr, name, config, pod, "nproc; grep MemTotal /proc/meminfo; cat /proc/cmdline")

    assert result.code == 0, result
    vcpus, memory, cmdline = result.out.splitlines()
    assert vcpus == "2"
    # The kernel keeps a part of the 512 MiB for itself.
    assert 400 < int(memory.split()[1]) / 1024 < 512
    assert " from.file " in cmdline
    assert " a=2" in cmdline
    assert " a=1" not in cmdline


@pytest.mark.vm
@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("configuration-qemu-tdx.toml", f"confidential_guest in '{CONFIGS}/configuration-qemu-tdx.toml'"),
        ("configuration-qemu-snp.toml", f"confidential_guest in '{CONFIGS}/configuration-qemu-snp.toml'"),
        ("configuration-qemu-sev.toml", f"confidential_guest in '{CONFIGS}/configuration-qemu-sev.toml'"),
        ("configuration-qemu-nvidia-gpu.toml", "'/opt/kata/libexec/virtiofsd': ENOENT"),
    ],
)
def test_a_file_for_what_is_not_there_never_starts_a_plain_vm(ctr: Ctr, name: str, file: str, named: str) -> None:
    result = _run(ctr, name, CONFIGS / file, {}, "true")

    assert result.code != 0
    assert named in result.err
    assert result.err.strip().endswith("failed precondition") or not releases.chosen().ctr_prints_codes
