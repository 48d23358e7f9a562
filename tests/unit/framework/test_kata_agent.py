"""Runs with kata-agent: the list of tests in which it differs names tests that exist, once each; a whole guest's keys
are the configuration's.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

from integration.framework import shim_config
from integration.framework.kata_agent import differences

ROOT = Path(__file__).resolve().parents[3]


def test_every_listed_test_is_there_once_and_has_a_reason() -> None:
    listed = [name for difference in differences() for name in difference.tests]
    there = set()
    for file in (ROOT / "integration").glob("test_*.py"):
        names = (node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))
        there |= {file.name, *(f"{file.name}::{name}" for name in names if name.startswith("test_"))}

    assert [name for name in listed if name.partition("[")[0] not in there] == []
    assert [name for name, count in Counter(listed).items() if count > 1] == []
    assert [difference for difference in differences() if len(difference.reason) < 20] == []


def test_the_keys_of_a_whole_guest_replace_and_complete_the_shipped_ones(tmp_path: Path) -> None:
    keys = {"image": "/kata.img", "initrd": "", "kernel_verity_params": "root_hash=ab,salt=cd"}

    made = tomllib.loads(shim_config.with_hypervisor_keys(tmp_path, keys).read_text())

    shipped = tomllib.loads(shim_config.SHIPPED.read_text())
    assert "kernel_verity_params" not in shipped["hypervisor"]["qemu"], "a key that the shipped file does not set"
    assert made["hypervisor"]["qemu"].items() >= keys.items()
    assert made["hypervisor"]["qemu"]["default_vcpus"] == shipped["hypervisor"]["qemu"]["default_vcpus"]
    assert made.keys() == shipped.keys()
