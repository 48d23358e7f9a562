"""Instructions that Python has no words for, executed in this process."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_prototype = cache(ctypes.PYFUNCTYPE)


@contextmanager
def executable(code: bytes, result: Any, *arguments: Any) -> Iterator[Callable[..., Any]]:
    """`code`, of x86-64 and in the System V calling convention, as a function of these C types within the block.

    Python stands still while it runs: no other thread of the interpreter's goes on. Raises OSError where the
    architecture or the host's policy forbids it.
    """
    if os.uname().machine != "x86_64":
        raise OSError(f"no x86-64 instructions on {os.uname().machine}")
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(code)
        start = ctypes.c_char.from_buffer(page)
        try:
            yield _prototype(result, *arguments)(ctypes.addressof(start))
        finally:
            del start  # the page cannot be unmapped while it points there
