"""Warm pods: VMs that continue from a template, each a VM of its own; and that boot when the template is no good."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import GROUND, PROJECT, own_name
from .framework import shim_config
from .framework.ctr import Ctr, Result
from .framework.images import IMAGE
from .framework.runtime import Runtime

pytestmark = pytest.mark.vm

TEMPLATES = GROUND / "templates"


@pytest.fixture(scope="module")
def warm(module_leaves_nothing: None) -> Iterator[Path]:
    """A configuration with templates, and the template of its machine."""
    directory = GROUND / "warm"
    directory.mkdir()
    path = shim_config.variant(directory)
    path.write_text(f'{path.read_text()}\n[factory]\nenable_template = true\ntemplate_path = "{TEMPLATES}"\n')
    try:
        assert "made" in factory(path, "init")
        yield path
    finally:
        factory(path, "destroy")


def factory(config: Path, verb: str, *words: str) -> str:
    command = [str(PROJECT / "bin" / "pyshim"), "factory", verb, "--config", str(config), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


@pytest.fixture
def continued(containerd: object, request: pytest.FixtureRequest) -> Callable[[], list[str]]:
    """The log's lines of this test about VMs that continued, or were to."""

    def lines() -> list[str]:
        text = containerd.directories.log.read_bytes()[request.node.containerd_log_size :].decode()  # type: ignore[attr-defined]
        return [
            line
            for line in text.splitlines()
            if "vm continued" in line or "template discarded" in line or "vm boots" in line
        ]

    return lines


def start(ctr: Ctr, runtime: Runtime, config: Path, name: str, *options: str) -> None:
    words = ("--runtime-config-path", str(config), *options, IMAGE, name, "sleep", "100000")
    ctr("run", "--detach", "--runtime", runtime.name, *words)


def inside(ctr: Ctr, name: str, script: str) -> Result:
    return ctr("task", "exec", "--exec-id", "look", name, "sh", "-c", script)


def test_two_clones_are_two_machines(
    ctr: Ctr, runtime: Runtime, warm: Path, name: str, continued: Callable[[], list[str]]
) -> None:
    random = "/proc/sys/kernel/random"
    script = f"cat {random}/uuid {random}/boot_id; head -c 16 /dev/urandom | od -An -tx1"
    with own_name(ctr) as other:
        start(ctr, runtime, warm, name)
        start(ctr, runtime, warm, other)
        texts = [inside(ctr, each, script).lines for each in (name, other)]
        now = int(inside(ctr, name, "date +%s").out)

        assert abs(now - time.time()) < 30
        for one, two in zip(*texts, strict=True):
            assert one != two, script
    lines = continued()
    assert len([line for line in lines if "vm continued" in line]) == 2, lines
