"""Fixtures of the guest agent's tests."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from guest_agent_client import AgentClient, HostedAgent

from protos.agent import agent_pb2

_names = (f"s{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def hosted_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedAgent]:
    """A guest agent with a created sandbox, shared by the tests of a module."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for program in ("crun", "busybox", "unshare", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    agent = HostedAgent(tmp_path_factory.mktemp("agent"))
    try:
        client = agent.connect()
        client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(hostname="guest-host", sandbox_id="sandbox"))
        yield agent
    finally:
        agent.stop()


@pytest.fixture
def client(hosted_agent: HostedAgent) -> Iterator[AgentClient]:
    connection = hosted_agent.connect()
    yield connection
    connection.close()


@pytest.fixture
def cid(client: AgentClient) -> str:
    """The id of a container that nobody else has."""
    return next(_names)
