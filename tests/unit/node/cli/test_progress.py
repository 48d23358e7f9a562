"""A line about long work: on a terminal only, and never in what a program reads."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[4]
_PROGRAM = """
import time
from pyshim.node.cli.output import counted, steps
for item in counted(["a", "b"], "clean sandboxes"):
    print("did", item)
    time.sleep(0.2)  # the line is drawn ten times a second
with steps() as begin_step:
    begin_step("[restart] containerd")
    time.sleep(0.2)
print(list(counted([], "nothing")))
"""


def ran(*, terminal: bool) -> tuple[str, str]:
    """Its stdout, a pipe, and its stderr."""
    master, slave = pty.openpty() if terminal else os.pipe()  # read end, write end
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=slave, timeout=60
    )
    os.close(slave)
    said = b""
    try:
        while data := os.read(master, 65536):
            said += data
    except OSError:
        pass  # a terminal whose last user is gone
    os.close(master)
    assert done.returncode == 0, said
    return done.stdout.decode(), said.decode()


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_a_program_reads_the_same_whether_a_person_watches_or_not(terminal: bool) -> None:
    out, _ = ran(terminal=terminal)

    assert out == "did a\ndid b\n[]\n"


def test_only_a_terminal_gets_progress() -> None:
    _, shown = ran(terminal=True)
    _, written = ran(terminal=False)

    assert written == ""
    assert "clean sandboxes" in shown
    assert "2/2" in shown
    assert "[restart] containerd" in shown
