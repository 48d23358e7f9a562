"""Stdin, stdout, stderr and terminals of a container, by the guest agent and real crun on this host."""

from __future__ import annotations

import signal

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent, refused

from protos.agent import agent_pb2
from pyshim.ttrpc import Code

pytestmark = pytest.mark.root


# -- streams ---------------------------------------------------------------------------------------------------------


def test_output_written_just_before_exit_is_complete_after_the_exit_is_known(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.run(hosted_agent.spec(["head", "-c", "60000", "/dev/zero"]), cid)

    assert client.exit_code(cid) == 0
    assert len(client.read_all(cid)) == 60000
    assert client.read(cid) == b""


def test_a_writer_is_held_back_without_a_reader(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.run(hosted_agent.spec(["sh", "-c", "head -c 1000000 /dev/zero; echo done >&2"]), cid)
    finished = client.send("ReadStderr", agent_pb2.ReadStreamRequest(container_id=cid, len=100))

    before = client.is_answered(finished)
    size = len(client.read_all(cid))

    assert not before
    assert size == 1000000
    assert agent_pb2.ReadStreamResponse.FromString(client.wait(finished)).data == b"done\n"


def test_a_blocked_stdin_write_holds_up_no_other_call(client: AgentClient, sleeper: str) -> None:
    stuck = client.send("WriteStdin", agent_pb2.WriteStreamRequest(container_id=sleeper, data=bytes(1 << 20)))

    client.execute(sleeper, "e1", ["sh", "-c", "exit 6"])

    assert client.exit_code(sleeper, "e1") == 6
    client.signal(sleeper, signal.SIGKILL)
    with refused(Code.FAILED_PRECONDITION):
        client.wait(stuck)


def test_concurrent_reads_each_get_their_own_bytes_in_order(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.run(hosted_agent.spec(["cat"]), cid)
    reads = [client.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=cid, len=2)) for _ in range(3)]

    client.write(cid, b"aabbcc")

    assert [agent_pb2.ReadStreamResponse.FromString(client.wait(one)).data for one in reads] == [b"aa", b"bb", b"cc"]


def test_a_read_given_up_by_its_connection_takes_no_bytes(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.run(hosted_agent.spec(["cat"]), cid)
    gone = hosted_agent.connect()
    gone.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=cid, len=100))
    gone.call("Check")
    gone.close()
    client.call("Check")

    client.write(cid, b"for the living")

    assert client.read(cid) == b"for the living"


def test_a_read_past_its_deadline_ends_and_takes_no_bytes(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.run(hosted_agent.spec(["cat"]), cid)
    request = agent_pb2.ReadStreamRequest(container_id=cid, len=100)

    with pytest.raises(CallError) as caught:
        client.wait(client.send("ReadStdout", request, timeout_ns=50_000_000))
    client.write(cid, b"later")

    assert caught.value.code == Code.DEADLINE_EXCEEDED
    assert client.read(cid) == b"later"


def test_output_of_a_child_that_outlives_an_exec_arrives_when_the_exit_is_known(
    client: AgentClient, sleeper: str
) -> None:
    # A background command of a shell reads /dev/null, unless it is said where it reads.
    client.execute(sleeper, "e1", ["sh", "-c", "exec 3<&0; (read go <&3; echo last) & echo first; exit 4"])

    assert client.exit_code(sleeper, "e1") == 4
    assert client.read(sleeper, "e1") == b"first\n"
    waiting = client.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=sleeper, exec_id="e1", len=100))
    assert not client.is_answered(waiting)
    client.write(sleeper, b"go\n", "e1")

    assert agent_pb2.ReadStreamResponse.FromString(client.wait(waiting)).data == b"last\n"
    assert client.read_all(sleeper, "e1") == b""


def test_a_read_of_no_bytes_ends_a_stream_that_a_child_holds_open(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sh", "-c", "sleep 1000 & exit 0"])
    assert client.exit_code(sleeper, "e1") == 0
    waiting = client.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=sleeper, exec_id="e1", len=100))
    assert not client.is_answered(waiting)

    assert client.read(sleeper, "e1", size=0) == b""

    assert agent_pb2.ReadStreamResponse.FromString(client.wait(waiting)).data == b""


def test_stdin_stays_open_until_it_is_closed(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.run(hosted_agent.spec(["wc", "-c"]), cid)
    waiting = client.send("WaitProcess", agent_pb2.WaitProcessRequest(container_id=cid))
    client.write(cid, b"12345")

    before = client.is_answered(waiting)
    client.close_stdin(cid)
    client.wait(waiting)

    assert not before
    assert client.read_all(cid).strip() == b"5"


def test_an_empty_write_closes_stdin(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.run(hosted_agent.spec(["wc", "-c"]), cid)

    client.write(cid, b"")

    assert client.exit_code(cid) == 0


def test_a_write_after_close_is_refused(client: AgentClient, sleeper: str) -> None:
    client.close_stdin(sleeper)

    with refused(Code.FAILED_PRECONDITION):
        client.write(sleeper, b"x")


# -- terminals -------------------------------------------------------------------------------------------------------


def test_a_terminal_echoes_has_a_size_and_ends(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.create(hosted_agent.spec(["sh", "-c", "tty; read line; stty size; exit 3"], terminal=True), cid)
    client.call("TtyWinResize", agent_pb2.TtyWinResizeRequest(container_id=cid, row=33, column=99))
    client.start(cid)
    client.write(cid, b"go\n")

    out = client.read_all(cid)

    assert b"/dev/" in out
    assert b"go" in out
    assert b"33 99" in out
    assert client.exit_code(cid) == 3
    assert client.read_all(cid, method="ReadStderr") == b""


def test_an_exec_with_a_terminal_gets_one(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sh", "-c", "tty; exit 2"], Terminal=True)

    assert client.read_all(sleeper, "e1").startswith(b"/dev/pts/")
    assert client.exit_code(sleeper, "e1") == 2


def test_resizing_without_a_terminal_is_refused(client: AgentClient, sleeper: str) -> None:
    with refused(Code.FAILED_PRECONDITION):
        client.call("TtyWinResize", agent_pb2.TtyWinResizeRequest(container_id=sleeper, row=1, column=1))
