"""Sets the text that /proc/PID/cmdline shows of this process."""

import ctypes
import mmap
import os

from pyshim.host.processes.stat import stat_fields

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_NO_FD = 0xFFFFFFFF
_kept: list[mmap.mmap] = []


class _MemoryMap(ctypes.Structure):
    """struct prctl_mm_map. Source: linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk")),
        *((name, ctypes.c_uint64) for name in ("brk", "start_stack", "arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def set_command_line(words: list[str]) -> None:
    """`/proc/self/cmdline` holds `words`, as if they had been executed. Raises OSError if the kernel refuses.

    Source: prctl(2), PR_SET_MM_MAP; the other parts of the map are in /proc/PID/stat, proc(5).
    """
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    region = mmap.mmap(-1, len(text), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.write(text)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    fields = [0, 0, 0, *map(int, stat_fields("self")[1:])]  # at field number less one
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    memory_map = _MemoryMap(
        start_code=fields[25],
        end_code=fields[26],
        start_stack=fields[27],
        start_data=fields[44],
        end_data=fields[45],
        start_brk=fields[46],
        brk=libc.sbrk(0),
        arg_start=start,
        arg_end=start + len(text),
        env_start=fields[49],
        env_end=fields[50],
        exe_fd=_NO_FD,
    )
    size = ctypes.c_ulong(ctypes.sizeof(memory_map))
    if libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(memory_map), size, ctypes.c_ulong(0)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _kept.append(region)
