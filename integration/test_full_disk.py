"""The file system of a sandbox's state is full or read-only: a pod is refused with the reason, or runs on and ends."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .framework.ctr import Ctr
from .framework.runtime import Runtime
from .framework.waiting import eventually
from .test_cleanup import pyshim

pytestmark = pytest.mark.vm


def fill(place: Path) -> None:
    with (place / "filler").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(512)):
                pass
        except OSError:
            return


def use_up_inodes(place: Path) -> None:
    with contextlib.suppress(OSError):
        for number in itertools.count():
            (place / f"filler{number}").touch()


def freeze(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)


BREAKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "full": (fill, "no space left on device"),
    "without inodes": (use_up_inodes, "no space left on device"),
    "read-only": (freeze, "read-only file system"),
}


@pytest.fixture
def place(runtime: Runtime, name: str) -> Iterator[Path]:
    """The sandbox's state directory as a file system of its own; what is left of the sandbox is cleaned in the end."""
    place = runtime.persisted(name).parent
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k,nr_inodes=64", "small", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)
    # The shim may still be ending: until it has, its sandbox is not cleaned.
    eventually(lambda: pyshim("cleanup", name).returncode == 0, what="nothing of the sandbox is left", every_s=0.5)
    if place.exists():
        place.rmdir()


@pytest.mark.parametrize("how", list(BREAKS))
def test_a_pod_whose_state_cannot_be_written_is_refused_with_the_reason(
    ctr: Ctr, runtime: Runtime, name: str, place: Path, how: str
) -> None:
    breaks, reason = BREAKS[how]
    breaks(place)

    done = ctr.run(name, "true", check=False)

    assert done.code != 0
    assert f"write state '{place}'" in done.err
    assert reason in done.err
    assert not (runtime.vmms(name) + runtime.virtiofsds(name))


def test_a_pod_whose_state_disk_fills_up_serves_on_and_ends_as_usual(
    ctr: Ctr, runtime: Runtime, name: str, place: Path
) -> None:
    ctr.start(name)
    fill(place)

    assert ctr.inside(name, "echo", "here").out == "here\n"
    ctr("task", "kill", "--signal", "KILL", name)
    ctr.wait_for_state(name, "STOPPED")
    assert "exit code 137" in ctr("task", "rm", name).err
    eventually(lambda: not (runtime.vmms(name) + runtime.virtiofsds(name)), what="the VM is gone")
