"""Copies of files with holes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.host.fds import OwnedFd
from pyshim.host.files import copy_sparse, copy_without_zeros

MIB = 1 << 20
PIECES = {0: b"a" * 4096, 3 * MIB: b"bc" * 5000, 8 * MIB - 4096: b"z" * 4096}


def opened(path: Path) -> OwnedFd:
    return OwnedFd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


@pytest.mark.parametrize("copy", [copy_sparse, copy_without_zeros])
def test_a_copy_has_content_size_and_holes(tmp_path: Path, copy: Callable[[OwnedFd, OwnedFd], None]) -> None:
    with opened(tmp_path / "source") as source, opened(tmp_path / "target") as target:
        os.truncate(source.fileno(), 10 * MIB)
        for offset, piece in PIECES.items():
            os.pwrite(source.fileno(), piece, offset)

        copy(source, target)

        assert (tmp_path / "target").read_bytes() == (tmp_path / "source").read_bytes()
        assert os.fstat(target.fileno()).st_blocks <= os.fstat(source.fileno()).st_blocks


def test_pages_of_zeros_become_holes(tmp_path: Path) -> None:
    with opened(tmp_path / "source") as source, opened(tmp_path / "target") as target:
        os.pwrite(source.fileno(), bytes(MIB) + b"x" + bytes(MIB), 0)

        copy_without_zeros(source, target)

        assert (tmp_path / "target").read_bytes() == (tmp_path / "source").read_bytes()
        assert os.fstat(target.fileno()).st_blocks * 512 <= 2 * 4096


def test_an_empty_file_and_one_of_holes_only(tmp_path: Path) -> None:
    for size in (0, MIB):
        with opened(tmp_path / f"s{size}") as source, opened(tmp_path / f"t{size}") as target:
            os.truncate(source.fileno(), size)

            copy_sparse(source, target)

            assert os.fstat(target.fileno()).st_size == size
            assert os.fstat(target.fileno()).st_blocks == 0


def test_a_larger_target_does_not_shrink(tmp_path: Path) -> None:
    with opened(tmp_path / "source") as source, opened(tmp_path / "target") as target:
        os.pwrite(source.fileno(), b"x", 0)
        os.truncate(target.fileno(), MIB)

        copy_sparse(source, target)

        assert (tmp_path / "target").read_bytes() == b"x" + bytes(MIB - 1)
