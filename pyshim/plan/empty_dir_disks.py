"""emptyDir volumes on disks: a sparse file in the volume's directory, with an ext4 that the guest makes."""

from hypervisors.base import BlockDevice
from pyshim.model.config import Config
from pyshim.model.guest import Storage
from pyshim.model.ids import GuestPath
from pyshim.plan.disks import digest, disk
from pyshim.plan.share import GUEST_SANDBOX_DIR

CREATE_FILESYSTEM = "io.katacontainers.volume.block.create_filesystem"
_OWN_KEY = "encryption_key=ephemeral"


def empty_dir_disk(config: Config, directory: str) -> tuple[BlockDevice, Storage]:
    """The disk on `<directory>/disk.img`, and what the agent does with it; they stay until the sandbox ends.

    With `block-encrypted` the key is made in the guest and never leaves it; a plain one gives back what is freed.
    """
    encrypted = config.runtime.emptydir_mode == "block-encrypted"
    file = f"{directory}/disk.img"
    name = digest(file)
    storage = Storage(
        driver="",
        driver_options=(_OWN_KEY if encrypted else CREATE_FILESYSTEM,),
        source="",
        fs_type="ext4",
        options=() if encrypted else ("discard",),
        mount_point=GuestPath(f"{GUEST_SANDBOX_DIR}/storage/{name}"),
        shared=True,
    )
    return disk(config, device_id=f"blk-{name}", path=file, read_only=False, discard=not encrypted), storage
