"""Devices asked for by name, through containerd: specs of the host resolved by the daemon's child.

What needs no hardware: a device whose spec sets variables only, and a disk that a program serves. Devices behind ports
in a real guest are in tests/contract/test_passed_devices.py.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.kubelet import FakeKubelet, container, pod, serving

from .framework import shim_config
from .framework.ctr import Ctr
from .framework.waiting import eventually

pytestmark = pytest.mark.vm
SPECS = Path("/var/run/cdi")
STORAGE_DAEMON = "/usr/bin/qemu-storage-daemon"


@pytest.fixture
def specs() -> Iterator[Path]:
    """The directory of transient specs, and its files gone after the test."""
    made = [path for path in (SPECS, *SPECS.parents) if not path.exists()]
    SPECS.mkdir(parents=True, exist_ok=True)
    document = {
        "cdiVersion": "0.5.0",
        "kind": "toy.org/note",
        "devices": [{"name": name, "containerEdits": {"env": [f"TOY_{name}=yes"]}} for name in ("a", "b")],
    }
    files = {"toy.yaml": json.dumps(document), "broken.json": "{"}
    for name, text in files.items():
        (SPECS / name).write_text(text)
    yield SPECS
    for name in files:
        (SPECS / name).unlink()
    for path in made:
        path.rmdir()


@pytest.fixture
def store(scratch: Path) -> Iterator[Path]:
    """A store of vhost-user disks with one, number 7, that QEMU's own program serves."""
    devices, sockets = scratch / "store/block/devices", scratch / "store/block/sockets"
    devices.mkdir(parents=True)
    sockets.mkdir()
    os.mknod(devices / "disk7", 0o600 | stat.S_IFBLK, os.makedev(241, 7))
    image = scratch / "disk7.img"
    image.write_bytes(b"served".ljust(1 << 20, b"\0"))
    export = f"vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={sockets / 'disk7'},writable=on"
    words = [STORAGE_DAEMON, "--blockdev", f"driver=file,node-name=d,filename={image}", "--export", export]
    with subprocess.Popen(words) as program:
        try:
            socket = sockets / "disk7"
            eventually(lambda: socket.exists() or program.poll() is not None, what="the disk is served", within_s=60)
            assert program.poll() is None
            yield scratch / "store"
        finally:
            program.terminate()


def config(scratch: Path, kubelet: Path | None = None, store: Path | None = None) -> Path:
    disks = {"enable_vhost_user_store": True, "vhost_user_store_path": store} if store else {}
    runtime = {"pod_resource_api_sock": kubelet} if kubelet else {}
    return shim_config.with_keys(scratch, hypervisor={"cold_plug_vfio": "root-port", **disks}, runtime=runtime)


@pytest.mark.skipif(not os.path.exists(STORAGE_DAEMON), reason=f"needs {STORAGE_DAEMON}")
def test_what_a_devices_spec_sets_and_a_disk_a_program_serves_reach_the_container(
    ctr: Ctr, name: str, scratch: Path, specs: Path, store: Path
) -> None:
    """The disk comes twice, as a device and as a mount of its node, and is one."""
    node = store / "block/devices/disk7"
    script = (
        f"env; head -c 6 /dev/data; printf written | dd of={node} seek=1 bs=512 conv=fsync 2>/dev/null; "
        f'[ "$(stat -c %t:%T /dev/data)" = "$(stat -c %t:%T {node})" ] && echo one disk'
    )
    options = ["--annotation", "cdi.k8s.io/toy=toy.org/note=a", "--device", str(node)]
    options += ["--mount", f"type=bind,src={node},dst=/dev/data,options=rbind"]

    out = ctr.run(name, "sh", "-c", script, options=options, config=config(scratch, store=store)).out

    assert "TOY_a=yes" in out
    assert "TOY_b" not in out
    assert "served" in out
    assert "one disk" in out
    assert (scratch / "disk7.img").read_bytes()[512:].startswith(b"written")


def test_each_container_of_a_pod_has_what_the_kubelet_gave_it(ctr: Ctr, name: str, scratch: Path, specs: Path) -> None:
    """A device plugin's device in one container, a DRA claim's in the other; a third has none."""
    socket = scratch / "kubelet.sock"
    path = config(scratch, socket)
    given = pod(
        "web",
        "shop",
        container("plugin", devices={"toy.org/note": ["a"]}),
        container("claim", claims={"notes": ["toy.org/note=b"]}),
    )

    def create(container_id: str, kind: str, container_name: str) -> None:
        keys = {"container-type": kind, "sandbox-id": name, "sandbox-name": "web", "sandbox-namespace": "shop"}
        keys |= {"container-name": container_name} if container_name else {}
        words = [word for key, value in keys.items() for word in ("--annotation", f"io.kubernetes.cri.{key}={value}")]
        ctr.start(container_id, *words, config=path)

    def toys(container_id: str) -> list[str]:
        lines = ctr.inside(container_id, "cat", "/proc/1/environ").out.split("\0")
        return [line for line in lines if line.startswith("TOY_")]

    with serving(FakeKubelet(pod("other", "shop"), given), socket) as kubelet:
        create(name, "sandbox", "")
        for container_name in ("plugin", "claim", "neither"):
            create(f"{name}-{container_name}", "container", container_name)

    assert kubelet.calls == ["Get"]
    assert [toys(f"{name}-{each}") for each in ("plugin", "claim", "neither")] == [["TOY_a=yes"], ["TOY_b=yes"], []]
