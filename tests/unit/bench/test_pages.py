"""Which pages of a fork are its own, and how they differ from those of the process it was forked from."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench import memory, pages
from bench.pages import PAGE

pytestmark = pytest.mark.root  # whose a page is, is secret


@contextmanager
def forked(shared: mmap.mmap) -> Iterator[int]:
    """A fork that has read page 0, written what was there to page 1, one byte to page 2 and all of page 3."""
    up_read, up_write = os.pipe()
    down_read, down_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(down_write)
        shared[0:1]
        shared[PAGE : PAGE + 8] = bytes(shared[PAGE : PAGE + 8])
        shared[2 * PAGE] = 255
        shared[3 * PAGE :] = b"\xaa" * PAGE
        os.write(up_write, b"x")
        os.read(down_read, 1)
        os._exit(0)
    try:
        os.read(up_read, 1)
        yield pid
    finally:
        os.close(down_write)
        os.waitpid(pid, 0)
        for fd in (up_read, up_write, down_read):
            os.close(fd)


def test_a_page_is_the_forks_own_once_it_was_written_whatever_was_written() -> None:
    shared = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared.write(b"\x55" * 4 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(shared))

    with forked(shared) as pid:
        found = pages.private_of(pid, os.getpid())

    assert [start + number * PAGE in found.pages for number in range(4)] == [False, True, True, True]
    assert sum(found.kinds.values()) == sum(found.places.values()) == len(found.pages) * pages.KIB_PER_PAGE


@pytest.mark.parametrize(
    ("words", "kind"), [(0, "unchanged"), (1, "few words"), (4, "few words"), (5, "rewritten"), (512, "rewritten")]
)
def test_a_page_is_judged_by_its_words_that_are_other(words: int, kind: str) -> None:
    ours = b"\x01" + bytes(7)

    assert pages._difference(ours * words + bytes(PAGE - 8 * words), bytes(PAGE)) == kind


def test_every_phase_and_place_is_in_the_text() -> None:
    phase = memory.Phase(
        name="idle",
        pss_mib=5.5,
        private_mib=4.25,
        newly_mib=4.0,
        kinds=dict.fromkeys(pages.KINDS, 1.0),
        places={"C heap": 2.75},
    )
    found = memory.Profile(zygote_mib=20.5, phases=[phase], many={"shims": 3.0, "PSS": 6.125})

    text = memory.as_text(found)

    for word in ("20.5", "idle", "5.50", "4.25", *pages.KINDS, "C heap", "2.75", "3 shims", "6.12"):
        assert word in text
