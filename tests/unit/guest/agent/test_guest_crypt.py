"""Encrypted disks: the table that the kernel gets. `integration/test_no_shared_fs.py` uses one in a real VM."""

from __future__ import annotations

import struct

from guest.agent.storage.crypt import crypt_table


def test_the_table_is_one_aligned_target_over_the_whole_disk() -> None:
    table = crypt_table(2048, "/dev/sda", bytes(range(64)))

    start, sectors, status, following, kind = struct.unpack_from("=QQiI16s", table)
    assert (start, sectors, status, kind.rstrip(b"\0")) == (0, 2048, 0, b"crypt")
    assert (following, len(table) % 8) == (len(table), 0)
    parameters = table[40:].rstrip(b"\0").decode()
    assert parameters == f"aes-xts-plain64 {bytes(range(64)).hex()} 0 /dev/sda 0"
    assert table.endswith(b"\0")
