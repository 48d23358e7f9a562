"""The settings of a spec for the process and its surroundings: user, directory, environment, limits, devices, names.

`test_cri_pod_spec.py` has the others, `test_volumes.py` the mounts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .framework.ctr import Ctr, Result
from .framework.images import IMAGE
from .framework.runtime import Runtime

Script = Callable[[str], Result]


@pytest.fixture(scope="module")
def furnished(ctr: Ctr, runtime: Runtime, module_leaves_nothing: None) -> Iterator[str]:
    """A container with a device, a tmpfs, environment and directory, shared by this file."""
    name = "furnished"
    options = [
        *("--cwd", "/usr", "--env", "COLOUR=blue", "--env", "EMPTY=", "--device", "/dev/fuse"),
        *("--mount", "type=tmpfs,src=tmpfs,dst=/scratch,options=size=1m"),
    ]
    ctr("run", "--detach", "--runtime", runtime.name, *options, IMAGE, name, "sleep", "100000")
    try:
        yield name
    finally:
        ctr.remove([name])


@pytest.fixture
def inside(ctr: Ctr, furnished: str) -> Script:
    """Runs a shell script in the furnished container."""

    def run(script: str) -> Result:
        return ctr("task", "exec", "--exec-id", "inside", furnished, "sh", "-c", script, check=False)

    return run


def test_environment_and_directory_are_the_specs(inside: Script) -> None:
    result = inside("tr '\\0' '\\n' < /proc/1/environ; readlink /proc/1/cwd; pwd; echo $COLOUR")

    assert "COLOUR=blue" in result.lines
    assert "EMPTY=" in result.lines
    assert result.lines[-3:] == ["/usr", "/usr", "blue"]


def test_tmpfs_mount_has_the_size_it_was_given(inside: Script) -> None:
    result = inside("df -k /scratch | tail -1; head -c 2000000 /dev/zero > /scratch/big")

    assert result.out.split()[1] == "1024"
    assert result.code != 0


def test_device_is_there_with_its_numbers(inside: Script) -> None:
    assert inside("stat -c '%F %t:%T' /dev/fuse").out == "character special file a:e5\n"


def test_default_devices_are_there(inside: Script) -> None:
    result = inside(
        "for d in null zero full random urandom tty; do test -c /dev/$d || echo no $d; done; echo lost > /dev/null"
    )

    assert (result.code, result.out) == (0, "")


def test_device_that_was_not_given_cannot_be_opened(inside: Script) -> None:
    # Making the node is refused, or opening what was made.
    result = inside("mknod /dev/kmsg c 1 11 && head -c 1 /dev/kmsg")

    assert result.code != 0
