import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from start_bench import StartBench


@pytest.fixture
def bench() -> Iterator[StartBench]:
    # Not pytest's tmp_path: a socket's path must stay below 108 bytes.
    with tempfile.TemporaryDirectory(prefix="start-") as directory:
        bench = StartBench(Path(directory))
        yield bench
        bench.close()
