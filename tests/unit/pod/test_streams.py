"""Bytes between a client's streams and the guest, and the guest's requests about a process."""

import asyncio
from signal import SIGWINCH

import pytest

from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.task import Status, Stdio
from pyshim.pod.process import OUTPUT_GRACE_S, POLL_LIMIT_S
from pyshim.pod.pumps import SLOW_READER_S
from pyshim.ttrpc import Code
from tests.unit.pod.conftest import PIPES, Stack, until

TERMINAL = Stdio(stdin="/in", stdout="/out", stderr="", terminal=True)


async def test_the_end_of_stdin_is_not_sent_for_a_terminal(stack: Stack) -> None:
    """At CloseStdin kata-agent closes the terminal, which hangs up on the process."""
    container = await stack.run("c1", ["sleep"], TERMINAL)
    stack.host.streams["c1"].stdin.chunks.put_nowait(b"ls\n")

    await stack.pod.close_io(container, None)
    await until(lambda: stack.agent.processes["c1", "c1"].input == b"ls\n")
    await asyncio.sleep(1)

    assert "CloseStdin" not in stack.agent.calls


async def test_a_process_without_stdin_finds_its_end_at_once(stack: Stack) -> None:
    container = await stack.run("c1", ["cat"])

    assert (await stack.pod.wait(container, None)).status == 0


async def test_a_terminals_size_given_before_the_start_is_set_after_it(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"], TERMINAL)
    await stack.pod.resize_pty(container, None, 80, 24)
    await stack.pod.resize_pty(container, None, 132, 43)
    assert "TtyWinResize" not in stack.agent.calls

    await stack.pod.start(container, None)
    await until(lambda: stack.agent.sizes)

    assert stack.agent.sizes == [("c1", "c1", 43, 132)]


async def test_resizing_what_has_no_terminal_is_ignored_and_what_has_ended_refused(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], PIPES)
    await stack.pod.resize_pty(container, None, 80, 24)
    assert "TtyWinResize" not in stack.agent.calls

    await stack.end(container)

    with pytest.raises(FailedPrecondition, match="resize terminal of 'c1'"):
        await stack.pod.resize_pty(container, None, 80, 24)


async def test_a_terminals_stderr_is_never_read(stack: Stack) -> None:
    container = await stack.run("c1", ["echo", "hi"], TERMINAL)

    await stack.pod.wait(container, None)

    assert "ReadStderr" not in stack.agent.calls
    assert bytes(stack.host.streams["c1"].stdout.data) == b"hi"


@pytest.mark.parametrize("terminal", [True, False])
async def test_the_guest_gets_a_terminal_when_the_client_asks_for_one_whatever_the_spec_says(
    terminal: bool, stack: Stack
) -> None:
    stdio = TERMINAL if terminal else PIPES
    process = {"args": ["sleep"], "cwd": "/", "terminal": not terminal, "selinuxLabel": "a:b:c:d"}
    container = await stack.run("c1", ["sleep"], stdio, process=process)
    exec_id = await stack.exec(container, "e1", ["sleep"], stdio, terminal=not terminal, selinuxLabel="a:b:c:d")
    await stack.pod.start(container, exec_id)

    for sent in (stack.agent.containers["c1"].OCI.Process, stack.agent.execs["c1", "e1"].process):
        assert sent.Terminal is terminal
        assert sent.SelinuxLabel == ""


async def test_an_exit_before_the_reply_to_the_start_comes_after_the_output(stack: Stack) -> None:
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


async def test_a_client_that_takes_no_more_output_does_not_stop_the_process(stack: Stack) -> None:
    container = await stack.create("c1", ["flood", "3000000"], PIPES)
    output = stack.host.streams["c1"].stdout
    output.broken = FailedPrecondition("write '/log': ENOSPC")

    await stack.pod.start(container, None)

    assert (await stack.pod.wait(container, None)).status == 0
    assert not stack.agent.ended["c1", "c1"].output


async def test_an_agent_that_reports_more_input_than_it_got_loses_the_stream_only(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], PIPES)
    stack.agent.takes = 2**31
    stack.host.streams["c1"].stdin.chunks.put_nowait(b"x" * 3_000_000)
    await until(lambda: "WriteStdin" in stack.agent.calls)
    await asyncio.sleep(1)

    assert stack.agent.calls.count("WriteStdin") == 1
    assert (await stack.end(container)).status == 137


