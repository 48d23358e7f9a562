"""What moves between a client's streams and the guest, and what the guest is told about a process."""

import asyncio

import pytest

from pyshim.model.errors import FailedPrecondition
from pyshim.model.task import Stdio
from tests.unit.sandbox.conftest import PIPES, Stack, scenario, until

TERMINAL = Stdio(stdin="/in", stdout="/out", stderr="", terminal=True)


@scenario
async def test_the_end_of_stdin_is_not_told_to_a_terminal(stack: Stack) -> None:
    """kata-agent answers CloseStdin by closing the terminal, which hangs up on the process."""
    container = await stack.run("c1", ["sleep"], TERMINAL)
    stack.host.streams["c1"].stdin.chunks.put_nowait(b"ls\n")

    await stack.pod.close_io(container, None)
    await until(lambda: stack.agent.processes["c1", "c1"].input == b"ls\n")
    await asyncio.sleep(1)

    assert "CloseStdin" not in stack.agent.calls


@scenario
async def test_a_process_without_stdin_finds_its_end_at_once(stack: Stack) -> None:
    container = await stack.run("c1", ["cat"])

    assert (await stack.pod.wait(container, None)).status == 0


@scenario
async def test_a_terminals_size_given_before_the_start_is_set_after_it(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"], TERMINAL)
    await stack.pod.resize_pty(container, None, 80, 24)
    await stack.pod.resize_pty(container, None, 132, 43)
    assert "TtyWinResize" not in stack.agent.calls

    await stack.pod.start(container, None)
    await until(lambda: stack.agent.sizes)

    assert stack.agent.sizes == [("c1", "c1", 43, 132)]


@scenario
async def test_resizing_what_has_no_terminal_is_ignored_and_what_has_ended_refused(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], PIPES)
    await stack.pod.resize_pty(container, None, 80, 24)
    assert "TtyWinResize" not in stack.agent.calls

    await stack.pod.kill(container, None, 9, False)
    await stack.pod.wait(container, None)

    with pytest.raises(FailedPrecondition, match="resize terminal of 'c1'"):
        await stack.pod.resize_pty(container, None, 80, 24)


@scenario
async def test_a_terminals_stderr_is_never_read(stack: Stack) -> None:
    container = await stack.run("c1", ["echo", "hi"], TERMINAL)

    await stack.pod.wait(container, None)

    assert "ReadStderr" not in stack.agent.calls
    assert bytes(stack.host.streams["c1"].stdout.data) == b"hi"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_guest_gets_a_terminal_when_the_client_asks_for_one_whatever_the_spec_says(terminal: bool) -> None:
    @scenario
    async def body(stack: Stack) -> None:
        stdio = TERMINAL if terminal else PIPES
        process = {"args": ["sleep"], "cwd": "/", "terminal": not terminal, "selinuxLabel": "a:b:c:d"}
        container = await stack.run("c1", ["sleep"], stdio, process=process)
        exec_id = await stack.exec(container, "e1", ["sleep"], stdio, terminal=not terminal, selinuxLabel="a:b:c:d")
        await stack.pod.start(container, exec_id)

        for sent in (stack.agent.containers["c1"].OCI.Process, stack.agent.execs["c1", "e1"].process):
            assert sent.Terminal is terminal
            assert sent.SelinuxLabel == ""

    body()


@scenario
async def test_what_an_exec_asks_for_reaches_the_guest(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    wishes = {"env": ["A=1"], "cwd": "/tmp", "user": {"uid": 7, "gid": 8, "additionalGids": [9]}}
    capabilities = {"bounding": ["CAP_CHOWN"], "effective": ["CAP_CHOWN"]}
    exec_id = await stack.exec(
        container, "e1", ["sleep"], **wishes, capabilities=capabilities, noNewPrivileges=True, oomScoreAdj=5
    )

    await stack.pod.start(container, exec_id)

    sent = stack.agent.execs["c1", "e1"].process
    assert (list(sent.Env), sent.Cwd) == (["A=1"], "/tmp")
    assert (sent.User.UID, sent.User.GID, list(sent.User.AdditionalGids)) == (7, 8, [9])
    assert (list(sent.Capabilities.Bounding), list(sent.Capabilities.Ambient)) == (["CAP_CHOWN"], [])
    assert sent.NoNewPrivileges
    assert sent.OOMScoreAdj == 5


@scenario
async def test_an_exit_told_before_the_reply_to_the_start_has_the_output_before_it(stack: Stack) -> None:
    container = await stack.create("c1", ["echo", "up"], PIPES)
    stack.agent.late["StartContainer"] = asyncio.Event()
    starting = asyncio.ensure_future(stack.pod.start(container, None))
    exiting = asyncio.ensure_future(stack.pod.wait(container, None))
    await until(lambda: "StartContainer" in stack.agent.calls and stack.agent.processes["c1", "c1"].exit.done())
    await asyncio.sleep(1)
    stack.agent.late["StartContainer"].set()

    await exiting
    assert bytes(stack.host.streams["c1"].stdout.data) == b"up"
    await starting


@scenario
async def test_a_client_that_takes_no_more_output_does_not_stop_the_process(stack: Stack) -> None:
    container = await stack.create("c1", ["flood", "3000000"], PIPES)
    output = stack.host.streams["c1"].stdout
    output.broken = FailedPrecondition("write '/log': ENOSPC")

    await stack.pod.start(container, None)

    assert (await stack.pod.wait(container, None)).status == 0
    assert not stack.agent.processes["c1", "c1"].output


@scenario
async def test_an_agent_that_takes_more_than_it_was_given_loses_the_stream_only(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], PIPES)
    stack.agent.takes = 2**31
    stack.host.streams["c1"].stdin.chunks.put_nowait(b"x" * 3_000_000)
    await until(lambda: "WriteStdin" in stack.agent.calls)
    await asyncio.sleep(1)

    assert stack.agent.calls.count("WriteStdin") == 1
    await stack.pod.kill(container, None, 9, False)
    assert (await stack.pod.wait(container, None)).status == 137
