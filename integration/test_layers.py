"""Images as disks: the layers that containerd's EROFS snapshotter leaves to the shim, below an overlay in the guest.

Most call the shim with the mounts that containerd would hand it, so they run with every containerd.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from protos.containerd import runtimeoptions_pb2, task_v2_pb2, types_pb2
from pyshim.model.units import MIB
from pyshim.ttrpc import RemoteError

from .conftest import GROUND, PROJECT, own_name
from .framework import erofs, images, oci, releases, shim_config, verity
from .framework.containerd import Containerd
from .framework.direct import DirectShim, direct_shim
from .framework.runtime import Runtime

pytestmark = pytest.mark.vm

_needs_snapshotter = pytest.mark.skipif(
    not releases.chosen().leaves_mounts_to_shims,
    reason=f"containerd {releases.chosen().generation} leaves no layers to a shim (CONTAINERD=2.3)",
)
_KIND = "io.kubernetes.cri.container-type"
_FILE_BYTES = 200 * verity.BLOCK_BYTES
"""More than one block of hashes covers."""
_FILL = "dd if=/dev/zero of=/full bs=64k 2>&1 | grep -c 'No space left'; rm /full"


Run = Callable[..., list[str]]


@pytest.fixture
def run(runtime: Runtime, containerd: Containerd, scratch: Path) -> Run:
    """Runs a script in a container whose root is made of these mounts, to its end: the lines of its output."""

    def run_script(mounts: Sequence[types_pb2.Mount], script: str, config: Path, *, shares: bool = False) -> list[str]:
        with own_name(containerd.ctr) as name, _shim(runtime, name, scratch / name, script) as shim:
            out = scratch / f"{name}.out"
            shim.start()
            _create(shim, mounts, config, stdout=f"file://{out}", stderr=f"file://{out}")
            assert bool(runtime.virtiofsds(name)) == shares
            shim.call("Start")
            status = shim.call("Wait", task_v2_pb2.WaitResponse).exit_status
            shim.call("Delete")
            assert status == 0, out.read_text()
        return out.read_text().splitlines()

    return run_script


@contextlib.contextmanager
def _shim(runtime: Runtime, name: str, bundle: Path, script: str) -> Iterator[DirectShim]:
    spec = oci.spec("sh", "-c", script, name=name, rootfs="rootfs")
    with direct_shim(runtime, PROJECT / "bin", name, bundle, spec) as shim:
        yield shim


def _create(shim: DirectShim, mounts: Sequence[types_pb2.Mount], config: Path, **fields: Any) -> None:
    asked = runtimeoptions_pb2.Options(config_path=str(config))
    options = {"type_url": "runtimeoptions.v1.Options", "value": asked.SerializeToString()}
    shim.call("Create", bundle=str(shim.bundle), rootfs=mounts, options=options, **fields)


def _digests(files: Sequence[Path]) -> list[str]:
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.parametrize(
    ("shared_fs", "driver", "count"),
    [("none", "virtio-scsi", 5), ("virtio-fs", "virtio-blk", 4), ("none", "virtio-scsi", 1)],
    ids=lambda value: str(value),
)
def test_layers_lie_on_each_other_and_what_is_written_stays_in_the_guest(
    run: Run, scratch: Path, shared_fs: str, driver: str, count: int
) -> None:
    config = shim_config.with_keys(scratch, {"shared_fs": shared_fs}, hypervisor={"block_device_driver": driver})
    files = erofs.layer_files(scratch / "snapshots", erofs.image_layers(count))
    before, snapshot = _digests(files), scratch / "snapshots" / "active"
    for name in ("fs", "work"):
        (snapshot / name).mkdir(parents=True)
    script = f"{erofs.SEEN}; echo new > /layer-marker; cat /layer-marker; mount | grep ' on / '"

    *lines, mount = run(erofs.active_mounts(files, snapshot), script, config, shares=shared_fs != "none")

    assert lines == [*erofs.seen(count), "new"]
    assert mount.startswith("overlay on / type overlay (rw")
    assert _digests(files) == before
    assert list((snapshot / "fs").iterdir()) == []


def test_a_view_of_layers_can_only_be_read(run: Run, scratch: Path) -> None:
    files = erofs.layer_files(scratch / "snapshots", erofs.image_layers(4))
    script = f"{erofs.SEEN}; touch /new 2>&1 | grep -o 'Read-only file system'"

    lines = run(erofs.view_mounts(files), script, shim_config.variant(scratch, shared_fs="none"))

    assert lines == [*erofs.seen(4), "Read-only file system"]


@pytest.fixture
def upper(scratch: Path) -> Path:
    """The file for writes, as containerd makes it."""
    made = scratch / "rwlayer.img"
    with made.open("wb") as file:
        file.truncate(16 * MIB)
    subprocess.run(["mkfs.ext4", "-q", made], check=True, capture_output=True, timeout=60)
    return made


def test_what_is_written_goes_to_the_snapshots_file_and_a_full_one_harms_nothing(
    run: Run, scratch: Path, upper: Path
) -> None:
    config = shim_config.variant(scratch, shared_fs="none")
    files = erofs.layer_files(scratch / "snapshots", erofs.image_layers(4))
    mounts = erofs.block_mounts(files, upper)

    first = run(mounts, f"{erofs.SEEN}; {_FILL}; echo kept > /file; cat /file", config)
    second = run(mounts, "cat /file", config)

    assert first == [*erofs.seen(4), "1", "kept"]
    assert second == ["kept"]
    subprocess.run(["e2fsck", "-f", "-n", upper], check=True, capture_output=True, timeout=60)


def test_an_encrypted_file_shows_the_host_nothing_and_is_new_for_each_task(
    run: Run, scratch: Path, upper: Path
) -> None:
    config = shim_config.with_keys(scratch, {"shared_fs": "none"}, runtime={"emptydir_mode": "block-encrypted"})
    mounts = erofs.block_mounts(erofs.layer_files(scratch / "snapshots", erofs.image_layers(4)), upper)
    secret = "nobody outside may read this"
    script = f"test ! -e /file && yes '{secret}' | head -c 1000000 > /file && sync && tail -n 1 /file | head -c 6"

    assert run(mounts, script, config) == run(mounts, script, config) == ["nobody"]
    assert secret.encode() not in upper.read_bytes()
    assert upper.stat().st_blocks * 512 > 1_000_000, "it was written"


def test_a_layer_with_a_root_hash_is_verified_block_by_block(run: Run, scratch: Path) -> None:
    mounts, layer = _verified(scratch)
    data = layer.read_bytes()
    layer.write_bytes(data.replace(b"d" * verity.BLOCK_BYTES, b"D" * verity.BLOCK_BYTES))
    script = "wc -c < /kept; cat /damaged 2>&1 >/dev/null | grep -o 'Input/output error'"

    lines = run(mounts, script, shim_config.variant(scratch, shared_fs="none"))

    assert lines == [str(_FILE_BYTES), "Input/output error"]


def test_a_verified_layer_is_free_for_the_next_container_of_the_pod(
    runtime: Runtime, containerd: Containerd, name: str, scratch: Path
) -> None:
    """Its device in the guest is gone with the last container, or a new one of the same name could not be made."""
    mounts, _ = _verified(scratch)
    config = shim_config.variant(scratch, shared_fs="none")
    kind = {"io.kubernetes.cri.sandbox-id": name}
    pod = {**oci.spec("pause", name=name, rootfs="rootfs"), "annotations": {**kind, _KIND: "sandbox"}}
    with direct_shim(runtime, PROJECT / "bin", name, scratch / "bundle", pod) as shim:
        shim.start()
        _create(shim, mounts, config)
        shim.call("Start")
        for app in ("one", "two"):
            spec = oci.spec("sh", "-c", "test -s /kept", name=app, rootfs="rootfs")
            bundle = oci.write({**spec, "annotations": {**kind, _KIND: "container"}}, scratch / app).parent
            shim.call("Create", id=app, bundle=str(bundle), rootfs=mounts)
            shim.call("Start", id=app)
            assert shim.call("Wait", task_v2_pb2.WaitResponse, id=app).exit_status == 0
            shim.call("Delete", id=app)


def test_a_wrong_root_hash_is_an_error_of_create(
    runtime: Runtime, containerd: Containerd, name: str, scratch: Path
) -> None:
    mounts, layer = _verified(scratch)
    described = layer.with_name("layer.erofs.dmverity")
    described.write_text(json.dumps({**json.loads(described.read_text()), "roothash": "00" * 32}))

    with _shim(runtime, name, scratch / "bundle", "true") as shim:
        shim.start()
        with pytest.raises(RemoteError, match=r"EIO.*root hash"):
            _create(shim, mounts, shim_config.variant(scratch, shared_fs="none"))


def _verified(scratch: Path) -> tuple[list[types_pb2.Mount], Path]:
    """The mounts of an image whose top layer has hashes and two files, and that layer's file."""
    files = {"kept": b"k" * _FILE_BYTES, "damaged": b"d" * _FILE_BYTES}
    layers = erofs.layer_files(scratch / "snapshots", [images.base_layer(), images.layer(files, mode=0o644)])
    mounts = erofs.active_mounts(layers, scratch)
    mounts[0].options.append(f"X-containerd.dmverity={verity.append_hashes(layers[1])}")
    return mounts, layers[1]


