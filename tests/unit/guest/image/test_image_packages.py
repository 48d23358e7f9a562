"""The packages that a build takes, and the kernel's form: resolution, order and refusals."""

import contextlib
import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest

from guest.image import debian
from guest.image.build import refuse_others
from guest.image.debian import Package, dependency_closure, parse_packages
from guest.image.errors import BuildError
from guest.image.sbom import bill_of_materials
from guest.image.vmlinux import payload

INDEX = """\
Package: tool
Version: 1:2.0-1+deb12u1
Architecture: amd64
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
Architecture: all
SHA256: bb
"""


def lookup_in(index: dict[str, tuple[str, ...]]) -> debian.Callable[[list[str]], dict[str, Package]]:
    return lambda names: {
        name: Package(
            name=name, version="1", architecture="all", sha256=name, depends=tuple((other,) for other in index[name])
        )
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
    packages = parse_packages(INDEX)

    assert packages["tool"].file_name == "tool_1%3a2.0-1+deb12u1_amd64.deb"
    assert packages["libone"].file_name == "libone_1_all.deb"


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
    package = Package(name="tool", version="1", architecture="amd64", sha256="0" * 64, depends=())
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


@pytest.mark.parametrize(
    ("errors", "runs"),
    [
        (["run apt-get: exit status 100: E: Could not get lock /var/lib/apt/lists/lock"] * 3, 4),
        (["run apt-get: exit status 100: Could not resolve 'mirror.test'"], 1),
    ],
    ids=["another-apt", "no-network"],
)
def test_the_indexes_are_fetched_again_only_while_another_apt_has_their_lock(
    monkeypatch: pytest.MonkeyPatch, errors: list[str], runs: int
) -> None:
    asked: list[list[str]] = []
    waited: list[float] = []

    def run(argv: list[str]) -> str:
        asked.append(argv)
        if len(asked) <= len(errors):
            raise BuildError(errors[len(asked) - 1])
        return ""

    monkeypatch.setattr(debian, "run", run)
    with contextlib.nullcontext() if runs > len(errors) else pytest.raises(BuildError, match="resolve"):
        debian.update_indexes(lambda text: None, waited.append)

    assert (len(asked), len(waited)) == (runs, runs - 1)


# -- where packages come from ------------------------------------------------------------------------------------------


def sources(directory: Path, text: str) -> debian.Archive:
    """An archive whose only source file has this text."""
    file = directory / "some.list"
    file.write_text(text)
    return ("-o", f"Dir::Etc::SourceList={file}", "-o", "Dir::Etc::SourceParts=/dev/null")


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
@pytest.mark.parametrize("option", ["trusted=yes", "arch=amd64 trusted=yes", "Trusted=1"])
def test_a_source_that_apt_takes_unsigned_is_refused(tmp_path: Path, option: str) -> None:
    archive = sources(tmp_path, f"deb [{option}] file:{tmp_path} ./\n")

    with pytest.raises(BuildError, match=r"take packages of '.*some.list': 'deb .*' switches signatures off"):
        debian.refuse_unauthenticated(archive)


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
def test_other_sources_are_taken(tmp_path: Path) -> None:
    debian.refuse_unauthenticated(sources(tmp_path, f"# deb [trusted=yes] file:/x ./\ndeb file:{tmp_path} ./\n"))


def test_a_snapshot_is_a_signed_source_of_its_own(tmp_path: Path) -> None:
    archive = debian.snapshot_archive("20260101T000000Z", tmp_path, suite="bookworm")

    lines = (tmp_path / "sources.list").read_text().splitlines()
    assert [line.split()[3:5] for line in lines] == [
        ["http://snapshot.debian.org/archive/debian/20260101T000000Z", "bookworm"],
        ["http://snapshot.debian.org/archive/debian/20260101T000000Z", "bookworm-updates"],
        ["http://snapshot.debian.org/archive/debian-security/20260101T000000Z", "bookworm-security"],
    ]
    assert all("signed-by=/usr/share/keyrings/debian-archive-keyring.gpg" in line for line in lines)
    assert f"Dir::State::Lists={tmp_path}/lists" in archive
    with pytest.raises(BuildError, match="take snapshot 'yesterday'"):
        debian.snapshot_archive("yesterday", tmp_path, suite="bookworm")


def test_packages_of_another_digest_than_expected_are_refused(tmp_path: Path) -> None:
    package = Package(name="tool", version="1", architecture="amd64", sha256="aa", depends=())
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
    packages = [
        Package(name=name, version="1:2~3", architecture="amd64", sha256="ab" * 32, depends=())
        for name in ("libstdc++6", "gcc_odd")
    ]

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
