"""Devices over disks: what the kernel gets. Integration tests use them in a VM."""

from __future__ import annotations

import struct

import pytest

from guest.agent.errors import InvalidArgument
from guest.agent.storage.device_mapper import crypt_target, table, verity_target

HASH = "ab" * 32


def test_the_table_is_one_aligned_target_over_the_whole_disk() -> None:
    made = table(crypt_target(2048, "/dev/sda", bytes(range(64))))

    start, sectors, status, following, kind = struct.unpack_from("=QQiI16s", made)
    assert (start, sectors, status, kind.rstrip(b"\0")) == (0, 2048, 0, b"crypt")
    assert (following, len(made) % 8) == (len(made), 0)
    parameters = made[40:].rstrip(b"\0").decode()
    assert parameters == f"aes-xts-plain64 {bytes(range(64)).hex()} 0 /dev/sda 0"
    assert made.endswith(b"\0")


@pytest.mark.parametrize(
    ("words", "parameters"),
    [
        ((), f"1 /dev/sda /dev/sda 4096 4096 3 4 sha256 {HASH} -"),
        (("salt=00ff", "no-superblock=true"), f"1 /dev/sda /dev/sda 4096 4096 3 3 sha256 {HASH} 00ff"),
        (("blocksize=512", "hashsize=512", "hashtype=0"), f"0 /dev/sda /dev/sda 512 512 24 25 sha256 {HASH} -"),
    ],
)
def test_a_layers_hashes_are_behind_its_data(words: tuple[str, ...], parameters: str) -> None:
    given = ("X-kata.dmverity-enabled=true", f"X-kata.dmverity.roothash={HASH}", "X-kata.dmverity.hashoffset=12288")

    target = verity_target((*given, *(f"X-kata.dmverity.{word}" for word in words)), "/dev/sda")

    assert (target.type, target.sectors, target.is_read_only) == ("verity", 24, True)
    assert target.parameters == parameters


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((f"roothash={HASH}",), "no root hash or no offset"),
        (("hashoffset=4096",), "no root hash or no offset"),
        ((f"roothash={HASH}", "hashoffset=4097"), "4097 is not a multiple"),
        (("roothash=" + "zz" * 32, "hashoffset=4096"), "roothash=zz.*is not understood"),
        (("algorithm=md5",), "algorithm=md5' is not understood"),
        (("salt=00 1 restart_on_corruption",), "is not understood"),
        (("fec=1",), "fec=1' is not understood"),
    ],
)
def test_options_that_make_no_target_are_named(words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=f"verify '/dev/sda': .*{problem}"):
        verity_target(tuple(f"X-kata.dmverity.{word}" for word in words), "/dev/sda")
