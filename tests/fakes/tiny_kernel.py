"""Kernels of a few bytes that QEMU boots like Linux: each does one thing to the machine and stops.

A bzImage as QEMU reads one: two sectors of real-mode set-up code that we write ourselves, and an unused rest. Sources:
the kernel's Documentation/x86/boot.rst for the header; QEMU's docs/specs/pvpanic and the q35 chipset for the ports.
"""

import struct

_CODE_OFFSET = 0x280

HALT = bytes([0xFA, 0xF4, 0xEB, 0xFD])  # cli; hlt; jmp to the hlt
RESET = bytes([0xB0, 0xFE, 0xE6, 0x64])  # the keyboard controller's reset line
POWER_OFF = bytes([0xBA, 0x04, 0x06, 0xB8, 0x00, 0x20, 0xEF])  # ACPI S5 through q35's PM1 control port 0x604
PANIC_EVENT = bytes([0xBA, 0x05, 0x05, 0xB0, 0x01, 0xEE])  # the pvpanic device at port 0x505
FLOOD = bytes([0xBA, 0xF8, 0x03, 0xB0, ord("x"), 0xEE, 0xEB, 0xFD])  # the serial port, for ever, without a newline


def say(text: str) -> bytes:
    """Code that prints `text` on the first serial port (each byte: mov al; out dx, al)."""
    return bytes([0xBA, 0xF8, 0x03]) + b"".join(bytes([0xB0, char, 0xEE]) for char in text.encode())


def bzimage(code: bytes) -> bytes:
    """A kernel whose set-up code is `code`."""
    image = bytearray(1024 + 4096)
    image[0x1F1] = 1  # sectors of set-up code after the first
    image[0x1FE:0x200] = b"\x55\xaa"
    image[0x200:0x202] = bytes([0xEB, _CODE_OFFSET - 0x202])
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", image, 0x206, 0x020C)
    image[0x211] = 1  # loaded high
    struct.pack_into("<I", image, 0x22C, 0x37FFFFFF)  # highest address of an initrd
    assert len(code) <= 1024 - _CODE_OFFSET
    image[_CODE_OFFSET : _CODE_OFFSET + len(code)] = code
    return bytes(image)
