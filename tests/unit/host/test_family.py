"""A process's descendants, on real processes that fork at the worst moment."""

import os
import subprocess
from contextlib import suppress

from pyshim.host.processes.identity import family

FORKS_WHEN_ASKED = "while read -r _; do sleep 1000 & echo $!; done"


def test_a_child_forked_while_its_parent_is_moved_is_in_the_family() -> None:
    parent = subprocess.Popen(
        ("sh", "-c", FORKS_WHEN_ASKED), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    forked, moved = [], []

    def fork() -> None:
        parent.stdin.write("\n")
        forked.append(int(parent.stdout.readline()))

    try:
        fork()
        for pid in family((parent.pid,)):
            if len(moved) < 2:
                fork()  # once as the parent is moved, once as its first child is
            moved.append(pid)

        assert moved[0] == parent.pid
        assert sorted(moved[1:]) == sorted(forked)
    finally:
        for pid in (*forked, parent.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        parent.communicate()


def test_the_family_of_a_process_that_is_gone_is_its_number_alone() -> None:
    gone = subprocess.Popen(("true",))
    gone.wait()

    assert list(family((gone.pid,))) == [gone.pid]
