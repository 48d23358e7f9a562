"""Disks: a root file system, a direct volume, raw devices and an emptyDir, plugged as virtio-blk and as virtio-scsi."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from protos.containerd import runtimeoptions_pb2, task_v2_pb2, types_pb2
from pyshim.model.units import MIB
from pyshim.ttrpc import RemoteError

from .framework import oci, shim_config
from .framework.direct import DirectShim, direct_shim
from .framework.kubelet_volumes import PodDirectory
from .framework.loop_devices import loop_device
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = pytest.mark.vm

PROJECT = Path(__file__).resolve().parents[1]
RECORDS = Path("/run/kata-containers/shared/direct-volumes")
DIRECT_VOLUME = "/var/lib/csi/volume one"
SHARES = Path("/run/kata-containers/shared/sandboxes")
BUSES: dict[str, dict[str, Any]] = {
    "blk": {
        "block_device_driver": "virtio-blk",
        "block_device_cache_set": True,
        "block_device_cache_noflush": True,
        "block_device_aio": "threads",
        "indep_iothreads": 2,
        "block_device_logical_sector_size": 512,
        "block_device_physical_sector_size": 4096,
    },
    "scsi": {"block_device_driver": "virtio-scsi", "enable_iothreads": True},
    "blk-with-firmware": {
        "block_device_driver": "virtio-blk",
        "firmware": str(shim_config.OVMF),
        "kernel": str(shim_config.COMPRESSED_KERNEL),
    },
}
Shims = Callable[..., DirectShim]


@pytest.fixture
def shim_for(runtime: Runtime, containerd: object, name: str, scratch: Path) -> Iterator[Shims]:
    with contextlib.ExitStack() as stack:

        def make(script: str, *mounts: dict[str, Any], devices: tuple[dict[str, Any], ...] = ()) -> DirectShim:
            config = oci.spec("sh", "-c", script, name=name, rootfs="rootfs")
            config["mounts"] += mounts
            config["linux"]["devices"] = list(devices)
            for device in devices:
                rule = {"allow": True, "access": "rwm", **{key: device[key] for key in ("type", "major", "minor")}}
                config["linux"]["resources"]["devices"].append(rule)
            shim = stack.enter_context(direct_shim(runtime, PROJECT / "bin", name, scratch / "bundle", config))
            shim.start()
            return shim

        yield make


@pytest.fixture
def records() -> Iterator[Path]:
    """The node's direct volume records, empty before and after."""
    RECORDS.mkdir(parents=True)
    yield RECORDS
    RECORDS.rmdir()


def bind(source: Path | str, destination: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": str(source), "options": ["rbind", *options]}


def image(path: Path, size_mib: int, content: Path | None = None) -> Path:
    """An ext4 with a copy of `content`."""
    with path.open("wb") as file:
        file.truncate(size_mib * MIB)
    words = ["-d", str(content)] if content else []
    subprocess.run(["mkfs.ext4", "-q", "-F", *words, str(path)], check=True)
    return path


def read_image(path: Path, name: str) -> str:
    """A file out of an ext4 that is not mounted."""
    return subprocess.run(["debugfs", "-R", f"cat {name}", path], check=True, capture_output=True, text=True).stdout


def options(scratch: Path, keys: dict[str, Any], runtime_keys: dict[str, Any] | None = None) -> Any:
    path = shim_config.with_keys(scratch, hypervisor=keys, runtime=runtime_keys or {})
    asked = runtimeoptions_pb2.Options(config_path=str(path))
    return {"type_url": "runtimeoptions.v1.Options", "value": asked.SerializeToString()}


@contextlib.contextmanager
def direct_volume(info: Mapping[str, Any]) -> Iterator[None]:
    """The node has a record of the volume at DIRECT_VOLUME."""
    operator("add", "--volume-path", DIRECT_VOLUME, "--mount-info", json.dumps(info))
    try:
        yield
    finally:
        operator("remove", "--volume-path", DIRECT_VOLUME)


def operator(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [str(PROJECT / "bin" / "pyshim"), "direct-volume", *words]
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=60)


def run(shim: DirectShim, scratch: Path, root: Path, opts: Any) -> None:
    rootfs = types_pb2.Mount(type="ext4", source=str(root), options=["loop", "rw"])
    shim.call("Create", task_v2_pb2.CreateTaskResponse, bundle=str(shim.bundle), rootfs=[rootfs], options=opts)
    shim.call("Start")
    eventually((scratch / "out" / "ready").exists, what="the container has done its work", within_s=60)


def end(shim: DirectShim) -> None:
    shim.call("Kill", signal=9, all=True)
    shim.call("Wait", task_v2_pb2.WaitResponse)
    shim.call("Delete", task_v2_pb2.DeleteResponse)


SCRIPT = """
    cd /out
    cat /layer-marker > marker; echo from the guest > /created
    grep -E ' (/|/data|/image|/scratch) ' /proc/mounts > mounts
    stat -c '%g %a' /data > data-stat; cat /data/../created > /data/copy; df -k /data | tail -1 > data-df
    cat /image/layer-marker > image-marker; touch /image/no 2>image-error
    echo kept > /scratch/file; stat -c %a /scratch > scratch-stat
    head -c 9 /dev/xvda > raw; echo guest-raw | dd of=/dev/xvda bs=512 seek=8 conv=notrunc,fsync 2>/dev/null
    head -c 9 /dev/bound > bound 2>/dev/null
    for d in /sys/block/*; do
        echo $(basename $d) $(cat $d/queue/physical_block_size $d/serial 2>/dev/null)
    done > disks
    ls /sys/bus/scsi/devices 2>/dev/null > scsi
    mkdir /posix && PYTHON -I -S /check.py /posix > posix 2>&1
    sync; touch ready; sleep 100000
"""


def _bus(name: str) -> Any:
    missing = name.endswith("firmware") and not shim_config.OVMF.exists()
    reason = f"needs {shim_config.OVMF} (hint: apt install ovmf)"
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=reason))


