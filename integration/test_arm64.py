"""Pods in emulated arm64 VMs, on a machine of any processor: arm64 image, volumes, network, disks, size, end."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyshim.host.kernel_image import boot_file_architecture
from pyshim.model.architecture import AARCH64
from pyshim.model.units import MIB

from .conftest import GROUND
from .framework import images, shim_config
from .framework.ctr import Ctr, Result
from .framework.direct import update_task
from .framework.loop_devices import loop_device
from .framework.networks import added_link, pod_network
from .framework.runtime import Runtime
from .framework.waiting import eventually

PROJECT = Path(__file__).resolve().parents[1]
GUEST = PROJECT / ".build/guest-arm64"
QEMU = AARCH64.qemu_paths[0]
FIRMWARE = "/usr/share/AAVMF/AAVMF_CODE.fd"
IMAGE = "docker.io/library/busybox-arm64:test"
PLATFORM = ("--platform", "linux/arm64")

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(600),
    pytest.mark.skipif("ARM64" not in os.environ, reason="minutes of emulation: make peers WHAT=arm64"),
    pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU} (hint: apt install qemu-system-arm)"),
    pytest.mark.skipif(
        not (GUEST / "manifest.json").exists(),
        reason=f"needs {GUEST} (hint: python -m guest.image build --arch arm64)",
    ),
]


def _config(directory: Path, /, is_static: bool = True, **hypervisor: Any) -> Path:
    """The shipped configuration for an emulated arm64 VM, with these keys of its hypervisor."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {"kernel": GUEST / "vmlinux", "initrd": GUEST / "initrd.img", "image": GUEST / "rootfs.img"}
    keys = {"machine_type": "virt", "accelerator": "tcg", "path": QEMU, "enable_template": False, **files}
    return shim_config.with_keys(
        directory, keys, hypervisor=hypervisor, runtime={"static_sandbox_resource_mgmt": is_static}
    )


@pytest.fixture(scope="module", autouse=True)
def arm64_image(ctr: Ctr) -> Iterator[None]:
    """The payload with Debian's busybox for arm64, which the guest's build has unpacked."""
    found = (GUEST.parent / "cache/guest/unpacked").glob("busybox-static_*/**/bin/busybox")
    busybox = next(path for path in found if boot_file_architecture(str(path)) == AARCH64.name)
    archive = GROUND / "busybox-arm64.tar"
    layers = [images.base_layer(busybox), images.upper_layer()]
    images.write_archive(archive, IMAGE, layers=layers, architecture="arm64")
    ctr("images", "import", *PLATFORM, archive)
    yield
    ctr("images", "rm", "--sync", IMAGE)


def _start(ctr: Ctr, name: str, config: Path, *options: str | Path) -> None:
    words = ctr.run_words("--detach", *PLATFORM, *options, config=config)
    ctr(*words, IMAGE, name, "sleep", "100000", within_s=300)


def _inside(ctr: Ctr, name: str, script: str) -> Result:
    return ctr.inside(name, "sh", "-c", script, check=False)


@pytest.mark.parametrize("root", ["/dev/vda1", "/dev/pmem0p1"])
def test_an_arm64_container_runs_to_its_end(ctr: Ctr, name: str, scratch: Path, root: str) -> None:
    """Its guest's root image is a disk; with UEFI, by which the guest finds it, it is persistent memory."""
    keys: dict[str, Any] = {"firmware": FIRMWARE, "disable_image_nvdimm": False} if "pmem" in root else {}
    if keys and not Path(FIRMWARE).exists():
        pytest.skip(f"needs {FIRMWARE} (hint: apt install qemu-efi-aarch64)")
    script = f"uname -m; cat /layer-marker; grep -q root={root} /proc/cmdline && read line; echo $line; exit 7"
    words = ctr.run_words("--rm", *PLATFORM, config=_config(scratch, **keys))

    result = ctr(*words, IMAGE, name, "sh", "-c", script, input=b"in\n", check=False, within_s=300)

    assert (result.lines, result.code) == (["aarch64", "upper", "in"], 7), result


