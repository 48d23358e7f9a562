"""Root file systems of containers: overlay, native (bind) and directory, and writes to them."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import GROUND
from .framework import erofs, images, releases
from .framework.ctr import Ctr, Result
from .framework.images import BINDS_LOW_PORTS

_CHECK = (
    "cat /layer-marker; echo new > /created && cat /created; rm /etc/group; ls /etc;"
    " chmod 640 /created; stat -c %a /created"
)
_EXPECTED = ["upper", "new", "os-release", "passwd", "640"]


@pytest.fixture(params=["overlayfs", "native", erofs.SNAPSHOTTER])
def snapshotter(request: pytest.FixtureRequest, ctr: Ctr) -> Iterator[str]:
    """A snapshotter that holds the image.

    `overlayfs` hands the shim an overlay mount and `native` a bind mount. `erofs` hands it the image's layers, or an
    overlay of them that containerd has mounted, by its release.
    """
    chosen: str = request.param
    release = releases.chosen()
    if chosen == erofs.SNAPSHOTTER and not release.has_erofs_snapshotter:
        pytest.skip(f"containerd {release.generation} has no EROFS snapshotter (CONTAINERD=2.3)")
    if chosen != "overlayfs":
        ctr("images", "import", *release.client_import, "--snapshotter", chosen, GROUND / "busybox.tar")
    yield chosen
    if chosen == erofs.SNAPSHOTTER:
        while rows := ctr("snapshot", "--snapshotter", chosen, "ls").rows():  # 2.1 keeps layers mounted
            top = {row["KEY"] for row in rows} - {row["PARENT"] for row in rows}
            for key in top:
                ctr("snapshot", "--snapshotter", chosen, "rm", key)


def test_root_of_a_snapshot_can_be_read_written_and_changed(ctr: Ctr, name: str, snapshotter: str) -> None:
    assert ctr.run(name, "sh", "-c", _CHECK, options=["--snapshotter", snapshotter]).lines == _EXPECTED


def _run(ctr: Ctr, name: str, rootfs: Path, script: str) -> Result:
    # A root file system without an image has no environment.
    return ctr(*ctr.run_words("--rm", "--rootfs", "--env", "PATH=/bin"), rootfs, name, "sh", "-c", script)


def test_root_in_a_plain_directory_keeps_what_was_written(ctr: Ctr, name: str, scratch: Path) -> None:
    rootfs = images.unpack_rootfs(scratch / "rootfs")
    assert _run(ctr, name, rootfs, _CHECK).lines == _EXPECTED
    assert (rootfs / "created").read_text() == "new\n"
    assert not (rootfs / "etc/group").exists()


def test_owners_and_links_are_the_same_on_both_sides(ctr: Ctr, name: str, scratch: Path) -> None:
    rootfs = images.unpack_rootfs(scratch / "rootfs")
    script = (
        "echo x > /a && chown 1000:50 /a && ln /a /hard && ln -s a /soft && mkfifo /pipe && mkdir -m 700 /dir"
        " && stat -c '%n %u %g %h %F' /a /soft /pipe"
    )

    result = _run(ctr, name, rootfs, script)

    assert result.lines == ["/a 1000 50 2 regular file", "/soft 0 0 1 symbolic link", "/pipe 0 0 1 fifo"]
    status = (rootfs / "a").stat()
    assert (status.st_uid, status.st_gid, status.st_nlink) == (1000, 50, 2)
    assert (rootfs / "hard").stat().st_ino == status.st_ino
    assert (rootfs / "soft").readlink() == Path("a")
    assert (rootfs / "pipe").is_fifo()
    assert (rootfs / "dir").stat().st_mode & 0o777 == 0o700


def test_sixteen_mebibytes_written_inside_are_the_same_bytes_outside(ctr: Ctr, name: str, scratch: Path) -> None:
    rootfs = images.unpack_rootfs(scratch / "rootfs")
    script = "head -c 16777216 /dev/urandom > /big && sync && sha256sum < /big"

    result = _run(ctr, name, rootfs, script)

    assert result.out.split()[0] == hashlib.sha256((rootfs / "big").read_bytes()).hexdigest()


def test_symlink_in_the_container_does_not_lead_out_to_the_host(ctr: Ctr, name: str, scratch: Path) -> None:
    """A guest that plants links must not make anyone on the host follow them."""
    rootfs = images.unpack_rootfs(scratch / "rootfs")
    victim = scratch / "victim"
    victim.write_text("untouched\n")
    (rootfs / "escape").symlink_to(victim)
    (rootfs / "up").symlink_to("../../../../../../../../../../" + str(victim))

    result = _run(ctr, name, rootfs, "cat /escape /up; echo owned > /escape; echo owned > /up; exit 0")

    assert result.code == 0, result
    assert "untouched" not in result.out
    assert victim.read_text() == "untouched\n"


def test_a_program_with_capabilities_gives_them_to_a_user(ctr: Ctr, name: str, scratch: Path) -> None:
    """As in an image whose server binds port 80 as a plain user."""
    rootfs = images.unpack_rootfs(scratch / "rootfs")
    shutil.copy(rootfs / "bin/busybox", rootfs / "bin/busybox-caps")
    os.setxattr(rootfs / "bin/busybox-caps", "security.capability", BINDS_LOW_PORTS)
    show = "sed -n s/CapEff:.//p /proc/self/status"
    listen = 'busybox-caps nc -l -p 80 & until netstat -ltn | grep -q ":80 "; do kill -0 $! || exit; done; kill $!'
    script = f"busybox {show}; busybox-caps {show}; {listen}; echo listened"

    # ctr sets no_new_privs, which CRI does only when asked.
    words = ctr.run_words("--rm", "--rootfs", "--env", "PATH=/bin", "--allow-new-privs")
    found = ctr(*words, rootfs, name, "sh", "-c", f"su alice -c '{script}'").lines

    assert found == ["0000000000000000", "0000000000000400", "listened"]
