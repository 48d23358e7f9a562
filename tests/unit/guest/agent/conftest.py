"""Fixtures of the guest agent's tests."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_agent_client import AgentClient, HostedAgent, unused_id

from protos.agent import agent_pb2


@contextlib.contextmanager
def hosted(folder: Path) -> Iterator[HostedAgent]:
    for program in ("crun", "busybox", "unshare", "ip"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    agent = HostedAgent(folder)
    try:
        yield agent
    finally:
        agent.stop()


@pytest.fixture(scope="module")
def hosted_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostedAgent]:
    """A guest agent with a created sandbox, shared by the tests of a module."""
    with hosted(tmp_path_factory.mktemp("agent")) as agent:
        client = agent.connect()
        client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(hostname="guest-host", sandbox_id="sandbox"))
        yield agent


@pytest.fixture
def own_agent(tmp_path: Path) -> Iterator[HostedAgent]:
    """A guest agent of this test alone, without a sandbox."""
    with hosted(tmp_path) as agent:
        yield agent


@pytest.fixture
def client(hosted_agent: HostedAgent) -> Iterator[AgentClient]:
    connection = hosted_agent.connect()
    yield connection
    connection.close()


@pytest.fixture
def cid(client: AgentClient) -> str:
    """The id of a container that no other test has."""
    return unused_id()


@pytest.fixture
def sleeper(hosted_agent: HostedAgent, client: AgentClient) -> str:
    """A running container that does nothing until it is killed."""
    name = unused_id()
    client.run(hosted_agent.spec(["sleep", "1000"]), name)
    return name