@_needs_snapshotter
@pytest.mark.parametrize("keeps", [False, True], ids=["in memory", "in a file"])
def test_a_task_that_is_started_again_has_its_file_but_no_memory_of_the_guest(
    containerd: Containerd, name: str, scratch: Path, keeps: bool
) -> None:
    ctr = containerd.ctr
    table = f'[plugins."io.containerd.snapshotter.v1.{erofs.SNAPSHOTTER}"]\n'
    with containerd.with_settings(f'{table}  default_size = "24MiB"\n' if keeps else ""):
        how = (*releases.chosen().client_import, "--snapshotter", erofs.SNAPSHOTTER)
        ctr("images", "import", *how, GROUND / "busybox.tar")
        config = shim_config.variant(scratch, shared_fs="none")
        ctr.start(name, "--snapshotter", erofs.SNAPSHOTTER, config=config)

        def inside(script: str) -> list[str]:
            return ctr.inside(name, "sh", "-c", script).lines

        assert inside("echo here > /file; cat /layer-marker") == ["upper"]
        assert not keeps or inside(_FILL) == ["1"]
        ctr("task", "kill", "--signal", "KILL", name)
        ctr.wait_for_state(name, "STOPPED")
        ctr("task", "rm", name)
        ctr("task", "start", "--detach", name)

        assert inside("cat /file 2>/dev/null; cat /layer-marker") == [*(["here"] if keeps else []), "upper"]
        ctr.remove([name])
