"""Leftovers of an integration test."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.framework import leaks


def test_a_console_log_that_grew_into_its_second_file_is_no_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "_OWNED", (str(tmp_path),))
    vm = tmp_path / "vm"
    vm.mkdir()
    (vm / "console.log").touch()
    before = [*leaks._files(())]

    (vm / "console.log.1").touch()
    assert [*leaks._files(())] == before

    (vm / "other.log.1").touch()
    (vm / "console.log").unlink()
    assert set(leaks._files(())) == {f"{vm}/", f"{vm}/other.log.1", f"{vm}/console.log.1"}
