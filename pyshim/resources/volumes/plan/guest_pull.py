"""Root file systems whose image is pulled inside the guest: asked for by the snapshotter, or by the configuration.

Source: Kata's storage driver `image_guest_pull`.
"""

import json
from collections.abc import Mapping
from typing import Any

from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.guest import Storage
from pyshim.model.ids import ContainerId, GuestPath
from pyshim.model.oci import ContainerKind, OciSpec, keys_of, membership
from pyshim.resources.volumes.plan.share import guest_container_dir

DRIVER = "image_guest_pull"
"""Also the type of a virtual volume that asks for it."""
PAUSE = "pause"
"""The image of every pod sandbox; the guest decides what holds the pod's namespaces."""


def root_pulled_in_guest(
    volume: Mapping[str, Any] | None, spec: OciSpec, config: Config, container_id: ContainerId
) -> Storage | None:
    """The storage the guest makes the root of, None if it does not pull. Raises ShimError naming what is wrong.

    `volume` is the snapshotter's description of the root, if there is one.
    """
    if volume is None and not config.runtime.experimental_force_guest_pull:
        return None
    metadata: Mapping[str, str]
    if membership(spec.annotations, container_id).kind is ContainerKind.POD_SANDBOX:
        image, metadata = PAUSE, spec.annotations
    elif volume is not None:
        image, metadata = _volume_image(volume, container_id)
    else:
        image, metadata = _annotated_image(spec.annotations, container_id), spec.annotations
    return Storage(
        driver=DRIVER,
        driver_options=(f"{DRIVER}={json.dumps({'metadata': dict(metadata)}, separators=(',', ':'), sort_keys=True)}",),
        source=image,
        fs_type="overlay",
        options=(),
        mount_point=GuestPath(f"{guest_container_dir(container_id)}/rootfs"),
    )


def _volume_image(volume: Mapping[str, Any], container_id: ContainerId) -> tuple[str, Mapping[str, str]]:
    image = volume.get("source")
    pull = volume.get("image_pull") or {}
    metadata = (pull.get("metadata") or {}) if isinstance(pull, dict) else None
    if not isinstance(image, str) or not image or not isinstance(metadata, dict):
        raise InvalidArgument(f"create container '{container_id}': its root's volume names no image")
    return image, {str(key): str(value) for key, value in metadata.items()}


def _annotated_image(annotations: Mapping[str, str], container_id: ContainerId) -> str:
    key = keys_of(annotations).image_name
    if image := annotations.get(key):
        return image
    raise FailedPrecondition(
        f"create container '{container_id}': experimental_force_guest_pull needs the image's name in annotation {key!r}"
    )
