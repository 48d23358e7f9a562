"""Waiting for a container's processes and signalling them, by the guest agent and real crun on this host."""

from __future__ import annotations

import signal

import pytest
from guest_agent_client import AgentClient, HostedAgent, refused

from protos.agent import agent_pb2
from pyshim.ttrpc import Code

pytestmark = pytest.mark.root


def test_exit_is_latched_for_every_waiter_early_and_late(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.create(hosted_agent.spec(["sh", "-c", "exit 9"]), cid)
    early = [client.send("WaitProcess", agent_pb2.WaitProcessRequest(container_id=cid)) for _ in range(3)]
    client.start(cid)

    codes = [agent_pb2.WaitProcessResponse.FromString(client.wait(one)).status for one in early]

    assert codes == [9, 9, 9]
    assert client.exit_code(cid) == 9
    assert client.exit_code(cid) == 9


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_created_container_can_be_killed(
    hosted_agent: HostedAgent, client: AgentClient, cid: str, number: signal.Signals
) -> None:
    client.create(hosted_agent.spec(["sleep", "1000"]), cid)

    client.signal(cid, number)

    assert client.exit_code(cid) == 137


def test_sigterm_reaches_an_init_that_handles_it(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    script = "trap 'exit 42' TERM; echo ready; while :; do sleep 0.05; done"
    client.run(hosted_agent.spec(["sh", "-c", script]), cid)
    client.read(cid)

    client.signal(cid, signal.SIGTERM)

    assert client.exit_code(cid) == 42


def test_sigterm_ends_an_init_that_does_not_handle_it(client: AgentClient, sleeper: str) -> None:
    client.signal(sleeper, signal.SIGTERM)

    assert client.exit_code(sleeper) == 137


def test_sigkill_of_init_takes_execs_along(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sleep", "1000"])

    client.signal(sleeper, signal.SIGKILL)

    assert client.exit_code(sleeper, "e1") == 137
    assert client.exit_code(sleeper) == 137


def test_a_signal_after_exit_is_no_error(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.run(hosted_agent.spec(["true"]), cid)
    client.exit_code(cid)

    client.signal(cid, signal.SIGTERM)
    client.signal(cid, signal.SIGKILL)


@pytest.mark.parametrize("number", [0, 65, 1 << 31])
def test_a_number_that_is_no_signal_is_refused(client: AgentClient, sleeper: str, number: int) -> None:
    with refused(Code.INVALID_ARGUMENT):
        client.signal(sleeper, number)


def test_paused_container_makes_no_progress_until_resumed(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.run(hosted_agent.spec(["sh", "-c", "while read line; do echo got $line; done"]), cid)
    client.call("PauseContainer", agent_pb2.PauseContainerRequest(container_id=cid))
    client.write(cid, b"1\n")
    reading = client.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=cid, len=100))

    while_paused = client.is_answered(reading)
    client.call("ResumeContainer", agent_pb2.ResumeContainerRequest(container_id=cid))

    assert not while_paused
    assert agent_pb2.ReadStreamResponse.FromString(client.wait(reading)).data == b"got 1\n"


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("StartContainer", agent_pb2.StartContainerRequest),
        ("RemoveContainer", agent_pb2.RemoveContainerRequest),
        ("WaitProcess", agent_pb2.WaitProcessRequest),
        ("PauseContainer", agent_pb2.PauseContainerRequest),
        ("StatsContainer", agent_pb2.StatsContainerRequest),
        ("CloseStdin", agent_pb2.CloseStdinRequest),
        ("TtyWinResize", agent_pb2.TtyWinResizeRequest),
        ("UpdateContainer", agent_pb2.UpdateContainerRequest),
    ],
)
def test_an_unknown_container_is_not_found_by_any_call(client: AgentClient, method: str, request_type: type) -> None:
    with refused(Code.NOT_FOUND, "'ghost'"):
        client.call(method, request_type(container_id="ghost"))
