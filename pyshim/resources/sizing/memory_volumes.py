"""Memory emptyDirs in the guest follow the kubelet's on the host, which an in-place resize of the pod remounts."""

import logging
from collections.abc import Iterable

from msgspec.structs import replace

from pyshim.model.errors import ShimError
from pyshim.model.guest import Storage
from pyshim.model.plans import MemoryVolume
from pyshim.model.seams import ContainerAgent, Host

log = logging.getLogger(__name__)


async def resize_memory_volumes(volumes: Iterable[MemoryVolume], *, host: Host, agent: ContainerAgent) -> None:
    """Each guest tmpfs has the size of the host's now. A failure only warns: the containers' limits are set already.

    The agent mounts it again with these options: `mode` would undo a chmod of the container's, so it is left out.
    """
    try:
        resized = [await _resized(volume, host) for volume in volumes]
        if storages := tuple(filter(None, resized)):
            await agent.update_ephemeral_mounts(storages)
    except ShimError as error:
        log.warning("resize memory volumes", extra={"error": str(error)})


async def _resized(volume: MemoryVolume, host: Host) -> Storage | None:
    """None when the host's tmpfs is gone."""
    facts = await host.source_facts(volume.host_path, "")
    if not facts.size_bytes or facts.empty_dir is None or not facts.empty_dir.in_memory:
        return None
    group = [option for option in volume.storage.options if option.startswith("fsgid=")]
    return replace(volume.storage, options=("remount", f"size={facts.size_bytes}", *group))
