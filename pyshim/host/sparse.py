"""Copies of files that keep their holes."""

import errno
import os
from collections.abc import Iterator

from pyshim.host.fds import OwnedFd

_PAGE_BYTES = 4096
_ZEROS = bytes(_PAGE_BYTES)


def copy_sparse(source: OwnedFd, target: OwnedFd) -> None:
    """`target`, only a hole so far, has the content of `source`, and holes where that has some. Raises OSError.

    It grows to the size of `source`, and does not shrink: others may have mapped it.
    """
    if os.fstat(target.fileno()).st_size < (size := os.fstat(source.fileno()).st_size):
        os.truncate(target.fileno(), size)
    for start, end in _data(source.fileno()):
        os.lseek(target.fileno(), start, os.SEEK_SET)
        while start < end:
            sent = os.sendfile(target.fileno(), source.fileno(), start, end - start)
            if not sent:
                raise OSError(errno.EIO, "the file became shorter while it was copied")
            start += sent


def copy_without_zeros(source: OwnedFd, target: OwnedFd) -> None:
    """As `copy_sparse`, with holes for pages of zeros as well: a guest's kernel touches many and leaves them so."""
    os.truncate(target.fileno(), os.fstat(source.fileno()).st_size)
    for start, end in _data(source.fileno()):
        for offset in range(start, end, _PAGE_BYTES):
            page = os.pread(source.fileno(), _PAGE_BYTES, offset)
            if page != _ZEROS[: len(page)]:
                os.pwrite(target.fileno(), page, offset)


def _data(fd: int) -> Iterator[tuple[int, int]]:
    """The pieces that are no holes. Source: lseek(2)."""
    end = 0
    while True:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, end
