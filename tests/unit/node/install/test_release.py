"""The programs that make a release."""

import signal
import subprocess
import threading
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from integration.framework.waiting import eventually
from pyshim import PYTHONS
from pyshim.model.errors import FailedPrecondition
from pyshim.node.cli.signals import undone_at_signals
from pyshim.node.install.plan import is_earlier
from pyshim.node.install.release import require_own_guest, run_step, supported_python


class Step:
    """A step of two processes, which name themselves in a file, and SIGTERM once they have."""

    def __init__(self, pids: Path) -> None:
        self._pids = pids
        self.command = ["sh", "-c", f"sleep 600 & echo $$ $! >{pids}; wait"]

    def interrupt(self) -> None:
        eventually(
            lambda: self._pids.exists() and len(self._pids.read_text().split()) == 2, what="both run", within_s=60
        )
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def run_interrupted(self) -> None:
        with pytest.raises(KeyboardInterrupt), undone_at_signals():
            run_step("wait", self.command)
        for pid in self._pids.read_text().split():
            eventually(partial(_is_ended, pid), what=f"process {pid} has ended", within_s=60)


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return Step(tmp_path / "pids")


def test_an_interrupted_step_ends_with_all_processes_that_it_started(step: Step) -> None:
    thread = threading.Thread(target=step.interrupt)
    thread.start()

    step.run_interrupted()

    thread.join()


def test_a_step_interrupted_before_popen_returns_ends_all_the_same(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            step.interrupt()

    monkeypatch.setattr(subprocess, "Popen", Interrupted)

    step.run_interrupted()


def _is_ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_python_without_locked_wheels_is_refused_by_name() -> None:
    assert [supported_python(version) for version in PYTHONS] == list(PYTHONS)
    with pytest.raises(FailedPrecondition, match=r"install for Python 3\.10: the supported versions are 3\.11, "):
        supported_python("3.10")


@pytest.mark.parametrize(("content", "refused"), [(b"ARMd", True), (b"none", False)])
def test_a_guest_of_another_processor_is_refused(tmp_path: Path, content: bytes, refused: bool) -> None:
    kernel = tmp_path / "vmlinux"
    kernel.write_bytes(bytes(0x38) + content)

    with (
        pytest.raises(FailedPrecondition, match="is for aarch64, and this node is x86_64") if refused else nullcontext()
    ):
        require_own_guest(str(kernel), "x86_64")


VERSIONS = ("0.1.0", "0.2.0.dev0", "0.2.0.dev9", "0.2.0.dev10", "0.2.0rc1", "0.2.0", "0.2.1", "0.10.0", "10.0.0")


@pytest.mark.parametrize(
    ("earlier", "later"),
    list(pairwise(VERSIONS)),
)
def test_versions_have_the_order_of_their_releases(earlier: str, later: str) -> None:
    assert is_earlier(earlier, later)
    assert not is_earlier(later, earlier)
    assert not is_earlier(later, later)


@pytest.mark.parametrize("unknown", ["", "unknown", "0.2", "0.2.0.post1"])
def test_a_version_that_is_not_one_of_ours_is_not_compared(unknown: str) -> None:
    assert not is_earlier(unknown, "0.2.0")
    assert not is_earlier("0.2.0", unknown)
