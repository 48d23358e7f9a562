"""Free room between what a process has, filled, so that what its forks make lies together and not in every page.

Source: CPython 3.11, Objects/obmalloc.c: pools for each size up to 512 bytes; malloc(3) has the rest.
"""

import ctypes

from pyshim.host.memory.mappings import mappings

_POOL_BYTES = 1 << 14
_FEW = 4
_MOST = 1 << 16
_SIZES = range(16, 513, 16)
_LARGER_SIZES = (1 << 16, 1 << 15, 1 << 14, 1 << 13, 4096, 3072, 2048, 1536, 1024, 768, 512, 256, 128, 64, 24)
_libc = ctypes.PyDLL(None)
_libc.malloc.restype = ctypes.c_size_t
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.argtypes = (ctypes.c_size_t,)
_python = ctypes.pythonapi
_python.PyObject_Malloc.restype = ctypes.c_size_t
_python.PyObject_Malloc.argtypes = (ctypes.c_size_t,)
_python.PyObject_Free.argtypes = (ctypes.c_size_t,)


def fill_gaps() -> None:
    """The next thing of any size that this process or a fork makes lies among few that exist. Raises MemoryError."""
    for size in _SIZES:
        for _ in range(_MOST):
            address = _given(_python.PyObject_Malloc(size))
            if ctypes.c_uint.from_address(address & -_POOL_BYTES).value <= _FEW:
                _python.PyObject_Free(address)
                break
    end = max((each.end for each in mappings() if each.name == "[heap]"), default=0)
    for size in _LARGER_SIZES:
        for _ in range(_MOST):
            address = _given(_libc.malloc(size))
            if address > end:
                _libc.free(address)
                break


def _given(address: int) -> int:
    if not address:
        raise MemoryError
    return address
