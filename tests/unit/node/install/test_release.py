"""The programs that make a release."""

import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from integration.framework.waiting import eventually
from pyshim.node.cli.install import undone_at_sigterm
from pyshim.node.install.release import run_step


def test_an_interrupted_step_ends_with_all_processes_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $$ $! >{pids}; wait"

    def interrupt() -> None:
        eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2, what="both run", within_s=60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt), undone_at_sigterm():
        run_step("wait", ["sh", "-c", script])
    thread.join()

    def is_ended(pid: str) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    for pid in pids.read_text().split():
        eventually(partial(is_ended, pid), what=f"process {pid} has ended", within_s=60)
