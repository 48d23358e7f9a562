"""The CPUID instruction: from the kernel's cpuid device where there is one, else executed in this process.

The instruction needs no privilege; the device needs a module that few hosts load. Nothing here runs on a host whose
kernel offers no memory encryption.
"""

import os
import struct
from typing import NamedTuple

_CODE = bytes.fromhex(
    "53"  # push rbx, which belongs to the caller
    "89f8"  # mov eax, edi
    "89f1"  # mov ecx, esi
    "4989d0"  # mov r8, rdx
    "0fa2"  # cpuid
    "418900"  # mov [r8], eax
    "41895804"  # mov [r8+4], ebx
    "41894808"  # mov [r8+8], ecx
    "4189500c"  # mov [r8+12], edx
    "5b"  # pop rbx
    "c3"  # ret
)
"""void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t out[4]) in the System V calling convention of x86-64."""


class Registers(NamedTuple):
    eax: int
    ebx: int
    ecx: int
    edx: int


def cpuid(leaf: int, *, device: str = "/dev/cpu/0/cpuid") -> Registers:
    """The registers after CPUID with `leaf`, sub-leaf 0. Raises OSError where neither way is open."""
    try:
        fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return executed(leaf)
    try:
        return Registers(*struct.unpack("<4I", os.pread(fd, 16, leaf)))
    finally:
        os.close(fd)


def executed(leaf: int) -> Registers:
    """As `cpuid`, by the instruction itself. Raises OSError where the architecture or the host's policy forbids it."""
    import ctypes

    from pyshim.host.machine_code import executable

    out = (ctypes.c_uint32 * 4)()
    with executable(_CODE, None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p) as function:
        function(leaf, 0, ctypes.addressof(out))
    return Registers(*out)
