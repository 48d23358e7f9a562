"""What the files that a guest boots from say: release and architecture."""

import json
import os
import shutil
from pathlib import Path

import pytest

from guest.image.rootfs import pack_initrd
from pyshim.host.kernel_image import boot_file_architecture, kernel_release
from pyshim.model.architecture import ARCHITECTURES
from pyshim.model.host_facts import lacks_groups

PIECE = 1 << 20
GUEST = Path(__file__).parents[3] / ".build/guest"


def compressed(version: bytes) -> bytes:
    """A bzImage that has its version text at 0x400."""
    head = bytearray(0x400)
    head[0x202:0x206] = b"HdrS"
    head[0x20E:0x210] = (0x200).to_bytes(2, "little")
    return bytes(head) + version + b" (builder) #1 SMP\0"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (compressed(b"6.12.57-amd64"), "6.12.57-amd64"),
        (b"\x7fELF" + bytes(PIECE - 10) + b"Linux version 6.1.0 (gcc)" + bytes(PIECE), "6.1.0"),
        (b"\x7fELF Linux version %s (format) Linux version 6.18.5 \0", "6.18.5"),
        (compressed(b"no number"), ""),
        (b"\x7fELF" + bytes(3 * PIECE), ""),
        (b"", ""),
    ],
    ids=["bzImage", "between two pieces", "after a format", "bzImage without", "without", "empty"],
)
def test_a_kernels_file_says_its_release(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "kernel").write_bytes(content)

    assert kernel_release(str(tmp_path / "kernel")) == expected


@pytest.mark.skipif(not GUEST.exists(), reason="needs `make guest`")
def test_the_guests_kernel_is_read_in_both_its_forms() -> None:
    built = json.loads((GUEST / "manifest.json").read_text())["kernel_release"]

    assert kernel_release(str(GUEST / "vmlinux")) == kernel_release(str(GUEST / "vmlinuz")) == built


@pytest.mark.parametrize(
    ("release", "lacks"),
    [
        ("6.1.0-56-cloud-amd64", True),
        ("6.2.16", True),
        ("6.3.0", False),
        ("6.12.57", False),
        ("7.0", False),
        ("", False),
    ],
)
def test_groups_are_sent_since_linux_6_3(release: str, lacks: bool) -> None:
    assert lacks_groups(release) == lacks


def elf(machine: int) -> bytes:
    return b"\x7fELF\x02\x01\x01" + bytes(11) + machine.to_bytes(2, "little") + bytes(PIECE)


def image(at: int, magic: bytes) -> bytes:
    return bytes(at) + magic + bytes(PIECE)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (compressed(b"6.12.57-amd64"), "x86_64"),
        (image(0x38, b"ARMd"), "aarch64"),
        (b"MZ" + image(0x36, b"ARMd"), "aarch64"),  # with an EFI stub, as Debian's
        (elf(62), "x86_64"),
        (elf(183), "aarch64"),
        (elf(22), ""),  # s390
        (b"\x1f\x8b" + bytes(PIECE), ""),
        (b"070701" + b"z" * PIECE, ""),
        (b"070701", ""),
        (b"", ""),
    ],
    ids=["bzImage", "Image", "Image-EFI", "x86", "arm64", "s390", "gzip", "bad-cpio", "short-cpio", "empty"],
)
def test_a_boot_file_says_its_architecture(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "file").write_bytes(content)

    assert boot_file_architecture(str(tmp_path / "file")) == expected


@pytest.mark.skipif(shutil.which("cpio") is None, reason="needs cpio")
@pytest.mark.parametrize("machine", [62, 183])
def test_an_initramfs_is_of_the_architecture_of_its_first_program(tmp_path: Path, machine: int) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a-script").write_text("#!/bin/sh\n")
    (tree / "program").write_bytes(elf(machine))
    pack_initrd(tree, tmp_path / "initrd")

    found = boot_file_architecture(str(tmp_path / "initrd"))

    assert ARCHITECTURES[found].elf_machine == machine


def test_a_fifo_in_place_of_a_boot_file_says_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kernel")

    assert boot_file_architecture(str(tmp_path / "kernel")) == ""


@pytest.mark.skipif(not GUEST.exists(), reason="needs `make guest`")
def test_the_built_guest_says_its_architecture() -> None:
    names = ("vmlinux", "vmlinuz", "initrd.img")

    assert {boot_file_architecture(str(GUEST / name)) for name in names} == {os.uname().machine}
