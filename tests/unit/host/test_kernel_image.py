"""The release of a kernel, from its file."""

import json
from pathlib import Path

import pytest

from pyshim.host.kernel_image import kernel_release
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
