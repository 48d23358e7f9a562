"""grpc.Health: asked first and often, so nothing is imported here."""

from __future__ import annotations

from guest.agent.agent import API_VERSION, VERSION
from guest.agent.wire.codec import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent

_SERVING = 1


async def check(agent: Agent, request: Message) -> Message:
    return Message("HealthCheckResponse", status=_SERVING)


async def version(agent: Agent, request: Message) -> Message:
    return Message("VersionCheckResponse", grpc_version=API_VERSION, agent_version=VERSION)
