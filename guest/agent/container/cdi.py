"""Devices by name: what the guest's own CDI specs say a container gets.

A driver that is still starting writes its spec late, so a kind that no spec has yet is waited for; a kind that is there
without the device is an error at once. Both as kata-agent does.
"""

from __future__ import annotations

from pyshim.cdi.annotations import parse_annotations
from pyshim.cdi.cache import Cache
from pyshim.cdi.errors import CdiError, InvalidName, UnresolvedDevices
from pyshim.cdi.inject import inject
from pyshim.cdi.names import check_kind

from guest.agent import log
from guest.agent.container.device_names import VISIBLE_DEVICES, visible
from guest.agent.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pyshim.cdi.spec import ContainerEdits

    from guest.agent.agent import Agent
    from guest.agent.container.spec import Json
    from guest.agent.wire.codec import Message

DIRECTORIES = ("/etc/cdi", "/run/cdi", "/var/run/cdi")
"""kata-agent's `/var/run/cdi`, which need not be a link to `/run`, and what an image brings along."""
_LOOK_AGAIN_S = 0.25


async def wait_for_edits(agent: Agent, cid: str, spec: Message) -> ContainerEdits:
    """What the devices asked for do to the container, once their specs are there.

    DeadlineExceeded after the CDI timeout and FailedPrecondition for an unknown device name all that are missing.
    """
    doing = f"give devices to container {cid!r}"
    try:
        named = parse_annotations(spec.Annotations)[1]
        asked = parse_visible(visible(agent, spec))
    except InvalidName as error:
        raise InvalidArgument(f"{doing}: {error}") from error
    cache = Cache(DIRECTORIES)
    loop = agent.loop
    expired = False

    def on_time() -> None:
        nonlocal expired
        expired = True

    timer = loop.call_later(agent.settings.cdi_timeout_s, on_time)
    try:
        while True:
            try:
                names = [*named, *expanded(asked, cache)]
                edits = cache.edits(names)
            except UnresolvedDevices as error:
                known = [name for name in error.devices if name.partition("=")[0] in cache.kinds()]
                if known:
                    raise FailedPrecondition(f"{doing}: {error}") from error
                if expired:
                    limit = f"after {agent.settings.cdi_timeout_s:g} s"
                    raise DeadlineExceeded(f"{doing}: {error}, {limit}") from error
            else:
                log.info("devices resolved", container=cid, devices=",".join(names))
                return edits
            await loop.sleep(_LOOK_AGAIN_S)
    finally:
        timer.cancel()


def apply(config: Json, edits: ContainerEdits, cid: str, *, limits_devices: bool) -> None:
    """config.json has the edits; device rules only where they can be enforced."""
    try:
        inject(config, edits)
    except CdiError as error:
        raise FailedPrecondition(f"give devices to container {cid!r}: {error}") from error
    if not limits_devices:
        config["linux"]["resources"].pop("devices", None)


def parse_visible(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """(kind, indices) of each entry of `kind=all:kind=0,1`; no indices for `all`. Raises InvalidName."""
    entries = []
    for entry in text.split(":") if text else ():
        kind, equals, values = entry.partition("=")
        indices = tuple(values.split(","))
        if not equals or check_kind(kind) or not all(index.isalnum() and index.isascii() for index in indices):
            raise InvalidName(f"read {VISIBLE_DEVICES}: entry {entry[:100]!r} is neither KIND=all nor KIND=INDEX,...")
        entries.append((kind, () if values == "all" else indices))
    return entries


def expanded(entries: list[tuple[str, tuple[str, ...]]], cache: Cache) -> list[str]:
    """Device names; `all` is the kind's device of that name, or every device of the kind."""
    names = []
    for kind, indices in entries:
        every = [found.name for found in cache.devices() if found.name.startswith(f"{kind}=")]
        one = f"{kind}=all"
        names += [f"{kind}={index}" for index in indices] or ([one] if one in every else every or [one])
    return names
