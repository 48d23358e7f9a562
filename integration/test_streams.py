"""Standard streams: large data byte for byte, end of input, back-pressure."""

from __future__ import annotations

import hashlib
import random
import subprocess
from pathlib import Path

import pytest

from .framework.ctr import Ctr
from .framework.waiting import eventually

_LARGE_BYTES = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def large() -> bytes:
    """Data without a pattern: a lost, doubled or moved piece changes the digest."""
    return random.Random(64).randbytes(_LARGE_BYTES)


def test_64_mib_through_stdin_and_back_through_stdout_are_the_same_bytes(ctr: Ctr, shared: str, large: bytes) -> None:
    result = ctr.inside(shared, "cat", input=large)

    assert len(result.stdout) == len(large)
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(large).digest()


@pytest.mark.parametrize("data", [b"", b"some lines\nno newline at the end"], ids=["nothing", "lines"])
def test_end_of_the_clients_input_is_end_of_input_for_the_process(
    ctr: Ctr, shared: str, scratch: Path, data: bytes
) -> None:
    script = "echo ready; wc -c; echo ended"
    words = ("task", "exec", "--exec-id", f"end{len(data)}", shared, "sh", "-c", script)
    with ctr.background(scratch, *words, stdin=subprocess.PIPE) as running:
        # Input that ends before the process is started is lost by the reference shim; see test_task_api for ours.
        running.wait_for("ready")
        assert running.process.stdin is not None
        running.process.stdin.write(data)
        running.process.stdin.close()

        assert running.wait(30).out == f"ready\n{len(data)}\nended\n"


def test_input_the_process_does_not_read_does_not_keep_it_from_ending(ctr: Ctr, shared: str) -> None:
    # ctr holds more input than any pipe on the way takes; the process reads none of it.
    result = ctr.inside(shared, "sh", "-c", "exit 9", input=b"x" * 300_000, check=False)

    assert result.code == 9


def test_a_client_that_does_not_read_stops_the_process_and_loses_nothing(ctr: Ctr, shared: str, scratch: Path) -> None:
    """Back-pressure: without a reader the writer stands still instead of filling memory."""
    size, progress = 32 * 1024 * 1024, "/tmp/progress"
    script = f"i=0; while [ $i -lt 512 ]; do head -c 65536 /dev/zero; i=$((i+1)); echo $i > {progress}; done"
    argv = ctr.argv("task", "exec", "--exec-id", "slow", shared, "sh", "-c", script)
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        seen = [-1, -2]

        def stands_still() -> bool:
            done = ctr.inside(shared, "cat", progress, check=False).out.strip()
            seen.append(int(done or 0))
            return seen[-1] == seen[-2] == seen[-3] > 0

        eventually(stands_still, what="the writer stands still without a reader", every_s=0.5)
        assert seen[-1] < 512
        assert len(process.stdout.read()) == size
        assert process.wait(60) == 0
    finally:
        process.stdout.close()
        if process.poll() is None:
            process.kill()
            process.wait()


def test_output_of_a_background_child_ends_with_the_process_that_owns_the_exec(ctr: Ctr, shared: str) -> None:
    """A grandchild that keeps the pipe open must not keep `exec` from returning."""
    script = "sleep 8 & echo started; exit 6"

    result = ctr.inside(shared, "sh", "-c", script, check=False, within_s=60)

    assert (result.code, result.out) == (6, "started\n")


def test_a_background_child_that_prints_on_is_cut_when_the_exec_has_ended(ctr: Ctr, shared: str) -> None:
    result = ctr.inside(shared, "sh", "-c", "(yes) & exit 7", check=False, within_s=60)

    assert result.code == 7
    assert result.out.startswith("y\ny\n")


def test_null_io_runs_without_any_stream(ctr: Ctr, name: str) -> None:
    result = ctr.run(name, "sh", "-c", "echo lost; exit 11", options=["--null-io"], check=False)

    assert (result.code, result.out) == (11, "")


@pytest.mark.parametrize("scheme", ["file", "binary"])
def test_log_uri_receives_the_output(ctr: Ctr, name: str, scratch: Path, scheme: str) -> None:
    log = scratch / "deep" / "er" / "out.log"
    uri = f"file://{log}"
    if scheme == "binary":
        log = scratch / "out.log"
        logger = scratch / "logger"
        # fd 3 and 4 are the container's streams, fd 5 says the logger is ready (shim-contract of containerd's logging
        # package).
        logger.write_text(
            f'#!/bin/sh\necho "$CONTAINER_ID" >"{log}"\nexec 5>&-\ncat <&4 >"{log}.err" &\nexec cat <&3 >>"{log}"\n'
        )
        logger.chmod(0o755)
        uri = f"binary://{logger}"

    ctr.start(name, "--log-uri", uri, command=("sh", "-c", "echo kept; exit 0"))
    ctr.wait_for_state(name, "STOPPED")
    ctr("task", "rm", name)

    expected = "kept\n" if scheme == "file" else f"{name}\nkept\n"
    eventually(
        lambda: log.exists() and log.read_text() == expected,
        what=lambda: f"{expected!r} in the log: {log.read_text()!r}",
    )
