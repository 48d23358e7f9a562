"""Runs inside a container, on the directory of its argument: prints one line for each broken POSIX promise.

The promises are those that the options of a file server or a disk can break.

Standard library only; no import of the project's. The last line is `checked N`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Iterator

_BINDS_LOW_PORTS = bytes.fromhex("0100000200040000" + "00" * 12)
"""The attribute `security.capability` of `cap_net_bind_service=ep`. Source: struct vfs_cap_data, linux/capability.h."""


def rename_replaces_and_is_seen_whole(d: str) -> None:
    write(f"{d}/a", b"new")
    write(f"{d}/b", b"old")
    held = os.open(f"{d}/b", os.O_RDONLY)
    os.rename(f"{d}/a", f"{d}/b")
    assert read(f"{d}/b") == b"new"
    assert not os.path.exists(f"{d}/a")
    assert os.read(held, 10) == b"old", "an open file survives its replacement"
    os.close(held)
    os.mkdir(f"{d}/dir")
    write(f"{d}/dir/x", b"")
    with refused(errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
        os.rename(f"{d}/b", f"{d}/dir")


def a_sparse_file_takes_no_room(d: str) -> None:
    with open(f"{d}/a", "wb") as file:
        file.truncate(64 << 20)
        file.seek(32 << 20)
        file.write(b"middle")
    found = os.stat(f"{d}/a")
    assert found.st_size == 64 << 20
    assert found.st_blocks * 512 < 1 << 20
    with open(f"{d}/a", "rb") as file:
        assert file.read(4) == bytes(4)
        file.seek(32 << 20)
        assert file.read(6) == b"middle"
    os.truncate(f"{d}/a", 3)
    assert read(f"{d}/a") == bytes(3)


def a_private_and_a_shared_mapping(d: str) -> None:
    write(f"{d}/a", b"a" * 8192)
    with open(f"{d}/a", "r+b") as file:
        private = mmap.mmap(file.fileno(), 8192, mmap.MAP_PRIVATE)
        private[0:1] = b"P"
        assert read(f"{d}/a")[:1] == b"a"
        shared = mmap.mmap(file.fileno(), 8192, mmap.MAP_SHARED)
        shared[4096:4097] = b"S"
        shared.flush()
        assert read(f"{d}/a")[4096:4097] == b"S"
        shared.close()
        private.close()


def locks_exclude_another_process(d: str) -> None:
    write(f"{d}/a", b"12345678")
    with open(f"{d}/a", "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 4, 0)
        assert in_child(lambda other: fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB, 4, 0), f"{d}/a") == "refused"
        assert in_child(lambda other: fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB, 4, 4), f"{d}/a") == "taken"
        fcntl.lockf(file, fcntl.LOCK_UN)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert in_child(lambda other: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB), f"{d}/a") == "refused"


def in_child(take: Callable[[int], None], path: str) -> str:
    pid = os.fork()
    if pid == 0:
        try:
            with open(path, "r+b") as other:
                take(other.fileno())
            os._exit(0)
        except OSError:
            os._exit(1)
        finally:
            os._exit(2)
    return {0: "taken", 1: "refused"}.get(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "failed")


def direct_io(d: str) -> str | None:
    try:
        fd = os.open(f"{d}/a", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return "unsupported"
    block = mmap.mmap(-1, 4096)
    block[:] = b"d" * 4096
    assert os.pwritev(fd, [block], 4096) == 4096
    block[:] = bytes(4096)
    assert os.preadv(fd, [block], 4096) == 4096
    assert block[:] == b"d" * 4096
    os.close(fd)
    return None


def extended_attributes(d: str) -> str | None:
    write(f"{d}/a", b"")
    try:
        os.setxattr(f"{d}/a", "user.note", b"value")
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS):
            raise
        return "unsupported"
    assert os.getxattr(f"{d}/a", "user.note") == b"value"
    assert "user.note" in os.listxattr(f"{d}/a")
    os.removexattr(f"{d}/a", "user.note")
    return None


def a_write_by_another_user_takes_privileges_away(d: str) -> None:
    def as_user(change: Callable[[int], object]) -> Callable[[int], None]:
        def take(fd: int) -> None:
            os.setgroups([])
            os.setgid(1000)
            os.setuid(1000)
            change(fd)

        return take

    for change in (as_user(lambda fd: os.write(fd, b"more")), as_user(lambda fd: os.truncate(fd, 3))):
        write(f"{d}/a", b"program")
        os.setxattr(f"{d}/a", "security.capability", _BINDS_LOW_PORTS)
        os.chmod(f"{d}/a", 0o6777)
        assert in_child(change, f"{d}/a") == "taken"
        assert os.stat(f"{d}/a").st_mode & 0o7777 == 0o777
        with refused(errno.ENODATA):
            os.getxattr(f"{d}/a", "security.capability")


def write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@contextlib.contextmanager
def refused(*numbers: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
    else:
        raise AssertionError("was not refused")


CHECKS: tuple[Callable[[str], str | None], ...] = (
    rename_replaces_and_is_seen_whole,
    a_sparse_file_takes_no_room,
    a_private_and_a_shared_mapping,
    locks_exclude_another_process,
    direct_io,
    extended_attributes,
    a_write_by_another_user_takes_privileges_away,
)


def main(top: str) -> None:
    for check in CHECKS:
        place = os.path.join(top, check.__name__)
        os.mkdir(place)
        try:
            note = check(place)
        except (AssertionError, OSError) as error:
            own = error.__traceback__ and error.__traceback__.tb_next
            print(f"broken: {check.__name__}: line {own.tb_lineno if own else 0}: {error}")
        else:
            if note:
                print(f"{note}: {check.__name__}")
    print(f"checked {len(CHECKS)}")


if __name__ == "__main__":
    main(sys.argv[1])
