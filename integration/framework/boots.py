"""VMs of the shipped configuration boot, or continue from a template, by file of tests.

A clone is there in a third of the time of an emulated boot, so in an ordinary run most files have clones; the others
show the same calls on a guest that booted. `scripts/integration --warm` and `--booted` give one to all files. VMs of
another configuration or size boot in each.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from . import kata_agent, shim_config
from .runtime import Runtime

CHOICE = "PYSHIM_TEST_VMS"
WARM = "warm"
_PYSHIM = Path(__file__).resolve().parents[2] / "bin" / "pyshim"
WARM_FILES = frozenset(
    {
        *("test_cgroups", "test_devices", "test_lifecycle", "test_pod_grouping", "test_restart", "test_zygote"),
        *("test_cri_bad_input", "test_cri_io", "test_cri_life", "test_cri_many", "test_cri_network"),
        *("test_cri_pod_spec", "test_cri_restart", "test_cri_stats", "test_differences", "test_exec", "test_hooks"),
        *("test_hostile_volumes", "test_many", "test_network", "test_observation", "test_posix", "test_rootfs"),
        *("test_run", "test_shared_volumes", "test_soak", "test_streams", "test_task_api", "test_volumes"),
    }
)
"""The files with clones in an ordinary run. Guests that booted are in test_crash, test_undo, test_growth, test_cleanup,
test_confinement, and wherever VMs are of a size or configuration of their own."""


def is_warm(file: str) -> bool:
    """True if VMs of the tests in `file`, its name without the suffix, continue from a template."""
    runtime = Runtime.chosen()
    if not runtime.has_vm:
        return False
    chosen = os.environ.get(CHOICE, "")
    if chosen or runtime.has_vsock_program or kata_agent.is_chosen():
        return chosen == WARM
    return file in WARM_FILES


class Template:
    """The template of one enclosure, made when the first file of tests wants it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def make(self) -> None:
        """It is there: `bind` costs a mount only."""
        if self._directory.exists():
            return
        self._directory.mkdir(parents=True)
        config = shim_config.with_templates(self._directory, self._directory / "templates")
        subprocess.run([_PYSHIM, "factory", "init", "--config", config], check=True, timeout=400, capture_output=True)

    def bind(self) -> None:
        """From now on, in this mount namespace, VMs of the shipped file continue from the template."""
        self.make()
        shim_config.bind(self._directory / "configuration.toml", shim_config.SHIPPED)

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Within the block the same."""
        self.bind()
        try:
            yield
        finally:
            subprocess.run(["umount", shim_config.SHIPPED], check=True)
