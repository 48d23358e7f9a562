"""Fixtures: one containerd and one image for the session, a scratch directory and a leak check for each test.

A run of all files (`scripts/integration`) has several sessions side by side, each in an enclosure of its own:
pytest-xdist gives each its next file of tests when it is free. The pytest that deals the files out is in no enclosure
and runs no test.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyshim.start.dialect import BINARY

from . import records
from .framework import boots, cri_session, crio, enclosure, evidence, images, kata_agent, shim_config, soak, zygote
from .framework.containerd import Containerd, missing_programs, remove_daemon_files
from .framework.cri import Cri
from .framework.cri_session import cri, pod, shared_pod  # noqa: F401  (fixtures)
from .framework.ctr import Ctr, Result
from .framework.daemon import Directories
from .framework.kubelet_volumes import PodDirectory
from .framework.leaks import HostState, assert_nothing_left
from .framework.remote_peer import peer, remote_network, remote_run  # noqa: F401  (fixtures)
from .framework.runtime import Runtime
from .framework.shim_modes import Mode, Starts

PROJECT = Path(__file__).resolve().parents[1]
# Below /run, so that it is private to the enclosure; not counted as a leak, unlike everything else there.
GROUND = Path("/run/pyshim-integration")
EVIDENCE = PROJECT / ".build" / "integration"
_NEEDED = ("containerd", "ctr", "runc", "ip", f"qemu-system-{os.uname().machine}")
_kept: set[Path] = set()
template = boots.Template(GROUND / "template")
session_zygote = zygote.Zygote(PROJECT / "bin" / BINARY, GROUND / "zygote.log")
shim_starts = Starts(
    *(ground / "containerd" / "containerd.log" for ground in (GROUND, cri_session.GROUND)),
    cri_session.GROUND / "crio" / "crio.log",
)
_made: Counter[str] = Counter()
"""The number of shims of all sessions by how they were made."""


def pytest_configure(config: pytest.Config) -> None:
    if os.geteuid() != 0:
        pytest.exit("integration tests need root", returncode=2)
    if config.getoption("dist") != "no" and not _is_worker(config):
        return
    if enclosure.MARK not in os.environ:
        pytest.exit(
            "integration tests run inside an enclosure: use `make test` or `scripts/integration [FILE...]`",
            returncode=2,
        )
    if missing := missing_programs(*_NEEDED):
        pytest.exit(f"integration tests need {', '.join(missing)} (hint: `make setup`)", returncode=2)
    if Runtime.chosen().has_vsock_program:
        if shutil.which(program := shim_config.VSOCK_PROGRAM) is None:
            pytest.exit(f"tests over vsock need {program} on PATH (hint: `cargo install {program}`)", returncode=2)
        GROUND.mkdir()
        shim_config.reach_agents_over_vsock(GROUND)
    if kata_agent.is_chosen():
        kata_agent.put_in_place(GROUND / "kata")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    runtime = Runtime.chosen()
    for item in items:
        item.add_marker(pytest.mark.root)
        item.add_marker(pytest.mark.containerd)
        if item.get_closest_marker("vm") and not runtime.has_vm:
            item.add_marker(pytest.mark.skip(reason=f"needs a runtime with a VM, not {runtime.name}"))
    if kata_agent.is_chosen():
        kata_agent.mark(items, kata_agent.differences())
    if crio.is_chosen():
        crio.mark(items)
    # Files with a test of many pods, which has a time limit of its own, come first: as the last one, such a file would
    # run while the other enclosures have nothing left to do.
    long = {item.path for item in items if item.get_closest_marker("timeout")}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keeps evidence at the moment of failure, before any fixture cleans up."""
    report = yield
    used = item.funcargs if isinstance(item, pytest.Function) else {}
    of_kubelet = used.get("cri")
    daemon = of_kubelet.daemon if isinstance(of_kubelet, Cri) else used.get("containerd")
    if report.failed and isinstance(daemon, Containerd):
        directory = evidence.directory_for(EVIDENCE / f"run-{os.environ.get('PYSHIM_RUN', 'last')}", item.nodeid)
        since = getattr(item, "containerd_log_size", 0)
        evidence.collect(directory / report.when, daemon, since)
        (directory / report.when / "failure.txt").write_text(report.longreprtext)
        report.sections.append(("evidence", str(directory)))
    return report


def _is_worker(config: pytest.Config) -> bool:
    """True if this is one of several sessions."""
    return hasattr(config, "workerinput")


