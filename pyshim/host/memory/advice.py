"""What this process tells the C library and the kernel about its own memory."""

import ctypes
from collections.abc import Iterable

from pyshim.host.memory.mappings import written_to
from pyshim.host.syscalls import MADV_MERGEABLE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE, madvise


def give_back_free() -> None:
    """The pages that only freed memory of the C library's lies in are the kernel's again. Source: malloc_trim(3)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim is not None:
        trim(ctypes.c_size_t(0))


def keep_small_pages() -> None:
    """What is mapped now is never gathered into huge pages, whatever the node's setting.

    Else, where that is `always`, the kernel gives a fork huge pages of its own in which half of the small ones were
    still shared. Forks inherit this, programs that are executed do not: guests have huge pages. Raises OSError where
    the kernel has none. Source: madvise(2); kernel Documentation/admin-guide/mm/transhuge.rst, max_ptes_shared.
    """
    _advise(MADV_NOHUGEPAGE)


def offer_for_merging() -> None:
    """The kernel may keep equal pages once, of what is mapped now, wherever it is told to do that at all (ksm/run).

    Forks inherit it, programs that are executed do not: what a VMM maps is never offered. Every write to a merged page
    makes it private again. Raises OSError where the kernel cannot merge. Source: madvise(2), MADV_MERGEABLE.
    """
    _advise(MADV_MERGEABLE)


def make_own(runs: Iterable[tuple[int, int]]) -> None:
    """The pages from each start to its end are as if they had been written to. Raises OSError before Linux 5.14."""
    for start, end in runs:
        madvise(start, end - start, MADV_POPULATE_WRITE)


def _advise(advice: int) -> None:
    for mapping in written_to():
        madvise(mapping.start, mapping.end - mapping.start, advice)
