"""The one reader of /proc/PID/stat."""

from pathlib import Path

import pytest

from pyshim.host.processes.stat import stat_fields


@pytest.mark.parametrize("name", ["sh", "a b", "x) R 7 (y", "näme\udcff"], ids=ascii)
def test_the_fields_begin_after_the_last_parenthesis_of_the_name(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "42"
    directory.mkdir()
    (directory / "stat").write_bytes(b"42 (" + name.encode(errors="surrogateescape") + b") S 1 42 42 0 -1\n")

    assert stat_fields(42, str(tmp_path)) == [b"S", b"1", b"42", b"42", b"0", b"-1"]
