"""The table of deadlines in docs/CONFIGURATION.md says what the code does."""

import importlib

import pytest

from pyshim.config.catalogue import KEYS
from scripts.config_reference import DEADLINES, WaitLimit


@pytest.mark.parametrize("row", [row for row in DEADLINES if not row.key], ids=lambda row: row.constant)
def test_each_constant_has_the_seconds_of_the_table(row: WaitLimit) -> None:
    module, _, name = row.constant.rpartition(".")

    assert vars(importlib.import_module(module))[name] == row.seconds


@pytest.mark.parametrize("row", [row for row in DEADLINES if row.key], ids=lambda row: row.key)
def test_each_key_of_the_table_is_honoured(row: WaitLimit) -> None:
    (key,) = [key for key in KEYS if (key.table, key.name) == (row.table, row.key)]

    assert key.field
