"""A sandbox starts only with the files whose hashes its pod demands."""

import hashlib
import os
from pathlib import Path

import pytest

from pyshim.config.annotations import sha512_of, verify_assets
from pyshim.config.effective import Effective
from pyshim.host.file_answers import FileAnswers
from pyshim.model.errors import FailedPrecondition, InvalidArgument

from .documents import examined, write

H = "io.katacontainers.config.hypervisor."


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    return write(tmp_path / "vmlinuz", b"kernel" * 500_000)


@pytest.fixture
def effective(tmp_path: Path, kernel: Path) -> Effective:
    return examined(tmp_path / "c.toml", f'[hypervisor.qemu]\nkernel = "{kernel}"\n')


@pytest.fixture
def cache(tmp_path: Path) -> str:
    return str(tmp_path / "cache/hashes")


def _later(cache: str) -> FileAnswers:
    """The answers, read when every file's last change is long past."""
    return FileAnswers(cache, clock_ns=lambda: 10**19)


def digest(path: Path) -> str:
    return hashlib.sha512(path.read_bytes()).hexdigest()


def test_the_right_hash_is_accepted_in_either_case(effective: Effective, kernel: Path, cache: str) -> None:
    verify_assets(effective, {H + "kernel_hash": digest(kernel)}, cache)
    verify_assets(effective, {H + "kernel_hash": digest(kernel).upper()}, cache)
    verify_assets(effective, {}, cache)


def test_another_hash_is_refused_with_file_and_annotation(effective: Effective, kernel: Path, cache: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        verify_assets(effective, {H + "kernel_hash": "ab" * 64}, cache)

    assert f"verify kernel '{kernel}'" in str(caught.value)
    assert f"annotation '{H}kernel_hash'" in str(caught.value)


@pytest.mark.parametrize(
    ("annotations", "reason"),
    [
        ({H + "kernel_hash": "abc"}, "not a SHA-512"),
        ({"io.katacontainers.asset_hash_type": "md5"}, "'md5' is not \"sha512\""),
        ({H + "asset_hash_type": "md5"}, f"'{H}asset_hash_type': 'md5' is not \"sha512\""),
        ({H + "firmware_hash": "ab" * 64}, "firmware in '.*c.toml' names no file"),
        ({H + "jailer_hash": "ab" * 64}, "jailer_path in '.*c.toml' names no file"),
    ],
)
def test_a_demand_that_cannot_be_met_is_refused(
    effective: Effective, cache: str, annotations: dict[str, str], reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        verify_assets(effective, annotations, cache)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, cache: str) -> None:
    with pytest.raises(FailedPrecondition, match=r"gone': ENOENT"):
        sha512_of(str(tmp_path / "gone"), FileAnswers(cache))


@pytest.fixture
def remembered(kernel: Path, cache: str) -> Path:
    """The kernel, hashed at a time when its last change was long past, and its cache entry replaced by a mark."""
    assert sha512_of(str(kernel), _later(cache)) == digest(kernel)
    (entry,) = os.scandir(cache)
    Path(entry.path).write_text("f" * 128)
    return kernel


def test_a_file_is_read_once(remembered: Path, cache: str) -> None:
    assert sha512_of(str(remembered), FileAnswers(cache)) == "f" * 128


def test_a_file_changed_and_dated_back_is_read_again(remembered: Path, cache: str) -> None:
    before = os.stat(remembered)
    with remembered.open("r+b") as file:
        file.write(b"KERNEL")
    os.utime(remembered, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert sha512_of(str(remembered), FileAnswers(cache)) == digest(remembered)


def test_a_cache_that_others_can_write_is_not_used(remembered: Path, cache: str) -> None:
    os.chmod(cache, 0o777)

    assert sha512_of(str(remembered), FileAnswers(cache)) == digest(remembered)


def test_the_hash_of_a_file_changed_just_now_is_not_stored(kernel: Path, cache: str) -> None:
    sha512_of(str(kernel), FileAnswers(cache))

    assert not os.path.exists(cache)


def test_the_cache_stays_small(tmp_path: Path, cache: str) -> None:
    for number in range(70):
        sha512_of(str(write(tmp_path / "assets" / str(number), str(number))), _later(cache))

    assert len(os.listdir(cache)) == 64