def test_two_containers_of_a_pod_share_a_volume_and_a_network_that_grows(
    ctr: Ctr, name: str, scratch: Path, runtime: Runtime
) -> None:
    """The guest finds what is plugged behind a PCIe switch by native hotplug: a NIC, and a disk of each bus."""
    config = _config(scratch / "config")
    volume = scratch / "volume"
    volume.mkdir()
    (volume / "given").write_text("by the host\n")
    mount = ("--mount", f"type=bind,src={volume},dst=/volume,options=rbind:rw")
    with pod_network("it-arm64", subnet=7) as network:
        _start(ctr, name, config, *_member_of(name, "sandbox"), "--with-ns", f"network:{network.namespace}")
        for each in ("a", "b"):
            _start(ctr, f"{name}-{each}", config, *_member_of(name, "container"), *mount)

        assert len(runtime.vmms(name)) == 1
        said = _inside(ctr, f"{name}-a", "cat /volume/given; echo by a > /volume/made; uname -m")
        assert said.lines == ["by the host", "aarch64"], said
        assert _inside(ctr, f"{name}-b", "cat /volume/made; exit 3").lines == ["by a"]
        assert (volume / "made").read_text() == "by a\n"
        assert " 0% packet loss" in _inside(ctr, f"{name}-b", f"ping -c 3 -W 5 {network.peer_address}").out
        with added_link(network, "later", subnet=9) as gateway:
            eventually(
                lambda: _inside(ctr, f"{name}-a", "ip route | grep 10.9.0.0/16").code == 0, what="the new interface"
            )
            assert " 0% packet loss" in _inside(ctr, f"{name}-a", f"ping -c 3 -W 5 {gateway}").out
        gone = "! ip link show dev later 2> /dev/null"
        eventually(lambda: _inside(ctr, f"{name}-a", gone).code == 0, what="the interface is gone")
        ctr("task", "kill", "--signal", "KILL", f"{name}-a")
        ctr.wait_for_state(f"{name}-a", "STOPPED")
        assert _inside(ctr, f"{name}-b", "cat /volume/given").lines == ["by the host"]


def test_a_disk_is_plugged_and_its_content_read(ctr: Ctr, name: str, scratch: Path) -> None:
    disk = scratch / "disk"
    disk.write_bytes(b"on the disk\n" + bytes(MIB - 12))
    for bus in ("virtio-blk", "virtio-scsi"):
        config = _config(scratch / bus, block_device_driver=bus)
        with loop_device(disk) as device:
            _start(ctr, f"{name}-{bus}", config, "--device", device)

            assert _inside(ctr, f"{name}-{bus}", f"head -n 1 {device}").lines == ["on the disk"]
            ctr.remove([f"{name}-{bus}"])


@pytest.mark.parametrize("firmware", ["", FIRMWARE], ids=["device-tree", "uefi"])
def test_the_vm_grows_in_memory_and_keeps_its_vcpus(ctr: Ctr, name: str, scratch: Path, firmware: str) -> None:
    """Without firmware there is no ACPI: memory grows by virtio-mem, and by DIMMs with it."""
    if firmware and not Path(firmware).exists():
        pytest.skip(f"needs {firmware} (hint: apt install qemu-efi-aarch64)")
    directory = scratch / "config"
    directory.mkdir()
    sizes = {"default_memory": 256, "default_maxmemory": 1280, "firmware": firmware}
    config = _config(directory, is_static=False, **sizes)
    _start(ctr, name, config, "--memory-limit", str(200 * MIB))

    def look() -> tuple[int, int]:
        cpus, total = _inside(ctr, name, "nproc; grep MemTotal /proc/meminfo").lines
        return int(cpus), int(total.split()[1]) // 1024

    cpus, before_mib = look()
    update_task(name, cpu={"quota": 150_000, "period": 100_000}, memory={"limit": 500 * MIB})

    eventually(lambda: look() == (cpus, before_mib + 256), what=lambda: f"{before_mib} + 256 MiB, not {look()}")
    assert cpus == 1


@pytest.mark.parametrize("victim", ["shim", "vmm"])
def test_a_killed_part_ends_the_task(ctr: Ctr, runtime: Runtime, name: str, scratch: Path, victim: str) -> None:
    _start(ctr, name, _config(scratch))
    (process,) = runtime.shims(name) if victim == "shim" else runtime.vmms(name)

    os.kill(process.pid, signal.SIGKILL)

    eventually(lambda: ctr.state_of(name) in (None, "STOPPED"), what="the task has ended")
    ctr("task", "rm", "--force", name, check=False)
    ctr("container", "rm", name)
    eventually(lambda: not [*runtime.shims(name), *runtime.vmms(name)], what="every process is gone")


_OF_X86 = {"kernel": GUEST.parent / "guest/vmlinux", "initrd": GUEST.parent / "guest/initrd.img"}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"kernel": _OF_X86["kernel"]}, "is for x86_64, and machine type virt is of aarch64"),
        ({"initrd": _OF_X86["initrd"]}, "is for x86_64, and machine type virt is of aarch64"),
        ({"machine_type": "q35"}, 'qemu-system-aarch64 has no machine type "q35", which is of x86_64'),
        ({"accelerator": "auto"}, "is of aarch64, and this host's processor is x86_64, with q35 and microvm"),
    ],
    ids=["kernel", "initrd", "machine-type", "not-emulated"],
)
def test_what_is_of_another_processor_is_one_error_before_anything_is_made(
    ctr: Ctr, name: str, scratch: Path, runtime: Runtime, keys: dict[str, Any], text: str
) -> None:
    words = ctr.run_words("--rm", *PLATFORM, config=_config(scratch / "config", **keys))

    refused = ctr(*words, IMAGE, name, "true", check=False)

    assert refused.code != 0
    assert text in refused.err
    assert not runtime.vmms(name)


def _member_of(sandbox: str, kind: str) -> tuple[str, ...]:
    keys = {"container-type": kind, "sandbox-id": sandbox}
    return tuple(word for key, value in keys.items() for word in ("--annotation", f"io.kubernetes.cri.{key}={value}"))
