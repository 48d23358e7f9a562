"""The share of a sandbox and the volumes of its containers on the host.

The share is made before the VM starts. A container's volumes are looked at before it is planned, and mounted before the
guest is asked to create it.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from pyshim.concurrency.undo import Undo
from pyshim.model.config import Config
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.observation import traced
from pyshim.model.oci import OciSpec
from pyshim.model.plans import ContainerPlan
from pyshim.model.seams import Host
from pyshim.model.task import RootfsMount
from pyshim.model.volumes import Bind, SourceFacts
from pyshim.resources.services import SandboxServices
from pyshim.resources.volumes.plan.layers import (
    MAX_VERITY_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSET_BYTES,
    VERITY_OPTION,
    VERITY_SUPERBLOCK_BYTES,
    check_layer,
    is_layer,
    layer_verity,
    verity_file,
    verity_options,
)
from pyshim.resources.volumes.plan.volumes import vhost_user_store, volume_sources


async def volume_facts(host: Host, spec: OciSpec, config: Config) -> Mapping[str, SourceFacts]:
    """The facts of every path in `volume_sources(spec)`, and of every emptyDir of which one is a subPath.

    Raises ShimError for a direct volume with a broken record and a vhost-user disk that no program serves.
    """
    store = vhost_user_store(config.hypervisor)
    facts = {source: await host.source_facts(source, store) for source in volume_sources(spec)}
    wholes = {each.empty_dir.path for each in facts.values() if each.empty_dir is not None and each.empty_dir.sub_path}
    facts.update({path: await host.source_facts(path, store) for path in wholes - facts.keys()})
    mounted = await host.mounted_files(facts) if facts else {}
    return {
        path: replace(found, place=there.file, mount_id=there.mount_id, mounts_below=there.mounts_below)
        if (there := mounted.get(path))
        else found
        for path, found in facts.items()
    }


async def at_present(host: Host, binds: Sequence[Bind]) -> tuple[Bind, ...]:
    """`binds` where they are now: since they were made, their directories may have been moved or removed."""
    if not binds:
        return ()
    mounted = await host.mounted_files([bind.mount.target for bind in binds])
    return tuple(replace(bind, place=there.file) for bind in binds if (there := mounted.get(bind.mount.target)))


@traced("make share")
async def make_share(services: SandboxServices) -> None:
    """The directories of VM and share are made, and the share's mounts; the sandbox's undo removes them."""
    plan, host = services.plan, services.host
    share = plan.share
    directories = (plan.vm.vm_dir, *((share.root,) if share.virtiofsd else ()))
    services.hold(
        *(LedgerEntry(kind=ResourceKind.DIRECTORY, key=path) for path in directories),
        *(LedgerEntry(kind=ResourceKind.MOUNT, key=mount.target) for mount in (*share.mounts, *share.bind_mounts)),
    )
    for path in directories:
        await host.make_directory(path, 0o700)
    if plan.initdata is not None:
        from pyshim.resources.confidential.plan.initdata import disk_image  # few pods have any

        await host.write_bytes(plan.local_vm.initdata, disk_image(plan.initdata), 0o600)
    for mount in share.mounts:
        await host.make_directory(mount.target, 0o700)
        await host.mount(mount)
    for path in share.directories:
        await host.make_directory(path, 0o755)
    for mount in share.bind_mounts:
        await host.mount(mount)


async def make_mounts(plan: ContainerPlan, *, host: Host, ledger: Ledger, undo: Undo) -> None:
    """The root file system is mounted and shared; `undo` reverts every step that was begun."""
    undo.acquire(
        ledger,
        *(mount.intent() for mount in plan.rootfs_mounts),
        *(LedgerEntry(kind=ResourceKind.DIRECTORY, key=point) for point in plan.share_points),
        *(LedgerEntry(kind=ResourceKind.MOUNT, key=mount.target) for mount in plan.share_mounts),
    )
    for mount in (*plan.rootfs_mounts, *plan.share_mounts):
        await host.mount(mount)


async def look_at_layers(host: Host, rootfs: tuple[RootfsMount, ...]) -> tuple[RootfsMount, ...]:
    """`rootfs`, with options that the agent understands for the layers that it is to verify.

    Raises ShimError naming a layer that is missing, truncated or no EROFS file system, or has no hashes.
    """
    return tuple([await _looked_at(host, mount) if is_layer(mount) else mount for mount in rootfs])


async def _looked_at(host: Host, mount: RootfsMount) -> RootfsMount:
    path = mount.source
    superblock = await host.read_piece(path, "", SUPERBLOCK_OFFSET_BYTES, SUPERBLOCK_BYTES)
    check_layer(path, superblock, await host.disk_bytes(path))
    file = verity_file(mount)
    if file is None:
        return mount
    verity = layer_verity(file, await host.read_bytes(file, MAX_VERITY_BYTES))
    hashes = await host.read_piece(path, "", verity.hash_offset_bytes, VERITY_SUPERBLOCK_BYTES)
    others = tuple(word for word in mount.options if not word.startswith(VERITY_OPTION))
    return replace(mount, options=(*others, *verity_options(path, verity, hashes)))
