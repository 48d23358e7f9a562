"""The packages that a build takes, and the kernel's form: resolution, order and refusals."""

import itertools
import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from guest.image import debian
from guest.image.build import refuse_others
from guest.image.debian import Package, dependency_closure, newest_packages, parse_packages, version_key
from guest.image.errors import BuildError
from guest.image.sbom import bill_of_materials
from guest.image.vmlinux import payload

INDEX = """\
Package: tool
Version: 1:2.0-1+deb12u1
Architecture: amd64
Depends: libone (>= 1.0), libtwo:any | libother, media-types
Pre-Depends: base
Filename: pool/t/tool.deb
Size: 3
SHA256: aa
Description: a tool
 with a second line: Depends: nothing

Package: tool
Version: 1:1.9
Architecture: amd64
Filename: pool/t/old.deb
Size: 3
SHA256: old

Package: libone
Version: 1
Architecture: all
Filename: pool/l/libone.deb
Size: 3
SHA256: bb
"""


def made(name: str, version: str = "1", *depends: str) -> Package:
    return Package(
        name=name,
        version=version,
        architecture="amd64",
        sha256=f"{name}-{version}",
        size_bytes=1,
        depends=tuple((other,) for other in depends),
        archive="main",
        path=f"pool/{name}",
    )


def test_the_newest_stanza_of_a_package_counts() -> None:
    packages = newest_packages(parse_packages(INDEX, "main"))

    assert packages["tool"].version == "1:2.0-1+deb12u1"
    assert packages["tool"].depends == (("base",), ("libone",), ("libtwo", "libother"), ("media-types",))
    assert packages["libone"].depends == ()
    assert (packages["libone"].archive, packages["libone"].path) == ("main", "pool/l/libone.deb")


def test_of_equal_versions_the_first_counts_and_else_the_order_does_not() -> None:
    one, other, newer = made("a"), replace(made("a"), sha256="x"), made("a", "2")

    assert newest_packages([one, other])["a"].sha256 == one.sha256
    assert newest_packages([one, newer])["a"] == newest_packages([newer, one])["a"] == newer


def test_versions_are_in_debians_order() -> None:
    """deb-version(7): numbers by value, a tilde before the end, letters before other characters, the epoch first."""
    order = "1.0~rc1-1 1.0-1 1.0-1+b1 1.0-1+deb13u1 1.0-1.1 1.0a-1 1.0+ds-1 1.2-1 1.10-1 1:0.1".split()

    assert all(version_key(one) < version_key(next_one) for one, next_one in itertools.pairwise(order))
    assert version_key("1.0") == version_key("1.0-0") == version_key("0:1.00")


def test_a_package_without_digest_is_refused() -> None:
    with pytest.raises(BuildError, match="installed-by-hand lacks a field: 'Architecture'"):
        list(parse_packages("Package: installed-by-hand\nVersion: 1\n", "main"))


def test_the_epochs_colon_is_quoted_in_file_names() -> None:
    assert made("tool", "1:2.0-1+deb12u1").file_name == "tool_1%3a2.0-1+deb12u1_amd64.deb"


def test_the_closure_holds_each_dependency_once_and_ends_in_circles() -> None:
    index = {"a": made("a", "1", "b", "c"), "b": made("b", "1", "c"), "c": made("c", "1", "a"), "d": made("d")}

    assert [p.name for p in dependency_closure(["a"], frozenset(), index)] == ["a", "b", "c"]


def test_a_group_with_an_unwanted_alternative_is_not_followed() -> None:
    packages = newest_packages(parse_packages(INDEX.replace("base", "libone"), "main"))
    found = dependency_closure(["tool"], frozenset({"libother", "media-types"}), packages)

    assert [p.name for p in found] == ["libone", "tool"]


def test_a_missing_package_is_named() -> None:
    with pytest.raises(BuildError, match="find package b: not in the archive's index"):
        dependency_closure(["a"], frozenset(), {"a": made("a", "1", "b")})


