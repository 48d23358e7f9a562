"""Pods whose images are the layers of containerd's EROFS snapshotter, in VMs that share no files with the host."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import GROUND
from .framework import crio, erofs, images, releases, shim_config
from .framework.cri import Container, Cri, Pod, Security, refusal
from .framework.cri_session import LAYERS_CONFIG, LAYERS_HANDLER, settled
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = [
    pytest.mark.vm,
    pytest.mark.skipif(
        crio.is_chosen() or not releases.chosen().leaves_mounts_to_shims,
        reason="needs a containerd that leaves layers to a shim (CONTAINERD=2.3)",
    ),
]

_COUNTS = (1, 5, 40)
_VOLUME_IMAGE = "docker.io/local/layers:volume"


def _image(count: int) -> str:
    return f"docker.io/local/layers:{count}"


@pytest.fixture(scope="module")
def layers(cri: Cri, module_leaves_nothing: None) -> Iterator[None]:
    """CRI's containerd has the images, unpacked."""
    volume = images.layer({"data/": b"", "data/seed": b"from the image\n"}, mode=0o755)
    volume_layers = [*images.payload_layers(), volume]
    archive = GROUND / "layers.tar"
    wanted: dict[str, tuple[list[bytes], dict[str, object]]]
    wanted = {_image(count): (erofs.image_layers(count), {}) for count in _COUNTS}
    wanted[_VOLUME_IMAGE] = (volume_layers, {"Volumes": {"/data": {}}})
    LAYERS_CONFIG.parent.mkdir()
    for name, (each, settings) in wanted.items():
        images.write_archive(archive, name, layers=each, settings=settings)
        _ctr(cri, "images", "import", *releases.chosen().client_import, "--snapshotter", erofs.SNAPSHOTTER, archive)
    archive.unlink()
    yield
    assert _containers_snapshots(cri) == []
    _ctr(cri, "images", "rm", "--sync", *wanted)


def _ctr(cri: Cri, *words: str | Path) -> list[dict[str, str]]:
    return cri.daemon.ctr("--namespace", "k8s.io", *words).rows()


def _containers_snapshots(cri: Cri) -> list[str]:
    """Those that are no image's."""
    rows = _ctr(cri, "snapshot", "--snapshotter", erofs.SNAPSHOTTER, "ls")
    return [row["KEY"] for row in rows if not row["KEY"].startswith("sha256:")]


@pytest.fixture(scope="module")
def whole_pod(cri: Cri, layers: None) -> Iterator[Pod]:
    """A pod that shares no files with the host, for the whole file."""
    shim_config.variant(LAYERS_CONFIG.parent, shared_fs="none")
    with cri.pod(handler=LAYERS_HANDLER) as made:
        yield settled(made)


@pytest.fixture
def pod(whole_pod: Pod, leaves_nothing: None) -> Iterator[Pod]:
    yield whole_pod
    whole_pod.remove_containers()


@pytest.mark.parametrize("count", _COUNTS)
def test_every_layer_of_an_image_is_seen_and_users_are_known_by_name(pod: Pod, count: int) -> None:
    user, number = ("alice", "1000") if count == 1 else ("bob", "1234")

    container = pod.start(image=_image(count), security=Security(run_as_username=user))

    assert container.sh(erofs.SEEN).splitlines() == erofs.seen(count)
    assert container.sh("id -u").strip() == number


def test_no_file_server_runs_and_nothing_is_mounted_on_the_host(runtime: Runtime, pod: Pod) -> None:
    container = pod.start(image=_image(5))

    assert runtime.virtiofsds(pod.id) == []
    assert "virtiofs" not in container.sh("mount")
    host = Path("/proc/self/mounts").read_text()
    assert [line for line in host.splitlines() if " erofs " in line or (pod.id in line and "overlay" in line)] == []


def test_a_layer_is_one_disk_for_all_containers_and_goes_with_the_last(pod: Pod) -> None:
    own = pod.start()
    before = _disks(own)
    first, second = (pod.start(image=_image(5)) for _ in range(2))

    assert _disks(own) == before + 4, "the lowest layer is that of the other image, too"
    first.sh("echo mine > /layer-marker")
    assert second.sh("cat /layer-marker") == "4\n"
    first.stop(0)
    first.remove()
    assert second.sh(erofs.SEEN).splitlines() == erofs.seen(5)
    assert _disks(own) == before + 4
    second.stop(0)
    second.remove()
    assert _disks(own) == before
    pod.containers = [own]


def _disks(container: Container) -> int:
    return int(container.sh("ls -d /sys/block/sd* | wc -l"))


def test_a_read_only_root_is_one(pod: Pod) -> None:
    container = pod.start(image=_image(5), security=Security(readonly_rootfs=True))

    assert "Read-only file system" in container.exec("touch", "/new").err
    assert container.sh(erofs.SEEN).splitlines() == erofs.seen(5)


def test_an_images_volume_begins_with_what_the_image_has_there(pod: Pod) -> None:
    container = pod.start(image=_VOLUME_IMAGE)

    assert container.sh("cat /data/seed; echo more >> /data/seed; cat /data/seed").splitlines() == [
        *["from the image"] * 2,
        "more",
    ]


def test_a_pod_whose_containers_share_processes_has_its_pause_image_from_layers(cri: Cri, layers: None) -> None:
    shim_config.variant(LAYERS_CONFIG.parent, shared_fs="none")
    with cri.pod(handler=LAYERS_HANDLER, share_processes=True) as pod:
        container = pod.start(image=_image(5))

        assert "/pause" in container.sh("ps") or releases.sandboxer() == "shim"


@pytest.mark.parametrize("killed", ["shim", "vmm", "containerd"])
def test_layers_are_free_after_a_death(cri: Cri, runtime: Runtime, layers: None, killed: str) -> None:
    shim_config.variant(LAYERS_CONFIG.parent, shared_fs="none")
    before = _containers_snapshots(cri)
    with cri.pod(handler=LAYERS_HANDLER) as pod:
        container = pod.start(image=_image(5))
        if killed == "containerd":
            cri.daemon.restart(signal.SIGKILL)
            cri.connect()
            assert container.sh(erofs.SEEN).splitlines() == erofs.seen(5)
        else:
            (process,) = (runtime.shims if killed == "shim" else runtime.vmms)(pod.id)
            os.kill(process.pid, signal.SIGKILL)
            eventually(lambda: not container.is_running, what="the container has ended")
    eventually(lambda: _containers_snapshots(cri) == before, what="the snapshots are removed")


def test_a_machine_without_hotplug_refuses_layers_by_name(cri: Cri, layers: None) -> None:
    shim_config.variant(LAYERS_CONFIG.parent, machine_type="microvm")
    with cri.pod(handler=LAYERS_HANDLER) as pod:
        assert "layer.erofs" in refusal(lambda: pod.start(image=_image(5)))
