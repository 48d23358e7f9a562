"""Runs with kata-agent: the list of tests in which it differs names tests that exist, once each; a whole guest's keys
are the configuration's.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from integration.framework import shim_config
from integration.framework.kata_agent import GUEST_CHOICE, Difference, differences, mark

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


class Item:
    """As much of a pytest.Item as the marks need."""

    nodeid = "integration/test_x.py::test_y[z]"

    def __init__(self) -> None:
        self.marks: list[pytest.MarkDecorator] = []

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark)


@pytest.mark.parametrize(
    ("guest", "keys", "marked"),
    [
        (None, "", True),
        ({}, "", False),
        ({}, "disable_image_nvdimm = false", True),
        ({"disable_image_nvdimm": True}, "", False),
        ({"disable_image_nvdimm": True}, "disable_image_nvdimm = false", False),
        ({"disable_image_nvdimm": True}, 'disable_image_nvdimm = true\ninitrd = ""', True),
    ],
)
def test_a_difference_may_be_of_whole_guests_with_some_keys_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, guest: dict[str, object] | None, keys: str, marked: bool
) -> None:
    monkeypatch.delenv(GUEST_CHOICE, raising=False)
    if keys:
        (tmp_path / "guest.toml").write_text(keys)
        monkeypatch.setenv(GUEST_CHOICE, str(tmp_path / "guest.toml"))
    item = Item()

    mark([cast("pytest.Item", item)], [Difference(reason="it differs", tests=("test_x.py::test_y",), guest=guest)])

    assert [each.name for each in item.marks] == ["xfail"] * marked
