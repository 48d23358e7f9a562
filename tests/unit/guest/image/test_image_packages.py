"""Which packages, modules and libraries a build takes: resolution, ordering and what it refuses."""

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from guest.image import debian
from guest.image.debian import Package, dependency_closure, parse_packages
from guest.image.elf import module_info, needed_libraries
from guest.image.errors import BuildError
from guest.image.modules import Module, ModuleStore, module_name, modules_alias, modules_dep, without_signature
from guest.image.vmlinux import payload

INDEX = """\
Package: tool
Version: 1:2.0-1+deb12u1
Depends: libone (>= 1.0), libtwo:any | libother, media-types
Pre-Depends: base
SHA256: aa
Description: a tool
 with a second line: Depends: nothing

Package: tool
Version: 1.0
SHA256: old

Package: libone
Version: 1
SHA256: bb
"""


def lookup_in(index: dict[str, tuple[str, ...]]) -> debian.Callable[[list[str]], dict[str, Package]]:
    return lambda names: {
        name: Package(name=name, version="1", sha256=name, depends=tuple((other,) for other in index[name]))
        for name in names
        if name in index
    }


def test_the_first_stanza_of_a_package_is_its_candidate() -> None:
    packages = parse_packages(INDEX)

    assert packages["tool"].version == "1:2.0-1+deb12u1"
    assert packages["tool"].depends == (("base",), ("libone",), ("libtwo", "libother"), ("media-types",))
    assert packages["libone"].depends == ()


def test_a_package_without_digest_is_refused() -> None:
    with pytest.raises(BuildError, match="installed-by-hand has no SHA256"):
        parse_packages("Package: installed-by-hand\nVersion: 1\n")


def test_the_epochs_colon_is_quoted_in_file_names_as_apt_does() -> None:
    assert parse_packages(INDEX)["tool"].file_name == "tool_1%3a2.0-1+deb12u1_amd64.deb"


def test_the_closure_holds_each_dependency_once_and_ends_in_circles() -> None:
    index = {"a": ("b", "c"), "b": ("c",), "c": ("a",)}

    assert [p.name for p in dependency_closure(["a"], frozenset(), lookup_in(index))] == ["a", "b", "c"]


def test_a_group_with_an_unwanted_alternative_is_not_followed() -> None:
    packages = parse_packages(INDEX.replace("base", "libone"))
    found = dependency_closure(["tool"], frozenset({"libother", "media-types"}), lambda names: packages)

    assert [p.name for p in found] == ["libone", "tool"]


def test_a_missing_package_is_named() -> None:
    with pytest.raises(BuildError, match="find package b: not in the apt indexes"):
        dependency_closure(["a"], frozenset(), lookup_in({"a": ("b",)}))


def test_a_damaged_cached_package_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package(name="tool", version="1", sha256="0" * 64, depends=())
    (tmp_path / package.file_name).write_bytes(b"cut short")
    stand_in = tmp_path / "bin" / "apt-get"
    stand_in.parent.mkdir()
    stand_in.write_text("#!/bin/sh\necho other > tool_1_amd64.deb\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")

    with pytest.raises(BuildError, match=r"tool_1_amd64\.deb has not the digest of the index"):
        debian.download([package], tmp_path, lambda text: None)


def test_a_failing_command_is_reported_with_the_end_of_its_errors() -> None:
    with pytest.raises(BuildError, match=r"run /bin/sh: exit status 3: cause"):
        debian.run(["/bin/sh", "-c", "echo cause >&2; exit 3"])
    with pytest.raises(BuildError, match="run /nonexistent: No such file"):
        debian.run(["/nonexistent"])


# -- kernel modules ---------------------------------------------------------------------------------------------------


def module_file(info: bytes) -> bytes:
    """The smallest relocatable ELF with a .modinfo section."""
    names = b"\0.modinfo\0.shstrtab\0"
    body = info + names
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, 3, 2
    )

    def section(name: int, kind: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, offset, size, 0, 0, 1, 0)

    return header + body + bytes(64) + section(1, 1, 64, len(info)) + section(10, 3, 64 + len(info), len(names))


@pytest.fixture
def store(tmp_path: Path) -> ModuleStore:
    for name, depends in (("virtio-rng", "virtio,virtio_ring"), ("virtio", "virtio_ring"), ("virtio_ring", "")):
        info = f"alias=virtio:{name}\0depends={depends}\0name={name}\0"
        path = tmp_path / "kernel" / f"{name}.ko"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(module_file(info.encode()))
    for name, depends in (("round", "about"), ("about", "round"), ("lonely", "gone"), ("early", "crc16")):
        (tmp_path / "kernel" / f"{name}.ko").write_bytes(module_file(f"depends={depends}\0".encode()))
    (tmp_path / "modules.builtin").write_text("kernel/lib/crc16.ko\n")
    return ModuleStore(tmp_path)


