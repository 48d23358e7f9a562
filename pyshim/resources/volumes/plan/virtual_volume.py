"""Kata's virtual volumes: a snapshotter's description of a root file system, base64 of JSON in a mount option. Pure."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from pyshim.model.decoding import json_value
from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.model.ids import ContainerId
from pyshim.model.task import RootfsMount
from pyshim.resources.volumes.plan.guest_pull import DRIVER

_OPTION = "io.katacontainers.volume="
_IMAGE_ON_DISK = "image_raw_block"
_MAX_BYTES = 1 << 20


def virtual_volume(rootfs: Sequence[RootfsMount], container_id: ContainerId) -> Mapping[str, Any] | None:
    """The description of the root; None without one. Raises InvalidArgument, and Unimplemented naming its type."""
    texts = [option for mount in rootfs for option in mount.options if option.startswith(_OPTION)]
    if not texts:
        return None
    if len(texts) > 1 or len(texts[0]) > _MAX_BYTES:
        raise InvalidArgument(f"create container '{container_id}': {len(texts)} volumes of its root, or one too large")
    try:
        volume = json_value(base64.b64decode(texts[0].removeprefix(_OPTION), validate=True), ValueError)
    except ValueError as exc:
        raise InvalidArgument(f"create container '{container_id}': its root's volume is not base64 of JSON") from exc
    kind = volume.get("volume_type") if isinstance(volume, dict) else None
    if kind not in (DRIVER, _IMAGE_ON_DISK):
        raise Unimplemented(
            f"create container '{container_id}': a root of volume type {str(kind)[:100]!r} is not supported, "
            f"{DRIVER!r} and {_IMAGE_ON_DISK!r} are"
        )
    return dict(volume)


def image_on_disk(volume: Mapping[str, Any], container_id: ContainerId) -> tuple[RootfsMount, ...] | None:
    """The mounts of an image that is one EROFS file, as the EROFS snapshotter would give it; None for another type.

    nydus' snapshotter makes such files of an image's layers (`export_mode = "image_block"`).
    """
    if volume["volume_type"] != _IMAGE_ON_DISK:
        return None
    source, options = volume.get("source"), volume.get("options") or []
    if not isinstance(source, str) or not source.startswith("/") or volume.get("fs_type") != "erofs":
        raise InvalidArgument(f"create container '{container_id}': its root's volume names no EROFS file")
    if volume.get("dm_verity") or options != ["ro"]:
        raise Unimplemented(f"create container '{container_id}': dm_verity or options of '{source}' are not supported")
    return (
        RootfsMount(type="erofs", source=source, target="", options=("ro", "loop")),
        RootfsMount(
            type="format/overlay",
            source="overlay",
            target="",
            options=("upperdir=", "workdir=", "lowerdir={{ mount 0 }}"),
        ),
    )