async def test_wait_process_is_sent_once_the_output_has_ended(stack: Stack) -> None:
    """kata-agent forgets a process, and its unread output, when it reports the exit."""
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["flood", "16000000"], PIPES)
    stack.agent.calls.clear()
    await stack.pod.start(container, exec_id)
    await stack.pod.wait(container, exec_id)

    assert len(stack.host.streams["e1"].stdout.data) == 16_000_000
    waits = [index for index, name in enumerate(stack.agent.calls) if name == "WaitProcess"]
    assert waits == [len(stack.agent.calls) - 1]


async def test_a_process_that_closed_its_stderr_loses_no_output(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["merged", "the last words"], PIPES)
    await stack.pod.start(container, exec_id)

    assert (await stack.pod.wait(container, exec_id)).status == 0
    assert bytes(stack.host.streams["e1"].stdout.data) == b"the last words"


async def test_a_signal_before_the_start_costs_no_output_after_it(stack: Stack) -> None:
    """The signal makes the shim poll for an exit; the times of these polls must not stay after the start."""
    container = await stack.create("c1", ["sleep"], PIPES)
    await stack.pod.kill(container, None, SIGWINCH, False)
    await asyncio.sleep(OUTPUT_GRACE_S / 2)
    await stack.pod.start(container, None)
    process = stack.agent.processes["c1", "c1"]
    await asyncio.sleep(OUTPUT_GRACE_S)

    async with process.changed:
        process.stderr_ended = True
        process.changed.notify_all()
    await asyncio.sleep(POLL_LIMIT_S / 2)
    process.output += b"x" * 900_000
    await process.end(0)

    assert (await stack.pod.wait(container, None)).status == 0
    assert len(stack.host.streams["c1"].stdout.data) == 900_000


@pytest.mark.parametrize("remembers", [True, False], ids=["remembers", "forgets"])
@pytest.mark.parametrize("args", [["hold", "hi"], ["yes", "7"]], ids=["silent", "printing"])
async def test_a_child_that_outlives_an_exec_does_not_delay_its_exit(
    args: list[str], remembers: bool, caplog: pytest.LogCaptureFixture, stack: Stack
) -> None:
    stack.agent.remembers = remembers
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", args, PIPES)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await stack.pod.start(container, exec_id)

    status = (await stack.pod.wait(container, exec_id)).status
    assert status == {"hold": 0, "yes": 7}[args[0]]
    assert loop.time() - began < OUTPUT_GRACE_S + 1

    await stack.pod.delete(container, exec_id)
    assert loop.time() - began < 2 * OUTPUT_GRACE_S + 5
    assert stack.host.streams["e1"].stdout.closed

    assert not [record for record in caplog.records if record.message == "stream broke"]


async def test_output_that_an_agent_keeps_is_read_after_the_exit_and_ended_by_delete(stack: Stack) -> None:
    """A child that outlives the exec may print after a long silence."""
    stack.agent.remembers = True
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["hold", "first"], PIPES)
    await stack.pod.start(container, exec_id)
    await stack.pod.wait(container, exec_id)
    process, output = stack.agent.processes["c1", "e1"], stack.host.streams["e1"].stdout
    await asyncio.sleep(40)

    async with process.changed:
        process.output += b", last"
        process.changed.notify_all()
    await until(lambda: bytes(output.data) == b"first, last")
    await stack.pod.delete(container, exec_id)

    await until(lambda: process.output_ended and process.stderr_ended)
    assert output.closed


async def test_output_of_an_init_ends_with_it_even_if_a_child_has_it_open(stack: Stack) -> None:
    """containerd deletes a container only after its output has ended."""
    stack.agent.remembers = True
    container = await stack.run("c1", ["hold", "last"], PIPES)

    assert (await stack.pod.wait(container, None)).status == 0

    output = stack.host.streams["c1"].stdout
    await until(lambda: output.closed)
    assert bytes(output.data) == b"last"


async def test_an_agent_without_details_counts_as_one_that_drops_output(stack: Stack) -> None:
    stack.agent.failures["GetGuestDetails"] = (Code.INTERNAL, "no")
    container = await stack.run("c1", ["exit", "3"])

    assert (await stack.pod.wait(container, None)).status == 3


