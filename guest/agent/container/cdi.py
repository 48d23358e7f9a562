"""The devices that a container names, from the guest's own CDI specs.

A driver that is still starting writes its spec late, so an unknown kind is waited for. A known kind without the device
is an error at once. Both are as in kata-agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from protos.agent.oci_pb2 import Spec
from pyshim.cdi.cache import Cache
from pyshim.cdi.errors import CdiError, InvalidName, UnresolvedDevices
from pyshim.cdi.inject import inject
from pyshim.cdi.names import check_kind, parse_annotations
from pyshim.cdi.spec import ContainerEdits

from guest.agent.container.spec import Json
from guest.agent.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from guest.agent.settings import VISIBLE_DEVICES

log = logging.getLogger(__name__)

DIRECTORIES = ("/etc/cdi", "/run/cdi", "/var/run/cdi")
"""kata-agent's `/var/run/cdi`, which may not be a link to `/run`, and the image's own specs."""
_LOOK_AGAIN_S = 0.25


async def wait_for_edits(cid: str, spec: Spec, visible: str, *, timeout_s: float) -> ContainerEdits:
    """The edits for the devices of the annotations and of the text `visible`, once their specs exist.

    DeadlineExceeded after the timeout and FailedPrecondition for an unknown device name all that are missing.
    """
    doing = f"give devices to container {cid!r}"
    try:
        named = parse_annotations(spec.Annotations)[1]
        asked = parse_visible(visible)
    except InvalidName as error:
        raise InvalidArgument(f"{doing}: {error}") from error
    cache = Cache(DIRECTORIES)
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    while True:
        kinds = cache.kinds()  # before the devices: a spec that comes in between counts at the next look
        try:
            names = [*named, *expanded(asked, cache)]
            edits = cache.edits(names)
        except UnresolvedDevices as error:
            known = [name for name in error.devices if name.partition("=")[0] in kinds]
            if known:
                raise FailedPrecondition(f"{doing}: {error}") from error
            if clock() >= deadline:
                raise DeadlineExceeded(f"{doing}: {error}, after {timeout_s:g} s") from error
        else:
            log.info("devices resolved", extra={"container": cid, "devices": ",".join(names)})
            return edits
        await asyncio.sleep(_LOOK_AGAIN_S)


def apply_edits(config: Json, edits: ContainerEdits, cid: str, *, limits_devices: bool) -> None:
    """config.json has the edits; device rules only if they can be enforced."""
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


def expanded(entries: Iterable[tuple[str, tuple[str, ...]]], cache: Cache) -> list[str]:
    """Device names; `all` is the kind's device of that name, or every device of the kind."""
    names = []
    for kind, indices in entries:
        every = [found.name for found in cache.devices() if found.name.startswith(f"{kind}=")]
        one = f"{kind}=all"
        names += [f"{kind}={index}" for index in indices] or ([one] if one in every else every or [one])
    return names
