"""containerd goes away and comes back; the tasks stay, and stay under control."""

from __future__ import annotations

from .framework.containerd import Containerd
from .framework.ctr import Ctr


def test_output_written_without_a_reader_does_not_end_the_task(containerd: Containerd, ctr: Ctr, name: str) -> None:
    """The reader of the FIFOs vanishes with its client: no SIGPIPE, no end of the container."""
    script = "while :; do echo line; sleep 0.1; done"
    ctr.start(name, command=("sh", "-c", script))

    containerd.restart()

    assert ctr.state_of(name) == "RUNNING"
    assert ctr.inside(name, "echo", "here").out == "here\n"