def test_a_module_comes_after_all_it_depends_on(store: ModuleStore) -> None:
    assert [m.name for m in store.closure(["virtio_rng"])] == ["virtio_ring", "virtio", "virtio_rng"]


def test_modules_built_into_the_kernel_are_left_out(store: ModuleStore) -> None:
    assert [m.name for m in store.closure(["early", "crc16"])] == ["early"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lonely", "find kernel module gone"),
        ("absent", "find kernel module absent"),
        ("round", "round -> about -> round"),
    ],
)
def test_modules_that_cannot_be_loaded_are_refused(store: ModuleStore, name: str, text: str) -> None:
    with pytest.raises(BuildError, match=text):
        store.closure([name])


def test_index_files_are_those_modprobe_reads(store: ModuleStore) -> None:
    modules = store.closure(["virtio_rng"])

    assert modules_dep(modules).splitlines() == [
        "kernel/virtio-rng.ko: kernel/virtio.ko kernel/virtio_ring.ko",
        "kernel/virtio.ko: kernel/virtio_ring.ko",
        "kernel/virtio_ring.ko:",
    ]
    assert "alias virtio:virtio-rng virtio_rng\n" in modules_alias(modules)


def test_what_two_dependencies_share_is_loaded_before_both() -> None:
    def module(name: str, *depends: str) -> Module:
        return Module(name=name, path=f"{name}.ko", data=b"", depends=depends, aliases=())

    text = modules_dep([module("d"), module("b", "d"), module("c", "d"), module("a", "b", "c")])

    assert text.splitlines()[0] == "a.ko: b.ko c.ko d.ko"


def test_module_names_have_underscores() -> None:
    assert module_name("kernel/drivers/virtio-rng.ko") == "virtio_rng"


def test_only_the_signature_is_cut_off_a_module() -> None:
    signature = bytes(40)
    signed = b"content" + signature + bytes(8) + struct.pack(">I", 40) + b"~Module signature appended~\n"

    assert without_signature(signed) == b"content"
    assert without_signature(b"unsigned content") == b"unsigned content"


# -- ELF and kernel images --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(60)], ids=["empty", "script", "32 bit"]
)
def test_other_files_are_not_taken_for_elf(data: bytes) -> None:
    with pytest.raises(BuildError, match="read thing: not a little-endian 64-bit ELF file"):
        needed_libraries(data, "thing")


def test_a_cut_elf_file_is_an_error_of_its_own() -> None:
    data = module_file(b"depends=\0")

    # of the last section header the final 20 bytes (alignment, entry size, info) are of no interest
    for length in range(64, len(data) - 20):
        with pytest.raises(BuildError, match="read cut"):
            module_info(data[:length], "cut")


def test_needed_libraries_agree_with_readelf() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is missing (package binutils)")
    file = Path("/bin/ls")

    shown = subprocess.run([readelf, "-d", file], capture_output=True, text=True, check=True).stdout

    expected = [line.split("[")[1].rstrip("]") for line in shown.splitlines() if "(NEEDED)" in line]
    assert list(needed_libraries(file.read_bytes(), "ls")) == expected


def bzimage(compressed: bytes) -> bytearray:
    image = bytearray(3 * 512)
    image[0x1F1] = 1
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 16, len(compressed) + 4)
    start = 2 * 512 + 16
    image[start : start + len(compressed) + 4] = compressed + b"\1\2\3\4"
    return image


def test_the_payload_is_found_by_the_header() -> None:
    assert payload(bytes(bzimage(b"\x02\x21\x4c\x18data"))) == b"\x02\x21\x4c\x18data"


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (b"short", "shorter than a bzImage header"),
        (bytes(2048), "not a bzImage"),
        (bytes(bzimage(b"\x1f\x8bgzip")), "not LZ4"),
        (bytes(bzimage(b"\x02\x21\x4c\x18" + bytes(300))[:1100]), "cut short"),
    ],
    ids=["short", "no magic", "gzip", "cut"],
)
def test_kernels_of_another_form_are_refused(image: bytes, text: str) -> None:
    with pytest.raises(BuildError, match=text):
        payload(image)
