"""The agent client against a real ttrpc server: calls, refusals, garbage, silence."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sized
from typing import Any

import pytest

from protos.agent import agent_pb2 as pb
from pyshim.agent.client import AgentClient, guest_text
from pyshim.concurrency.tasks import cancel_all
from pyshim.model.errors import AgentGone, DeadlineExceeded, InvalidArgument, NotFound, ShimError, Unavailable
from pyshim.model.guest import ContainerStats, GuestSandbox
from pyshim.model.observation import Span, Trace
from pyshim.ttrpc import Client
from tests.fakes.agent import FakeAgent

from .client_runs import until

pytestmark = pytest.mark.usefixtures("fast_clock")


async def test_an_error_of_the_agent_keeps_its_code_and_names_the_action(client: AgentClient) -> None:
    with pytest.raises(NotFound, match=r"start container 'x' in guest: no process x/"):
        await client.start_container("x")


async def test_an_error_after_a_wait_says_how_long_the_agent_waited(fake: FakeAgent, client: AgentClient) -> None:
    fake.held["StartContainer"] = asyncio.Event()
    asyncio.get_running_loop().call_later(12, fake.held["StartContainer"].set)

    with pytest.raises(NotFound, match=r"no process x/.*\(the agent answered after 12 s\)$"):
        await client.start_container("x")


@pytest.mark.parametrize("request_timeout_s", [0.2])
async def test_an_agent_that_does_not_answer_meets_the_deadline(fake: FakeAgent, client: AgentClient) -> None:
    fake.hung.add("PauseContainer")

    with pytest.raises(DeadlineExceeded, match=r"pause container 'x' in guest: no reply within 0\.2 s"):
        await client.pause_container("x")


async def test_the_agent_is_told_which_span_its_work_is_within(fake: FakeAgent, client: AgentClient) -> None:
    heard: dict[int, Span] = {}

    class Follower:
        def ended(self, number: int, span: Span) -> None:
            heard[number] = span

        def context(self, number: int) -> str:
            return f"span-{number}"

    trace = Trace(lambda: 1)

    async def work() -> None:
        fake.hung.add("ReadStdout")
        await client.set_policy("p")
        read = asyncio.ensure_future(client.read_stdout("x", "x", 5))
        await until(lambda: "ReadStdout" in fake.calls)
        await cancel_all(read)

    with trace.of("untold"):
        await work()
    assert fake.contexts["SetPolicy"] is None
    trace.follow(Follower())
    with trace.of("asked"):
        await work()

    (number,) = (number for number, span in heard.items() if span.name == "agent SetPolicy")
    assert fake.contexts["SetPolicy"] == f"span-{number}"
    assert heard[heard[number].parent].name == "asked"
    assert fake.contexts["ReadStdout"] is None, "a stream is in no span: it may last for days"
    await client.set_policy("outside of the trace")
    assert fake.contexts["SetPolicy"] is None


async def test_cgroup_files_that_the_agent_cannot_set_are_refused_but_for_the_kubelets(
    fake: FakeAgent, client: AgentClient
) -> None:
    files = {"memory.oom.group": "1", "pids.max": "50"}

    with pytest.raises(InvalidArgument, match=r"update container 'c' in guest: .* cannot set 'pids\.max'"):
        await client.update_container("c", {"unified": files})
    of_1_37 = {
        "memory.oom.group": "1",
        "memory.min": "0",
        "memory.low": "0",
        "memory.high": "max",
        "memory.swap.max": "0",
    }
    await client.update_container("c", {"unified": of_1_37, "cpu": {"shares": 2}})

    (sent,) = fake.updates
    assert dict(sent.resources.Unified) == {}
    assert sent.resources.CPU.Shares == 2


async def test_cgroup_files_reach_an_agent_that_sets_them(fake: FakeAgent, client: AgentClient) -> None:
    fake.remembers = True

    await client.update_container("c", {"unified": {"memory.high": "5"}})

    assert dict(fake.updates[0].resources.Unified) == {"memory.high": "5"}


SANDBOX = GuestSandbox(
    sandbox_id="s", hostname="", dns=(), storages=(), shared_pid_namespace=False, guest_hook_path="", kernel_modules=()
)


@pytest.mark.parametrize(
    ("method", "call", "limit_s"),
    [
        ("SetPolicy", lambda client: client.set_policy("p"), 50),
        ("CreateSandbox", lambda client: client.create_sandbox(SANDBOX), 50),
        ("DestroySandbox", lambda client: client.destroy_sandbox(), 20),
        ("StartContainer", lambda client: client.start_container("c"), 20),
        ("RemoveContainer", lambda client: client.remove_container("c", 7), 7.5),
    ],
    ids=["policy", "sandbox", "destroy", "start", "remove"],
)
async def test_only_calls_that_set_up_the_sandbox_have_its_deadline(
    method: str, call: Callable[[AgentClient], Coroutine[Any, Any, None]], limit_s: float
) -> None:
    """Behind a service that has just made the VM they are the first to do anything in it."""

    fake = FakeAgent()
    fake.hung.add(method)
    connection = Client(fake.connection())
    client = AgentClient(connection, request_timeout_s=20, set_up_timeout_s=50)
    try:
        with pytest.raises(DeadlineExceeded, match=rf"no reply within {limit_s:g} s"):
            await call(client)
    finally:
        await client.close()
        await fake.close()


async def test_an_agent_that_goes_away_is_gone_for_calls_and_waiters(fake: FakeAgent, client: AgentClient) -> None:
    fake.hung.add("GetOOMEvent")
    waiting = asyncio.ensure_future(client.next_oom_event())
    gone = asyncio.ensure_future(client.gone())
    await until(lambda: "GetOOMEvent" in fake.calls)

    await fake.server.shutdown(0)

    with pytest.raises(ShimError):
        await waiting
    assert isinstance(await gone, str)
    with pytest.raises(AgentGone):
        await client.start_container("x")


@pytest.mark.parametrize("reply", [b"\xff\xff\xff", b"\x08"])
async def test_a_reply_that_is_no_message_is_an_error(reply: bytes, fake: FakeAgent, client: AgentClient) -> None:
    class Garbage:
        def SerializeToString(self) -> bytes:
            return reply

    async def answer(payload: bytes) -> Any:
        return Garbage()

    fake._on_WaitProcess = answer  # type: ignore[method-assign]
    with pytest.raises(ShimError, match=r"not a grpc\.WaitProcessResponse"):
        await client.wait_process("c", "c")


async def test_more_output_than_asked_for_is_an_error(fake: FakeAgent, client: AgentClient) -> None:
    async def answer(payload: bytes) -> Any:
        return pb.ReadStreamResponse(data=b"x" * 11)

    fake._on_ReadStdout = answer  # type: ignore[method-assign]
    with pytest.raises(ShimError, match="more than was asked for"):
        await client.read_stdout("c", "c", 10)


@pytest.mark.parametrize(("status", "seen"), [(0, 0), (3, 3), (137, 137), (-1, 255), (256 + 9, 9)])
async def test_an_exit_status_is_always_a_byte(status: int, seen: int, fake: FakeAgent, client: AgentClient) -> None:
    async def answer(payload: bytes) -> Any:
        return pb.WaitProcessResponse(status=status)

    fake._on_WaitProcess = answer  # type: ignore[method-assign]
    assert await client.wait_process("c", "c") == seen


def test_a_guests_words_are_bounded_and_harmless() -> None:
    assert guest_text("a\x1b[31mred\nline\x00") == "a [31mred line"
    assert len(guest_text("x" * 100_000)) == 4096


@pytest.mark.parametrize(("status", "is_refused"), [(0, False), (1, False), (2, True), (3, False)])
async def test_only_an_agent_that_says_it_does_not_serve_is_refused(
    status: int, is_refused: bool, fake: FakeAgent, client: AgentClient
) -> None:
    fake.serving = status  # type: ignore[assignment]
    with pytest.raises(Unavailable, match="does not serve") if is_refused else contextlib.nullcontext():
        await client.check(1)


async def test_a_reply_is_refused_undecoded_when_it_is_larger_than_its_method_needs(
    fake: FakeAgent, client: AgentClient
) -> None:
    async def answer(payload: bytes) -> Any:
        return pb.GuestDetailsResponse(agent_details=pb.AgentDetails(version="x" * 100_000))

    fake._on_GetGuestDetails = answer  # type: ignore[method-assign]
    with pytest.raises(ShimError, match=r"get guest details: .*exceeds the limit of 65\d+"):
        await client.guest_details()
    await client.destroy_sandbox()  # the connection lives on


@pytest.mark.parametrize(
    ("table", "taken"),
    [
        ("hugetlb", lambda stats: stats.hugetlb),
        ("counters", lambda stats: stats.memory.detail),
        ("cpus", lambda stats: stats.cpu.per_cpu_ns),
    ],
    ids=["hugetlb", "counters", "cpus"],
)
async def test_of_a_reply_of_very_many_rows_a_bounded_number_is_taken(
    table: str, taken: Callable[[ContainerStats], Sized], fake: FakeAgent, client: AgentClient
) -> None:
    async def answer(payload: bytes) -> Any:
        reply = pb.StatsContainerResponse()
        for number in range(5_000):
            match table:
                case "hugetlb":
                    reply.cgroup_stats.hugetlb_stats[f"{number}kB"].usage = number
                case "counters":
                    reply.cgroup_stats.memory_stats.stats[f"c{number}"] = number
                case "cpus":
                    reply.cgroup_stats.cpu_stats.cpu_usage.percpu_usage.append(number)
        return reply

    fake._on_StatsContainer = answer  # type: ignore[method-assign]
    assert len(taken(await client.stats_container("c"))) == 1024


@pytest.mark.parametrize(
    "words",
    [
        "eof",
        "read meet eof\n\nStack backtrace:\n   0: <unknown>\n",
        "Input/output error (os error 5)\n\nStack backtrace:\n   0: <unknown>\n",  # of a terminal without a process
    ],
)
async def test_the_end_of_an_output_may_be_told_by_kata_agents_error(
    words: str, fake: FakeAgent, client: AgentClient
) -> None:
    fake.failures["ReadStdout"] = (13, words)
    assert await client.read_stdout("c", "c", 10) == b""
    fake.failures["ReadStdout"] = (13, "Invalid container id")
    with pytest.raises(ShimError, match="Invalid container id"):
        await client.read_stdout("c", "c", 10)


def test_a_backtrace_is_cut_from_the_agents_error() -> None:
    assert guest_text("no such file\n\nStack backtrace:\n   0: <unknown>\n   1: <unknown>") == "no such file"
