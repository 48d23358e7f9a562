"""The guest agent's table of calls, and what becomes of their errors."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

import pytest

from guest.agent import __main__ as program
from guest.agent import service, settings
from guest.agent.children import Children
from guest.agent.errors import AgentError, FailedPrecondition, Internal, InvalidArgument
from protos.agent import agent_pb2, health_pb2
from pyshim.ttrpc import CallContext, UnaryHandler

CONTEXT = CallContext(service="s", method="M", stream_id=1, metadata=(), deadline=None, peer=None)

NOT_CALLED = {"AddSwapPath", "MemAgentCompactSet", "MemAgentMemcgSet", "MemHotplugByProbe"}
"""By this project's shim."""


@pytest.mark.usefixtures("fast_clock")
async def test_every_method_of_the_services_is_served() -> None:
    found = program._services(settings.parse([]), Children(), asyncio.Event())

    wanted = {
        "grpc.AgentService": agent_pb2.DESCRIPTOR.services_by_name["AgentService"],
        "grpc.Health": health_pb2.DESCRIPTOR.services_by_name["Health"],
    }
    assert set(found) == set(wanted)
    for name, definition in wanted.items():
        assert set(found[name]) == set(definition.methods_by_name) - NOT_CALLED


@pytest.mark.usefixtures("fast_clock")
async def test_only_calls_that_change_nothing_are_given_up() -> None:
    found = program._services(settings.parse([]), Children(), asyncio.Event())["grpc.AgentService"]

    given_up = {name for name, handler in found.items() if handler.cancel_on_timeout}
    waiting = {"WaitProcess", "ReadStdout", "ReadStderr", "GetOOMEvent"}
    assert given_up == waiting | {"StatsContainer", "StatsContainers"}


def served(function: Any) -> UnaryHandler:
    definition = agent_pb2.DESCRIPTOR.services_by_name["AgentService"]
    handler = service._handlers(definition, {"SignalProcess": function}, {})["SignalProcess"]
    assert isinstance(handler, UnaryHandler)
    return handler


@pytest.mark.usefixtures("fast_clock")
async def test_a_request_arrives_as_its_message_and_no_reply_is_the_empty_one() -> None:
    seen: list[agent_pb2.SignalProcessRequest] = []

    async def signal(request: agent_pb2.SignalProcessRequest) -> None:
        seen.append(request)

    request = agent_pb2.SignalProcessRequest(container_id="c", signal=9)
    assert await served(signal).function(request.SerializeToString(), CONTEXT) == b""
    assert seen == [request]


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (FailedPrecondition("pause x: no"), FailedPrecondition, "pause x: no"),
        (OSError(errno.ENOSPC, "No space left on device", "/run/x"), Internal, "SignalProcess: '/run/x': ENOSPC (no"),
        (OSError(errno.EPERM, "Operation not permitted"), Internal, "SignalProcess: EPERM (operation not permitted)"),
        (KeyError("key"), Internal, "SignalProcess: KeyError: 'key'"),
    ],
    ids=["its own", "of a file", "of no file", "a bug"],
)
@pytest.mark.usefixtures("fast_clock")
async def test_an_error_says_what_failed(
    caplog: pytest.LogCaptureFixture, raised: Exception, kind: type[AgentError], text: str
) -> None:
    async def fail(request: object) -> None:
        raise raised

    with caplog.at_level(logging.INFO), pytest.raises(kind) as caught:
        await served(fail).function(b"", CONTEXT)

    assert str(caught.value).startswith(text)
    assert caplog.records[-1].message in ("call failed", "call crashed")


@pytest.mark.usefixtures("fast_clock")
async def test_bytes_that_are_no_request_are_refused() -> None:
    async def never(request: object) -> None:
        raise AssertionError

    with pytest.raises(InvalidArgument, match="decode SignalProcessRequest"):
        await served(never).function(b"\xff\xff\xff", CONTEXT)
