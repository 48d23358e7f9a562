"""Keeps the pool's ResourceSlices at the API server equal to the operator's table."""

import asyncio
import contextlib
import logging
from pathlib import Path

from pyshim.host.files import replace_file
from pyshim.model.errors import FailedPrecondition, NotFound, ShimError, Unavailable
from pyshim.node.dra import slices
from pyshim.node.kubernetes.api import Api, Conflict
from pyshim.resources.devices.plan.instances import MAX_BYTES, InstanceTable, read_instances

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks at the table's file, and until a failed attempt is made again."""
_TRIES = 5
"""Attempts to publish: drivers of other nodes may publish the same table at the same time."""


def read_table(path: Path) -> tuple[bytes, InstanceTable]:
    """The file and its table. Raises InvalidArgument naming the entry, FailedPrecondition if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FailedPrecondition(f"read instance types '{path}': {error.strerror}") from error
    return content, read_instances(content, str(path))


def _write_copy(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_file(str(path), content, mode=0o644, durable=False)
    except OSError as error:
        raise FailedPrecondition(f"write instance types '{path}': {error.strerror}") from error


async def publish(api: Api, table: InstanceTable) -> None:
    """The pool offers the devices of the table, and slices of earlier generations are deleted.

    Drivers of several nodes may do this at once. The slices of a generation have the same names everywhere; a driver
    that finds a name taken reads the pool again. Raises Unavailable, FailedPrecondition when the API server drops a
    field.
    """
    specs = slices.slice_specs(table)
    for _ in range(_TRIES):
        found = await api.slices_of(slices.DRIVER)
        generation = slices.newest(found)
        if not slices.offers(found, specs):
            generation += 1
            try:
                await _create(api, specs, generation)
            except Conflict:
                continue
            log.info("devices offered", extra={"generation": generation, "slices": len(specs)})
        for name in slices.outdated(found, generation):
            await _delete(api, name)
        return
    raise Unavailable(f"offer devices of {slices.DRIVER}: drivers of other nodes offer others, {_TRIES} times")


async def _create(api: Api, specs: list[dict[str, object]], generation: int) -> None:
    wanted = slices.objects(specs, generation)
    for each in wanted:
        kept = await api.create_slice(each)
        if field := slices.lost_field(kept, each):
            for one in wanted:
                await _delete(api, one["metadata"]["name"])
            raise FailedPrecondition(
                f"offer devices of {slices.DRIVER}: the API server drops {field!r} of a slice (hint: a quota needs"
                " Kubernetes 1.36)"
            )


async def withdraw(api: Api) -> None:
    """No device is offered. Allocated claims stay allocated."""
    for each in await api.slices_of(slices.DRIVER):
        await _delete(api, each["metadata"]["name"])


async def _delete(api: Api, name: str) -> None:
    with contextlib.suppress(NotFound):  # another node's driver was faster
        await api.delete_slice(name)


async def keep_offered(api: Api, path: Path, copy: Path | None = None) -> None:
    """Publishes the file's table, and again after each change of the file, for ever.

    `copy` is the same table for the node's shims, written before its devices are offered.

    A file that cannot be used is logged, and the last offer stays. An offer that others removed is made again only
    after a change of the file: nodes whose files differ for a while must not replace each other's.
    """
    offered: InstanceTable | None = None
    logged = ""
    while True:
        try:
            content, table = read_table(path)
            if table != offered:
                if copy is not None:
                    _write_copy(copy, content)
                await publish(api, table)
                offered, logged = table, ""
        except ShimError as error:
            if str(error) != logged:
                log.warning("offer unchanged", extra={"error": str(error)})
            logged = str(error)
        await asyncio.sleep(LOOK_S)
