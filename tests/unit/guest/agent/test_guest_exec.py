"""Processes added to a container by the guest agent, with real crun on this host."""

from __future__ import annotations

import signal

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent, refused, until

from pyshim.ttrpc import Code

pytestmark = pytest.mark.root


def test_exec_has_its_own_streams_and_exit_code(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sh", "-c", "cat; echo err >&2; exit 5"])
    client.write(sleeper, b"to exec", "e1")
    client.close_stdin(sleeper, "e1")

    assert client.read_all(sleeper, "e1") == b"to exec"
    assert client.read_all(sleeper, "e1", method="ReadStderr") == b"err\n"
    assert client.exit_code(sleeper, "e1") == 5


def test_exec_fails_with_cruns_words_when_the_program_is_missing(client: AgentClient, sleeper: str) -> None:
    with pytest.raises(CallError, match="executable file `nope` not found"):
        client.execute(sleeper, "e1", ["nope"])

    with refused(Code.NOT_FOUND):
        client.exit_code(sleeper, "e1")


def test_an_exec_id_is_taken_while_it_runs_and_free_afterwards(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sleep", "1000"])

    with pytest.raises(CallError) as caught:
        client.execute(sleeper, "e1", ["true"])
    client.signal(sleeper, signal.SIGKILL, "e1")
    assert client.exit_code(sleeper, "e1") == 137
    client.execute(sleeper, "e1", ["sh", "-c", "exit 4"])

    assert caught.value.code == Code.ALREADY_EXISTS
    assert client.exit_code(sleeper, "e1") == 4


def test_init_answers_to_its_containers_id_and_no_exec_may_take_it(client: AgentClient, sleeper: str) -> None:
    with pytest.raises(CallError) as caught:
        client.execute(sleeper, sleeper, ["true"])
    client.signal(sleeper, signal.SIGKILL, sleeper)

    assert caught.value.code == Code.ALREADY_EXISTS
    assert client.exit_code(sleeper, sleeper) == 137
    assert client.exit_code(sleeper) == 137


def test_exec_in_an_exited_container_is_refused(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.run(hosted_agent.spec(["true"]), cid)
    client.exit_code(cid)

    with refused(Code.FAILED_PRECONDITION):
        client.execute(cid, "late", ["true"])


def test_many_execs_leave_no_file_descriptor_behind(
    hosted_agent: HostedAgent, client: AgentClient, sleeper: str
) -> None:
    client.execute(sleeper, "first", ["true"])
    client.exit_code(sleeper, "first")
    client.read_all(sleeper, "first")
    client.read_all(sleeper, "first", method="ReadStderr")
    client.close_stdin(sleeper, "first")
    before = hosted_agent.settled_fds()

    for number in range(10):
        name = f"probe{number}"
        client.execute(sleeper, name, ["true"])
        client.exit_code(sleeper, name)
        client.read_all(sleeper, name)
        client.read_all(sleeper, name, method="ReadStderr")
        client.close_stdin(sleeper, name)

    until(lambda: hosted_agent.open_fds() <= before, "the agent has more open than before")