def pytest_sessionfinish(session: pytest.Session) -> None:
    made = Counter(start.mode.value for start in shim_starts.seen)
    if _is_worker(session.config):
        session.config.workeroutput["shims"] = dict(made)  # type: ignore[attr-defined]
    _made.update(made)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of several sessions has ended."""
    _made.update(getattr(node, "workeroutput", {}).get("shims", {}))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _kept.update(Path(text) for title, text in report.sections if title == "evidence")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"{_made[Mode.FORKED]} shims were forked, {_made[Mode.EXECUTED]} executed")
    if what := os.environ.get(records.CHOICE):
        passed, failed, errors, skipped = (
            len(terminalreporter.stats.get(word, ())) for word in ("passed", "failed", "error", "skipped")
        )
        records.add(what, records.counted(passed=passed, failed=failed + errors, skipped=skipped))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _kept and not _is_worker(config):
        print(f"\n{len(_kept)} failures; logs, console, persisted state, ps and mounts of each are under:")
        print(next(iter(_kept)).parent)


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    return Runtime.chosen()


@pytest.fixture(scope="session")
def containerd() -> Iterator[Containerd]:
    """A containerd that is up, with the test image imported. At the end of the session nothing of it may be left."""
    before = HostState.look((GROUND,))
    daemon = Containerd(
        Directories(root=GROUND / "containerd", state=Path("/run/containerd")), binaries=PROJECT / "bin"
    )
    with contextlib.ExitStack() as end:
        end.callback(daemon.stop)
        daemon.start()
        archive = GROUND / "busybox.tar"
        images.write_archive(archive)
        daemon.ctr("images", "import", archive)
        yield daemon
    remove_daemon_files(daemon.directories)
    assert_nothing_left(before, (GROUND,))


@pytest.fixture(scope="session")
def ctr(containerd: Containerd) -> Ctr:
    return containerd.ctr


@pytest.fixture(scope="session")
def plain_rootfs() -> Path:
    return images.unpack_rootfs(GROUND / "rootfs")


@pytest.fixture(autouse=True, scope="module")
def module_leaves_nothing(request: pytest.FixtureRequest, containerd: Containerd, runtime: Runtime) -> Iterator[None]:
    """Set up before a file's shared containers and checked after they are gone; the zygote and the template that the
    file has are there meanwhile.
    """
    is_warm = boots.is_warm(request.path.stem)
    if is_warm:
        template.make()
    before = HostState.look((GROUND,))
    forked = runtime.has_vm and Mode.of_file(request.path.stem) is Mode.FORKED
    with (
        session_zygote if forked else contextlib.nullcontext(),
        template.bound() if is_warm else contextlib.nullcontext(),
    ):
        yield
    assert_nothing_left(before, (GROUND,))


@pytest.fixture(autouse=True)
def leaves_nothing(
    request: pytest.FixtureRequest, containerd: Containerd, runtime: Runtime, module_leaves_nothing: None
) -> Iterator[None]:
    """Each test leaves the host, and containerd's lists, as it found them; its shims were made as is meant."""
    request.node.containerd_log_size = containerd.log_size()
    before, listed = HostState.look((GROUND,)), _listed(containerd.ctr)
    yield
    assert_nothing_left(before, (GROUND,))
    assert _listed(containerd.ctr) == listed
    if runtime.has_vm:
        executed = request.node.get_closest_marker("executed")
        shim_starts.require(Mode.of_file(request.path.stem), executed_because=executed.args[0] if executed else "")
        shim_starts.require_truth()


def _listed(ctr: Ctr) -> tuple[list[str], list[str], list[str]]:
    tasks = ctr("task", "ls", "-q").lines
    return tasks, ctr("container", "ls", "-q").lines, [row["KEY"] for row in ctr("snapshot", "ls").rows()]


_names = itertools.count(1)


@pytest.fixture
def name(request: pytest.FixtureRequest, ctr: Ctr) -> Iterator[str]:
    """A container name of the test's own; whatever carries it is removed afterwards, also after a failure."""
    with own_name(ctr) as given:
        yield given


@contextlib.contextmanager
def own_name(ctr: Ctr) -> Iterator[str]:
    given = f"it{next(_names)}"
    try:
        yield given
    finally:
        leftover = [c for c in ctr("container", "ls", "-q").lines if c == given or c.startswith(f"{given}-")]
        if leftover:
            ctr.remove(leftover)


RunTask = Callable[..., Result]


@pytest.fixture
def run(ctr: Ctr, name: str) -> RunTask:
    """`ctr run --rm` of a command in the test image, to its end: `run("id", options=["--cwd", "/tmp"], code=None)`."""

    def run_task(
        *command: str, options: list[str] | None = None, code: int | None = 0, input: bytes | None = None
    ) -> Result:
        result = ctr.run(name, *command, options=options or [], input=input, check=False)
        assert code is None or result.code == code, f"expected code {code}: {result}"
        return result

    return run_task


@pytest.fixture(scope="module")
def shared(ctr: Ctr, module_leaves_nothing: None) -> Iterator[str]:
    """A running container for a whole file: tests that only `exec` in it share one VM."""
    with own_name(ctr) as given:
        ctr.start(given)
        yield given


@pytest.fixture
def soak_ground(runtime: Runtime, containerd: Containerd, scratch: Path, plain_rootfs: Path) -> soak.Ground:
    return soak.Ground(runtime=runtime, directory=scratch, rootfs=plain_rootfs)


@pytest.fixture
def kubelet(scratch: Path) -> Iterator[PodDirectory]:
    """A pod's directory as the kubelet lays it out, gone afterwards."""
    directory = PodDirectory(scratch)
    yield directory
    directory.remove()


@pytest.fixture
def scratch() -> Path:
    """An empty directory below the ground."""
    directory = GROUND / "scratch" / str(next(_names))
    directory.mkdir(parents=True)
    return directory
