"""Two directories of CDI specs and what looks at both."""

from pathlib import Path

import pytest

from pyshim.cdi import Cache


@pytest.fixture
def low(tmp_path: Path) -> Path:
    return tmp_path / "low"


@pytest.fixture
def high(tmp_path: Path) -> Path:
    return tmp_path / "high"


@pytest.fixture
def cache(low: Path, high: Path) -> Cache:
    return Cache([str(low), str(high)])