@pytest.mark.parametrize("bus", [_bus(name) for name in BUSES])
def test_every_kind_of_disk_in_one_container(
    shim_for: Shims, scratch: Path, plain_rootfs: Path, kubelet: PodDirectory, records: Path, bus: str
) -> None:
    (scratch / "out").mkdir()
    root = image(scratch / "root.img", 32, plain_rootfs)
    extra = image(scratch / "extra.img", 16, plain_rootfs)
    volume, raw = scratch / "volume.img", scratch / "raw.img"
    with volume.open("wb") as file:
        file.truncate(24 * MIB)
    raw.write_bytes(b"host-raw\n" + bytes(4 * MIB - 9))
    data = kubelet.empty_dir("data")
    metadata = {"fsGroup": "1234", "createFilesystem": "true"}
    info = {"volume-type": "block", "device": str(volume), "fstype": "ext4", "metadata": metadata}
    with direct_volume(info), loop_device(raw) as device:
        number = os.stat(device).st_rdev
        node = {"path": "/dev/xvda", "type": "b", "major": os.major(number), "minor": os.minor(number)}
        shim = shim_for(
            SCRIPT.replace("PYTHON", os.path.realpath(sys.executable)),
            bind(scratch / "out", "/out"),
            bind(DIRECT_VOLUME, "/data"),
            {"destination": "/image", "type": "ext4", "source": str(extra), "options": ["loop", "ro"]},
            bind(data, "/scratch"),
            bind(device, "/dev/bound"),
            bind(PROJECT / "integration" / "posix_check.py", "/check.py", "ro"),
            *(bind(path, path, "ro") for path in ("/usr", "/lib", "/lib64") if Path(path).is_dir()),
            devices=(node,),
        )
        runtime_keys = {"emptydir_mode": "block-plain", "sandbox_bind_mounts": [str(plain_rootfs)]}
        try:
            run(shim, scratch, root, options(scratch, {**BUSES[bus], "disable_block_device_use": False}, runtime_keys))
            written = {path.name: path.read_text(errors="replace") for path in (scratch / "out").iterdir()}
            _check_guest(written, bus, shim.container)
            assert (data / "disk.img").stat().st_blocks < (data / "disk.img").stat().st_size / 512
            assert not os.path.ismount(shim.bundle / "rootfs")
            shown = SHARES / shim.container / "shared" / "sandbox-mounts" / plain_rootfs.name / "layer-marker"
            assert shown.read_text() == "upper\n"
            with pytest.raises(OSError, match="Read-only"):
                shown.write_text("no")
            _check_growth(volume, shim.container)
        finally:
            end(shim)
        assert raw.read_bytes()[4096:4105] == b"guest-raw"
    assert read_image(root, "created") == "from the guest\n"
    assert read_image(volume, "copy") == "from the guest\n"
    assert list(data.iterdir()) == []


def _check_guest(written: dict[str, str], bus: str, container: str) -> None:
    assert written["marker"] == "upper\n"
    assert written["image-marker"] == "upper\n"
    assert "Read-only" in written["image-error"]
    mounts = dict(line.split()[1:3] for line in written["mounts"].splitlines())
    assert mounts == {"/": "ext4", "/data": "ext4", "/image": "ext4", "/scratch": "ext4"}
    group, mode = written["data-stat"].split()
    assert group == "1234"
    assert int(mode, 8) & 0o2070 == 0o2070
    assert written["scratch-stat"] == "777\n"
    assert written["raw"] == written["bound"] == "host-raw\n"
    assert written["posix"] == "checked 7\n"
    disks = [line.split() for line in written["disks"].splitlines()]
    prefix = "sd" if bus == "scsi" else "vd"
    ours = [disk for disk in disks if disk[0].startswith(prefix) and disk[0] != "vda"]  # vda is the guest's own root
    assert len(ours) == 5, disks
    if bus == "blk":
        assert {disk[1] for disk in ours} == {"4096"}
        assert all(disk[2].startswith(("blk-", "root-")) for disk in ours)
    elif bus == "scsi":
        assert sum(name.count(":") == 3 for name in written["scsi"].split()) == 5


def _check_growth(volume: Path, container: str) -> None:
    path = ("--volume-path", DIRECT_VOLUME)
    before = json.loads(operator("stats", *path).stdout)["usage"][0]
    assert "has 25165824" in operator("resize", *path, "--size", str(48 * MIB), check=False).stderr
    os.truncate(volume, 48 * MIB)

    operator("resize", *path, "--size", str(48 * MIB))

    after = json.loads(operator("stats", *path).stdout)["usage"][0]
    assert before["unit"] == after["unit"] == 1
    assert before["total"] < 24 * MIB < after["total"] <= 48 * MIB
    assert (Path("/run/vc/sbs") / container / "shim-monitor.sock").is_socket()


def test_a_device_that_is_no_file_system_is_named_and_leaves_nothing(
    shim_for: Shims, scratch: Path, plain_rootfs: Path
) -> None:
    garbage = scratch / "garbage.img"
    garbage.write_bytes(os.urandom(MIB))
    shim = shim_for("true")
    rootfs = types_pb2.Mount(type="ext4", source=str(garbage), options=["loop"])

    opts = options(scratch, {"disable_block_device_use": False})
    with pytest.raises(RemoteError, match=r"mount '?/dev/"):
        shim.call("Create", bundle=str(shim.bundle), rootfs=[rootfs], options=opts)
