"""The files this process has open."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def same_open_files() -> Iterator[None]:
    """Exactly the files that were open before are open afterwards."""
    gc.collect()  # closes now what earlier tests left to it, which would else disappear meanwhile
    before = open_files()
    yield
    assert open_files() == before


def open_files() -> set[str]:
    """Each descriptor with what it is open on."""
    links = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            links.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # of the listing itself
            continue
    return links
