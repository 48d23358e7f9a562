"""Work of crun that the guest agent does itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent

from guest.agent.container import crun


@pytest.mark.root
def test_crun_knows_when_a_container_is_started(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    def status() -> object:
        enter = ["nsenter", "--target", str(hosted_agent.pid()), "--mount", "--pid"]
        command = ["crun", f"--root={crun.RUN_DIR}/crun", "state", cid]
        return json.loads(subprocess.run([*enter, *command], capture_output=True, check=True).stdout)["status"]

    client.create(hosted_agent.spec(["sleep", "1000"]), cid)
    before = status()
    client.start(cid)

    assert (before, status()) == ("created", "running")


@pytest.mark.root
def test_a_start_after_inits_death_fails_with_a_reason(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.create(hosted_agent.spec(["sleep", "1000"]), cid)
    client.signal(cid, signal.SIGKILL)
    client.exit_code(cid)

    with pytest.raises(CallError, match="init has already exited"):
        client.start(cid)


def test_a_waiting_init_is_started_by_one_byte_and_cannot_be_a_second_time(tmp_path: Path) -> None:
    fifo = tmp_path / "exec.fifo"
    os.mkfifo(fifo)
    init = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert crun._start_init(str(fifo))
        assert not crun._start_init(str(fifo))
        assert os.read(init, 10) == b"\0"
    finally:
        os.close(init)


def test_an_init_that_is_gone_is_left_to_crun(tmp_path: Path) -> None:
    fifo = tmp_path / "exec.fifo"
    os.mkfifo(fifo)

    assert not crun._start_init(str(fifo))
    assert fifo.exists()