def test_a_failing_command_is_reported_with_the_end_of_its_errors() -> None:
    with pytest.raises(BuildError, match=r"run /bin/sh: exit status 3: cause"):
        debian.run(["/bin/sh", "-c", "echo cause >&2; exit 3"])
    with pytest.raises(BuildError, match="run /nonexistent: No such file"):
        debian.run(["/nonexistent"])


# -- kernel images -----------------------------------------------------------------------------------------------------


def bzimage(compressed: bytes) -> bytearray:
    image = bytearray(3 * 512)
    image[0x1F1] = 1
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 16, len(compressed) + 4)
    start = 2 * 512 + 16
    image[start : start + len(compressed) + 4] = compressed + b"\1\2\3\4"
    return image


def test_the_payload_is_found_by_the_header() -> None:
    for name, magic in (("lz4", b"\x02\x21\x4c\x18"), ("zstd", b"\x28\xb5\x2f\xfd")):
        assert payload(bytes(bzimage(magic + b"data"))) == (name, magic + b"data")


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (b"short", "shorter than a bzImage header"),
        (bytes(2048), "not a bzImage"),
        (bytes(bzimage(b"\x1f\x8bgzip")), "neither LZ4 nor Zstandard"),
        (bytes(bzimage(b"\x02\x21\x4c\x18" + bytes(300))[:1100]), "cut short"),
    ],
    ids=["short", "no magic", "gzip", "cut"],
)
def test_kernels_of_another_form_are_refused(image: bytes, text: str) -> None:
    with pytest.raises(BuildError, match=text):
        payload(image)


def test_packages_of_another_digest_than_expected_are_refused(tmp_path: Path) -> None:
    package = replace(made("tool"), sha256="aa")
    manifest = tmp_path / "manifest.json"
    manifest.write_text('{"packages": {"tool": {"version": "1", "sha256": "aa"}}}')

    refuse_others((package,), manifest)
    manifest.write_text('{"packages": {"tool": {"version": "1", "sha256": "bb"}}}')
    with pytest.raises(BuildError, match="tool has digest aa in place of bb"):
        refuse_others((package,), manifest)
    manifest.write_text('{"packages": {"tool": {"sha256": "aa"}, "more": {"sha256": "cc"}}}')
    with pytest.raises(BuildError, match="more has digest none in place of cc"):
        refuse_others((package,), manifest)
    manifest.write_text("[]")
    with pytest.raises(BuildError, match=r"read manifest .*manifest.json"):
        refuse_others((package,), manifest)


def test_the_bill_of_materials_has_each_part_with_its_digest() -> None:
    packages = [replace(made(name, "1:2~3"), sha256="ab" * 32) for name in ("libstdc++6", "gcc_odd")]

    text = bill_of_materials(packages, {"protobuf": "7.1"}, agent="0.2.0", key="k1")

    assert bill_of_materials(packages, {"protobuf": "7.1"}, agent="0.2.0", key="k1") == text
    document = json.loads(text)
    assert document["spdxVersion"] == "SPDX-2.3"
    ids = {part["SPDXID"] for part in document["packages"]}
    assert ids == {"SPDXRef-guest", "SPDXRef-libstdc-plus--plus-6", "SPDXRef-gcc-odd", "SPDXRef-protobuf"}
    assert all(re.fullmatch(r"SPDXRef-[a-zA-Z0-9.-]+", each) for each in ids)
    contained = {each["relatedSpdxElement"] for each in document["relationships"]}
    assert contained == ids
    (library,) = (part for part in document["packages"] if part["name"] == "libstdc++6")
    assert library["checksums"] == [{"algorithm": "SHA256", "checksumValue": "ab" * 32}]
    locator = library["externalRefs"][0]["referenceLocator"]
    assert locator == "pkg:deb/debian/libstdc%2B%2B6@1%3A2~3?arch=amd64"
