"""Whole builds out of the package cache: the same inputs give the same bytes, and nothing is done twice."""

import json
import subprocess
from pathlib import Path

import pytest

from guest.image import recipe
from guest.image.build import MANIFEST, build, read_manifest
from guest.image.errors import BuildError

CHECKOUT = Path(__file__).resolve().parents[4]
CACHE = CHECKOUT / ".build/cache/guest"
ARTEFACTS = {"initrd.img", "rootfs.img", "vmlinux", "vmlinuz"}


def silent(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def cache() -> Path:
    if not (CACHE / "packages").is_dir():
        pytest.skip(f"no Debian packages in {CACHE}: run make guest")
    return CACHE


@pytest.fixture(scope="module")
def built(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("guest")
    build(checkout=CHECKOUT, out=out, cache=cache, progress=silent)
    return out


def test_two_builds_give_the_same_bytes(built: Path, cache: Path, tmp_path: Path) -> None:
    other = build(checkout=CHECKOUT, out=tmp_path / "deeper/out", cache=cache, progress=silent)
    one = read_manifest(built)

    assert one == other
    assert {name: facts["sha256"] for name, facts in other["artefacts"].items()}.keys() == ARTEFACTS
    assert (built / "rootfs.img").read_bytes() == (tmp_path / "deeper/out/rootfs.img").read_bytes()


def test_a_second_build_only_says_that_the_first_is_current(built: Path, cache: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in built.iterdir()}
    lines: list[str] = []

    build(checkout=CHECKOUT, out=built, cache=cache, progress=lines.append)

    assert lines == [f"guest image is current: {built}"]
    assert {file.name: file.stat().st_mtime_ns for file in built.iterdir()} == before


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest"])
def test_a_damaged_result_is_built_again(built: Path, cache: Path, damage: str) -> None:
    image = built / "initrd.img"
    whole = image.read_bytes()
    if damage == "cut":
        image.write_bytes(whole[:-1])
    elif damage == "gone":
        image.unlink()
    else:
        (built / MANIFEST).write_text("{}")

    build(checkout=CHECKOUT, out=built, cache=cache, progress=silent)

    assert image.read_bytes() == whole
    assert read_manifest(built) is not None


def test_a_failed_build_leaves_the_directory_as_it_was(built: Path, cache: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in built.iterdir() if file.name != "rootfs.img"}
    broken = tmp_path / "start.py"
    broken.write_text("def main(:\n")

    with pytest.raises(BuildError, match="start"):
        build(checkout=CHECKOUT, out=built, cache=cache, progress=silent, start=broken)

    assert {file.name: file.read_bytes() for file in built.iterdir() if file.name != "rootfs.img"} == before
    assert (built / "rootfs.img").exists()


def test_the_manifest_names_every_package_with_its_digest(built: Path) -> None:
    manifest = json.loads((built / MANIFEST).read_text())

    assert set(recipe.PACKAGES) <= set(manifest["packages"])
    assert all(len(package["sha256"]) == 64 and package["version"] for package in manifest["packages"].values())
    assert manifest["kernel_release"].endswith("cloud-amd64")


def test_the_root_image_is_an_intact_erofs_with_what_the_guest_runs(built: Path) -> None:
    check = Path("/usr/bin/fsck.erofs")
    if not check.exists():
        pytest.skip(f"{check} is missing (package erofs-utils)")
    subprocess.run([check, built / "rootfs.img"], check=True, capture_output=True)
    for path in (
        "/usr/bin/crun",
        "/usr/bin/python3.11",
        "/usr/lib/agent/bundle",
        "/usr/sbin/mke2fs",
        "/usr/bin/busybox",
    ):
        dump = subprocess.run(
            ["/usr/bin/dump.erofs", f"--path={path}", built / "rootfs.img"], capture_output=True, text=True, check=True
        )
        assert "regular file" in dump.stdout, dump.stdout


def test_the_kernel_has_the_entry_qemu_starts(built: Path) -> None:
    """An ELF note owned by Xen of type 18, XEN_ELFNOTE_PHYS32_ENTRY: QEMU looks for it in a kernel that is ELF."""
    note = (4).to_bytes(4, "little") + (8).to_bytes(4, "little") + (18).to_bytes(4, "little") + b"Xen\0"

    assert note in (built / "vmlinux").read_bytes()
