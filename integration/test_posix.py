"""POSIX promises on a container's file systems: `posix_check.py` run inside, by the host's Python. For disks, see
`test_disks.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from protos.cri import v1_pb2 as pb

from .framework.cri import Container, Pod

pytestmark = pytest.mark.vm

_CHECK = Path(__file__).with_name("posix_check.py")
_HOSTS = ("/usr", "/lib", "/lib64")
SHARED_LACKS = {"unsupported: extended_attributes"}
"""Where the test's directory is on a tmpfs of the host: it has those of users since Linux 6.6."""
MEMORY_LACKS = {"unsupported: extended_attributes", "unsupported: direct_io"}
"""tmpfs has them since Linux 6.6, both."""


def checked(container: Container, directory: str) -> set[str]:
    done = container.exec(os.path.realpath(sys.executable), "-I", "-S", "/check.py", directory, timeout=120)
    assert done.code == 0, done
    *notes, last = done.out.splitlines()
    assert last.startswith("checked "), done.out
    return set(notes)


def test_posix_promises_hold_on_shared_directories_and_in_the_guests_memory(pod: Pod, scratch: Path) -> None:
    (scratch / "shared").mkdir()
    mounts = [pb.Mount(host_path=path, container_path=path, readonly=True) for path in _HOSTS if Path(path).is_dir()]
    mounts.append(pb.Mount(host_path=str(scratch / "shared"), container_path="/shared"))
    mounts.append(pb.Mount(host_path=str(_CHECK), container_path="/check.py", readonly=True))
    container = pod.start(mounts=mounts)

    assert checked(container, "/shared") <= SHARED_LACKS
    assert checked(container, "/dev/shm") <= MEMORY_LACKS
