"""What a file with a Linux kernel says of itself."""

import re

_SIGNATURE_AT, _SIGNATURE, _VERSION_AT, _HEADER_BYTES = 0x202, b"HdrS", 0x20E, 0x210
"""Of a bzImage. `_VERSION_AT` has the place of its version text, counted from 0x200. Source: kernel
Documentation/arch/x86/boot.rst, the real-mode kernel header."""
_BANNER = re.compile(rb"Linux version (\d\S*)\s")
"""In an ELF kernel: what it prints first, and `/proc/version` has."""
_RELEASE = re.compile(rb"\d\S*")
_TEXT_BYTES = 256
_PIECE_BYTES = 1 << 20


def kernel_release(path: str) -> str:
    """The release of the kernel in a bzImage or an uncompressed file, such as `6.12.57-amd64`; empty without one.

    Raises OSError.
    """
    with open(path, "rb") as file:
        piece = file.read(_HEADER_BYTES)
        if piece[_SIGNATURE_AT:].startswith(_SIGNATURE):
            file.seek(0x200 + int.from_bytes(piece[_VERSION_AT:], "little"))
            found = _RELEASE.match(file.read(_TEXT_BYTES))
            return found[0].decode("ascii", "replace") if found else ""
        while True:
            more = file.read(_PIECE_BYTES)
            piece = piece[-_TEXT_BYTES:] + more  # a banner between two pieces is found in the second
            if found := _BANNER.search(piece):
                return found[1].decode("ascii", "replace")
            if not more:
                return ""
