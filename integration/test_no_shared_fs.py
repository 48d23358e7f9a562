"""A guest that shares no files with the host: its image is pulled inside, its volumes are copied, initdata is a disk.

This is how confidential guests live; here the same way is gone in a plain VM, one for the whole file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyshim.resources.confidential.plan.initdata import disk_image, encode, parse

from .conftest import GROUND, own_name
from .framework import shim_config
from .framework.ctr import Ctr, Result
from .framework.images import IMAGE
from .framework.kubelet_volumes import Payload
from .framework.networks import PodNetwork, pod_network
from .framework.registry import Registry, registry
from .framework.waiting import eventually

pytestmark = pytest.mark.vm

C = "io.katacontainers.config."
DOCUMENT = b'version = "0.1.0"\nalgorithm = "sha256"\n[data]\n"aa.toml" = "x = 1"\n'
BIG = bytes(range(256)) * 4096 * 3 + b"end"
"""More than three pieces of a copy."""


@pytest.fixture(scope="module")
def network(module_leaves_nothing: None) -> Iterator[PodNetwork]:
    with pod_network("it-pull", subnet=23) as made:
        yield made


@pytest.fixture(scope="module")
def images(network: PodNetwork) -> Iterator[Registry]:
    with registry(network.peer_address, GROUND / "busybox.tar", "local/busybox") as made:
        yield made


@pytest.fixture(scope="module")
def host_files(module_leaves_nothing: None) -> Path:
    directory = GROUND / "copied"
    (directory / "tree/inner").mkdir(parents=True)
    (directory / "tree/inner/big").write_bytes(BIG)
    (directory / "tree/empty").write_bytes(b"")
    (directory / "tree/link").symlink_to("inner/big")
    os.mkfifo(directory / "tree/pipe")
    (directory / "tree/private").write_text("for one")
    os.chown(directory / "tree/private", 1000, 50)
    os.chmod(directory / "tree/private", 0o4750)
    os.chmod(directory / "tree", 0o751)
    (directory / "message").touch()
    (directory / "single").write_text("one file\n")
    return directory


@pytest.fixture(scope="module")
def settings(host_files: Path) -> Payload:
    """A ConfigMap."""
    settings = Payload(host_files / "pods/u/volumes/kubernetes.io~configmap/settings")
    settings.write({"colour": "blue\n", "shape": "round\n"})
    return settings


@pytest.fixture(scope="module")
def scratch_volume(host_files: Path) -> Iterator[Path]:
    """An emptyDir on disk, as the kubelet makes it; on a file system of 64 MiB, since its disk is as large as that."""
    directory = host_files / "pods/u/volumes/kubernetes.io~empty-dir/cache"
    directory.mkdir(parents=True)
    backing = host_files / "backing.ext4"
    with backing.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", backing], check=True, capture_output=True, timeout=60)
    subprocess.run(["mount", "-o", "loop", backing, directory], check=True, capture_output=True, timeout=60)
    directory.chmod(0o777)
    os.chown(directory, 0, 2000)
    yield directory
    umount = ["umount", str(directory)]
    eventually(lambda: subprocess.run(umount, capture_output=True, timeout=60).returncode == 0, what="umount")


@pytest.fixture(scope="module")
def container(
    ctr: Ctr,
    network: PodNetwork,
    images: Registry,
    host_files: Path,
    settings: Payload,
    scratch_volume: Path,
) -> Iterator[str]:
    config = shim_config.variant(host_files, shared_fs="none", kernel_params=f"agent.image_source={images.url}")
    text = config.read_text().replace("enable_annotations = [", 'enable_annotations = ["cc_init_data", ')
    text = text.replace("[runtime]\n", '[runtime]\nemptydir_mode = "block-encrypted"\n')
    config.write_text(text)
    annotations = {
        C + "runtime.experimental_force_guest_pull": "true",
        C + "hypervisor.cc_init_data": encode(parse(DOCUMENT, "test")),
        "io.kubernetes.cri.image-name": f"docker.io/{IMAGE}",
        "io.kubernetes.container.terminationMessagePath": "/dev/termination-log",
    }
    with own_name(ctr) as name:
        ctr.start(
            name,
            *("--with-ns", f"network:{network.namespace}"),
            *(word for item in annotations.items() for word in ("--annotation", "=".join(item))),
            *("--mount", f"type=bind,src={host_files}/tree,dst=/tree,options=rbind:rw"),
            *("--mount", f"type=bind,src={host_files}/single,dst=/etc/single,options=bind:ro"),
            *("--mount", f"type=bind,src={settings.path},dst=/settings,options=rbind:ro"),
            *("--mount", f"type=bind,src={host_files}/message,dst=/dev/termination-log,options=rbind:rw"),
            *("--mount", f"type=bind,src={scratch_volume},dst=/cache,options=rbind:rw"),
            config=config,
        )
        yield name


@pytest.fixture
def inside(ctr: Ctr, container: str) -> Callable[[str], Result]:
    """Runs a shell script in the container."""

    def run(script: str) -> Result:
        return ctr.inside(container, "sh", "-c", script, check=False)

    return run


Script = Callable[[str], Result]


def test_the_image_was_pulled_in_the_guest_and_its_layers_lie_on_each_other(inside: Script, images: Registry) -> None:
    result = inside("cat /layer-marker; id -un; echo new > /written && cat /written; mount | grep ' / '")

    assert result.lines[:3] == ["upper", "root", "new"]
    assert "overlay on / type overlay (rw" in result.lines[3]
    assert images.asked[0] == "/v2/local/busybox/manifests/test"
    assert sum("/blobs/" in path for path in images.asked) == 2


def test_nothing_is_shared_and_no_virtiofsd_runs(container: str, inside: Script) -> None:
    assert "virtiofs" not in inside("mount").out
    assert not Path("/run/kata-containers/shared/sandboxes", container).exists()
    assert not Path("/run/vc/vm", container, "vhost-fs.sock").exists()


def test_a_directory_is_copied_with_owners_modes_links_and_every_byte(inside: Script) -> None:
    result = inside(
        "cd /tree; stat -c '%n %a %u %g %F' . inner empty private link; sha256sum < inner/big; readlink link; ls;"
        " head -c 3 link | od -An -tx1; wc -c < link"
    )

    assert result.lines == [
        ". 751 0 0 directory",
        "inner 755 0 0 directory",
        "empty 644 0 0 regular empty file",
        "private 4750 1000 50 regular file",
        "link 777 0 0 symbolic link",
        f"{hashlib.sha256(BIG).hexdigest()}  -",
        "inner/big",
        *("empty", "inner", "link", "private"),
        " 00 01 02",
        str(len(BIG)),
    ]


def test_a_copy_is_the_guests_own(inside: Script, host_files: Path) -> None:
    assert inside("echo changed > /tree/private; cat /tree/private").out == "changed\n"
    assert (host_files / "tree/private").read_text() == "for one"


def test_a_single_file_is_copied_and_read_only(inside: Script) -> None:
    result = inside("cat /etc/single; echo x > /etc/single")

    assert result.out == "one file\n"
    assert "Read-only file system" in result.err


def test_a_configmap_follows_the_kubelet_and_keeps_nothing_of_the_old(inside: Script, settings: Payload) -> None:
    assert inside("cat /settings/colour /settings/shape").out == "blue\nround\n"
    old = os.readlink(settings.path / "..data")

    settings.write({"colour": "red\n", "size": "large\n"})

    eventually(lambda: inside("cat /settings/size").out == "large\n", what="the new version in the guest")
    assert inside("cat /settings/colour").out == "red\n"
    eventually(lambda: inside(f"cat /settings/{old}/colour; cat /settings/shape").out == "", what="the old one empty")
    assert inside("cat /settings/shape").code != 0


def _wait_for_version(inside: Script, version: str) -> None:
    eventually(lambda: inside("cat /settings/size").out == f"{version}\n", what=f"version {version}")


def test_a_reader_never_sees_half_a_version(ctr: Ctr, container: str, inside: Script, settings: Payload) -> None:
    """Two files that always change together are read through the link while the volume changes."""
    settings.write({"colour": "v0\n", "size": "v0\n"})
    _wait_for_version(inside, "v0")
    script = (
        "while :; do cd /settings/..data && a=$(cat colour) b=$(cat size); cd /;"
        ' [ "$a" = "$b" ] || echo torn $a $b; [ "$b" = v2 ] && break; done; echo done'
    )
    with ctr.background(
        GROUND / "copied", "task", "exec", "--exec-id", "reader", container, "sh", "-c", script
    ) as reader:
        for version in ("v1", "v2"):
            settings.write({"colour": f"{version}\n", "size": f"{version}\n"})
            _wait_for_version(inside, version)
        result = reader.wait()

    # One of them may be empty by then: the old version is emptied when the new one counts.
    assert not [line for line in result.lines if len(line.split()) == 3]


def test_an_empty_dir_is_a_disk_that_only_the_guest_can_read(inside: Script, scratch_volume: Path) -> None:
    secret = "nobody outside may read this"
    result = inside(
        f"mount | grep ' /cache '; stat -c '%a %g' /cache; yes '{secret}' | head -c 1000000 > /cache/file; sync;"
        " tail -n 1 /cache/file | head -c 6"
    )

    assert result.lines[0].startswith("/dev/dm-0 on /cache type ext4 (rw")
    assert result.lines[1:] == ["2777 2000", "nobody"]
    disk = scratch_volume / "disk.img"
    assert disk.stat().st_blocks * 512 > 1_000_000, "it was written"
    assert secret.encode() not in disk.read_bytes()
    assert b"\x53\xef" not in disk.read_bytes()[1080:1082], "nor is there the magic number of an ext4"


def test_initdata_is_a_read_only_disk_with_the_document(inside: Script) -> None:
    found = inside('for d in /sys/block/vd*; do [ "$(cat $d/serial)" = initdata ] && cat $d/ro $d/size; done; true')

    assert found.lines == ["1", str(len(disk_image(parse(DOCUMENT, "test"))) // 512)]


def test_the_termination_message_reaches_the_kubelets_file(
    ctr: Ctr, container: str, inside: Script, host_files: Path
) -> None:
    """The last test of this file: it ends the container."""
    inside("echo lost the database > /dev/termination-log")
    assert (host_files / "message").read_text() == "", "the guest has a copy"

    ctr("task", "kill", "--signal", "KILL", container)

    # The event of the exit comes after the message; a state that somebody asks for may come before both.
    message = host_files / "message"
    eventually(lambda: message.read_text() == "lost the database\n", what="the message in the kubelet's file")
