import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from delete_node import DEADLINE_S, Node
from start_bench import StartBench

from pyshim.cleanup import leftovers


@pytest.fixture(params=["executed", "forked"])
def bench(request: pytest.FixtureRequest) -> Iterator[StartBench]:
    """Every test of `start` runs in both ways of making the daemon, and may not see a difference."""
    with _bench() as bench:
        if request.param == "forked":
            bench.with_zygote(modules="json")
        yield bench
        assert bench.zygote is None or bench.zygote.process.poll() is None, bench.zygote.said


@pytest.fixture
def bare_bench() -> Iterator[StartBench]:
    """Without a zygote, until the test makes one."""
    with _bench() as bench:
        yield bench


@contextmanager
def _bench() -> Iterator[StartBench]:
    # Not pytest's tmp_path: a socket's path must stay below 108 bytes.
    with tempfile.TemporaryDirectory(prefix="start-") as directory:
        bench = StartBench(Path(directory))
        try:
            yield bench
        finally:
            bench.close()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A daemon that obeys a signal has time enough to do so; none is on its way out, unless the test says so."""
    monkeypatch.setattr(leftovers, "EXIT_WAIT_S", 0.01)
    monkeypatch.setattr(leftovers, "TERM_WAIT_S", DEADLINE_S)
    found = Node(tmp_path)
    yield found
    found.end()