async def test_a_reader_that_stands_still_delays_the_exit_of_a_killed_process_for_a_limited_time(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["sleep"], PIPES)
    await stack.pod.start(container, exec_id)
    stack.host.streams["e1"].stdout.gate.clear()
    process = stack.agent.processes["c1", "e1"]
    async with process.changed:
        process.output += b"x" * 900_000
        process.changed.notify_all()
    await asyncio.sleep(1)
    assert stack.pod.state(container, exec_id).status is Status.RUNNING
    loop = asyncio.get_running_loop()
    began = loop.time()

    await stack.pod.kill(container, exec_id, 9, False)

    await stack.pod.wait(container, exec_id)
    assert loop.time() - began <= SLOW_READER_S


async def test_a_process_that_the_guest_forgets_before_its_output_has_ended_is_an_error(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["cat"], PIPES)
    await stack.pod.start(container, exec_id)
    await until(lambda: stack.agent.calls.count("ReadStdout") == 2)
    process = stack.agent.processes.pop(("c1", "e1"))
    async with process.changed:
        process.output += b"half"
        process.changed.notify_all()

    assert (await stack.pod.wait(container, exec_id)).status == 255


async def test_output_lost_by_an_error_of_the_guest_is_logged_as_an_error(
    caplog: pytest.LogCaptureFixture, stack: Stack
) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["cat"], PIPES)
    await until(lambda: "ReadStdout" in stack.agent.calls)
    stack.agent.failures["ReadStdout"] = (5, "no such process")
    await stack.pod.start(container, exec_id)
    await until(lambda: "stream broke" in caplog.text)
    await stack.pod.kill(container, exec_id, 9, False)

    broke = [record for record in caplog.records if record.message == "stream broke"]
    assert [(record.levelname, record.stream) for record in broke] == [("ERROR", "stdout")]
    assert "no such process" in broke[0].error


async def test_the_streams_of_a_process_that_is_killed_before_its_start_end_with_it(stack: Stack) -> None:
    """containerd's Delete waits for the FIFOs' end, and after its restart it deletes what it finds created."""
    container = await stack.create("c1", ["sleep"], PIPES)
    waiting = asyncio.ensure_future(stack.pod.wait(container, None))

    await stack.pod.kill(container, None, 9, False)

    assert (await waiting).status == 137
    assert stack.host.streams["c1"].closed


async def test_the_streams_of_an_exec_are_opened_by_its_start(stack: Stack) -> None:
    """`echo x | ctr task exec` hangs when the FIFO has a reader before the reply to Exec."""
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["cat"], PIPES)
    assert "e1" not in stack.host.streams
    await stack.pod.close_io(container, exec_id)

    await stack.pod.start(container, exec_id)

    assert (await stack.pod.wait(container, exec_id)).status == 0


async def test_an_exec_whose_streams_cannot_be_opened_has_ended_without_having_run(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    exec_id = await stack.exec(container, "e1", ["cat"], PIPES)
    waiting = asyncio.ensure_future(stack.pod.wait(container, exec_id))
    stack.host.faults.plan({"streams": 2})

    with pytest.raises(FailedPrecondition, match="streams"):
        await stack.pod.start(container, exec_id)

    assert (await waiting).status == 128
    assert "ExecProcess" not in stack.agent.calls
    await stack.pod.delete(container, exec_id)


async def test_an_exec_that_is_refused_leaves_no_stream_open(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    nested: object = "x"
    for _ in range(600):
        nested = [nested]
    with pytest.raises(InvalidArgument, match="nested more than 100 deep"):
        await stack.exec(container, "e1", ["cat"], PIPES, consoleSize=nested)
    assert "e1" not in stack.host.streams

    exec_id = await stack.exec(container, "e1", ["cat"], PIPES, user={"uid": "root"})
    with pytest.raises(InvalidArgument, match="uid does not fit"):
        await stack.pod.start(container, exec_id)
    assert stack.host.streams["e1"].closed


async def test_bytes_of_execs_are_counted_and_stay_counted(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], PIPES)
    (monitor,) = stack.host.monitors
    for number in range(3):
        exec_id = await stack.exec(container, "e1", ["flood", str(1000 + number)], PIPES)
        await stack.pod.start(container, exec_id)
        await stack.pod.wait(container, exec_id)
        before = monitor.pod.observe().streams["c1", "stdout"]
        await stack.pod.delete(container, exec_id)

        assert monitor.pod.observe().streams["c1", "stdout"] == before
    assert before == 1000 + 1001 + 1002
