"""An operator's file and a pod's annotations, as a real VM has them, and what is refused of them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pyshim.config.load import build_config
from pyshim.config.sources import read_source

from .framework import releases, shim_config
from .framework.ctr import Ctr, Result
from .framework.images import IMAGE
from .framework.runtime import Runtime

H = "io.katacontainers.config.hypervisor."
CONFIGS = shim_config.SHIPPED.parent
HASH_CACHE = Path("/run/pyshim/asset-hashes")


@pytest.fixture
def kernel() -> Path:
    return Path(build_config(read_source(None, {}, (str(shim_config.SHIPPED),))).hypervisor.kernel)


@pytest.fixture
def forgotten_hashes() -> Iterator[None]:
    """Digests outlive the pods they were made for, on purpose; here they would count as left over."""
    yield
    shutil.rmtree(HASH_CACHE, ignore_errors=True)
    with suppress(OSError):
        HASH_CACHE.parent.rmdir()


def _run(ctr: Ctr, runtime: Runtime, name: str, config: Path, annotations: dict[str, str], script: str) -> Result:
    words = [word for key, value in annotations.items() for word in ("--annotation", f"{key}={value}")]
    options = ("--rm", "--runtime-config-path", config, "--runtime", runtime.name)
    return ctr("run", *options, *words, IMAGE, name, "sh", "-c", script, check=False, within_s=100)


@pytest.mark.vm
def test_annotations_and_a_drop_in_reach_the_guest(ctr: Ctr, runtime: Runtime, name: str, scratch: Path) -> None:
    config = shim_config.with_keys(scratch, hypervisor={"kernel_params": "from.file a=1"})
    pod = {H + "default_vcpus": "1.5", H + "default_memory": "512 MiB", H + "kernel_params": "a=2"}

    result = _run(ctr, runtime, name, config, pod, "nproc; grep MemTotal /proc/meminfo; cat /proc/cmdline")

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
    ("annotation", "value", "reason", "code"),
    [
        ("path", "/bin/sh", "not enabled by enable_annotations", "invalid argument"),
        ("default_vcpus", "many", "expected a number, not 'many'", "invalid argument"),
    ],
)
def test_an_annotation_that_is_refused_is_named(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path, annotation: str, value: str, reason: str, code: str
) -> None:
    result = _run(ctr, runtime, name, shim_config.variant(scratch), {H + annotation: value}, "true")

    assert result.code != 0
    assert H + annotation in result.err
    assert reason in result.err
    assert result.err.strip().endswith(code) or not releases.chosen().ctr_prints_codes


@pytest.mark.vm
@pytest.mark.parametrize(
    ("hexadecimal", "passes"), [("", True), ("ab" * 64, False)], ids=["the kernel's own hash", "another hash"]
)
def test_a_pod_may_demand_its_kernel_by_hash(
    ctr: Ctr,
    runtime: Runtime,
    name: str,
    scratch: Path,
    kernel: Path,
    forgotten_hashes: None,
    hexadecimal: str,
    passes: bool,
) -> None:
    config = shim_config.with_keys(scratch, hypervisor={"enable_annotations": ["^kernel_hash$"]})
    demanded = hexadecimal or hashlib.sha512(kernel.read_bytes()).hexdigest()

    result = _run(ctr, runtime, name, config, {H + "kernel_hash": demanded}, "echo started")

    assert (result.code == 0) is passes
    assert (result.out == "started\n") is passes
    assert passes or f"verify kernel '{kernel}'" in result.err


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
def test_a_file_for_what_is_not_there_never_starts_a_plain_vm(
    ctr: Ctr, runtime: Runtime, name: str, file: str, named: str
) -> None:
    result = _run(ctr, runtime, name, CONFIGS / file, {}, "true")

    assert result.code != 0
    assert named in result.err
    assert result.err.strip().endswith("failed precondition") or not releases.chosen().ctr_prints_codes
