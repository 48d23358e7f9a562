"""Where packages come from: apt's mirrors as data, and an archive that is verified, also one that lies."""

import gzip
import hashlib
import io
import lzma
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import pytest

from guest.image.archive import Archive, NotThere, snapshot_mirrors
from guest.image.build import Origin, find_architecture, find_suite, open_archive
from guest.image.debian import unpack
from guest.image.errors import BuildError
from guest.image.mirrors import Mirrors, Source, apt_mirrors, apt_sources, given_mirrors

AMD64 = find_architecture("amd64")


def silent(text: str) -> None:
    pass


# -- the mirrors of apt ------------------------------------------------------------------------------------------------

DEB822 = """\
# the distribution
Types: deb deb-src
URIs: http://one.test/debian/
 mirror+file://{lists}
Suites: trixie
 trixie-updates
Components: main contrib

Types: deb
URIs: http://one.test/debian-security
Suites: trixie-security
Components: main

Types: deb
Enabled: no
URIs: http://off.test/debian
Suites: trixie
Components: main

Types: deb-src
URIs: http://source.test/debian
Suites: trixie
Components: main
"""
ONE_LINE = """\
deb [arch=amd64 signed-by=/k.gpg] http://two.test/debian/ bookworm main # first
deb http://two.test/vendor stable extra
deb cdrom:[disk]/ bookworm main
#deb http://off.test/debian bookworm main
deb-src http://two.test/debian bookworm main
"""


def test_apts_sources_of_either_form_are_read_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(ONE_LINE)
    lists = tmp_path / "mirrors.list"
    lists.write_text("http://three.test/debian priority:1\n# http://off.test\n")
    (tmp_path / "sources.list.d/debian.sources").write_text(DEB822.format(lists=lists))
    (tmp_path / "sources.list.d/debian.sources.save").write_text(DEB822)

    assert apt_sources(tmp_path) == [
        Source(url="http://two.test/debian", suites=("bookworm",)),
        Source(url="http://one.test/debian", suites=("trixie", "trixie-updates")),
        Source(url="http://three.test/debian", suites=("trixie", "trixie-updates")),
        Source(url="http://one.test/debian-security", suites=("trixie-security",)),
    ]


def test_a_bare_machine_has_security_updates_beside_its_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sources.list").write_text("deb http://one.test/debian bookworm main\n")
    (tmp_path / "apt-config").write_text("#!/bin/sh\necho \"http='http://proxy.test:3142'\"\necho \"check='false'\"\n")
    (tmp_path / "apt-config").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    assert apt_mirrors(tmp_path) == Mirrors(
        main=("http://one.test/debian",),
        security=("http://one.test/debian-security",),
        proxies={"http": "http://proxy.test:3142"},
        takes_expired=True,
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda empty: apt_mirrors(empty), r"find a Debian mirror: apt has none in '.*' \(hint: --mirror URL\)"),
        (lambda empty: given_mirrors("one.test/debian", ""), "take mirror 'one.test/debian': it starts with none of"),
        (lambda empty: snapshot_mirrors("yesterday"), "take snapshot 'yesterday': it is not a time"),
        (lambda empty: find_suite("sid"), "take suite 'sid': the recipe has trixie, bookworm"),
        (lambda empty: find_architecture("s390x"), "take architecture 's390x': the recipe has amd64, arm64"),
        (
            lambda empty: open_archive(Origin(security_mirror="http://s.test"), find_suite(""), AMD64, empty, silent),
            "take the security mirror: no mirror is given",
        ),
        (
            lambda empty: open_archive(
                Origin(snapshot="20260101T000000Z", mirror="http://m.test"), find_suite(""), AMD64, empty, silent
            ),
            "take snapshot 20260101T000000Z: a mirror is given",
        ),
    ],
    ids=["no apt", "address", "snapshot", "suite", "architecture", "security mirror alone", "snapshot and mirror"],
)
def test_a_place_that_is_none_is_named(tmp_path: Path, asked: Callable[[Path], object], said: str) -> None:
    with pytest.raises(BuildError, match=said):
        asked(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_does_not_expire() -> None:
    mirrors = snapshot_mirrors("20260101T000000Z")

    assert mirrors.takes_expired
    assert [address.split("/")[-2:] for address in (*mirrors.main, *mirrors.security)] == [
        ["debian", "20260101T000000Z"],
        ["debian-security", "20260101T000000Z"],
    ]


# -- a signed archive --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of gpg with two keys, and the file ring.gpg with that of `archive` only."""
    if shutil.which("gpg") is None or not (shutil.which("gpgv") or shutil.which("sqv")):
        pytest.skip("gpg, or both of gpgv and sqv, are missing (packages gpg, gpgv)")
    home = tmp_path_factory.mktemp("keys")
    home.chmod(0o700)
    for user in ("archive", "stranger"):
        gpg(home, "--passphrase", "", "--quick-gen-key", f"{user} <{user}@test>", "ed25519", "sign", "never")
    gpg(home, "--output", str(home / "ring.gpg"), "--export", "archive@test")
    yield home
    subprocess.run(["gpgconf", "--homedir", home, "--kill", "all"], check=False, capture_output=True)


def gpg(home: Path, *words: str, text: str = "") -> str:
    argv = ["gpg", "--homedir", home, "--batch", "--quiet", "--pinentry-mode", "loopback", *words]
    return subprocess.run(argv, input=text, capture_output=True, text=True, check=True).stdout


def deb(files: dict[str, bytes]) -> bytes:
    """A package with these files, as dpkg-deb writes it."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("./usr/bin/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/usr/bin/tool"
        tar.addfile(link)
    found = b"!<arch>\n"
    members = {"debian-binary": b"2.0\n", "control.tar.gz": gzip.compress(b"odd"), "data.tar.xz": content.getvalue()}
    for name, data in members.items():
        found += b"%-16s%-12d%-6d%-6d%-8o%-10d`\n" % (name.encode(), 0, 0, 0, 0o100644, len(data)) + data
        found += b"\n" * (len(data) % 2)
    return found


class Mirror:
    """A mirror of files with the suite `new`, whose package `tool` is newer in the security archive."""

    def __init__(self, top: Path, keys: Path) -> None:
        self.top, self.keys = top, keys
        self.publish()

    def publish(self, **changed: str) -> None:
        """All three parts are there anew. `changed`: `signer`, `codename` or `valid_until` other than the right one."""
        old, new = (
            deb({"usr/bin/tool": b"old"}),
            deb({"usr/bin/tool": b"new", "lib/modules/1/a.ko.xz": lzma.compress(b"m")}),
        )
        library = deb({"usr/lib/lib.so": b"lib"})
        self._publish("debian", "new", {"tool_1": old, "lib_1": library}, **changed)
        self._publish("debian", "new-updates", {}, **changed)
        self._publish("debian-security", "new-security", {"tool_2": new}, **changed)

    def _publish(self, archive: str, suite: str, packages: dict[str, bytes], **changed: str) -> None:
        stanzas = []
        for name, content in packages.items():
            path = f"pool/{name}.deb"
            (self.top / archive / "pool").mkdir(parents=True, exist_ok=True)
            (self.top / archive / path).write_bytes(content)
            depends = "Depends: lib (>= 1), unwanted\n" if name.startswith("tool") else ""
            stanzas.append(
                f"Package: {name[:-2]}\nVersion: {name[-1]}\nArchitecture: amd64\n{depends}Filename: {path}\n"
                f"Size: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n"
            )
        index = lzma.compress("\n".join(stanzas).encode())
        place = self.top / archive / "dists" / suite
        (place / "main/binary-amd64").mkdir(parents=True, exist_ok=True)
        (place / "main/binary-amd64/Packages.xz").write_bytes(index)
        until = changed.get("valid_until", "")
        release = (
            f"Suite: {suite}\nCodename: {changed.get('codename', suite)}\n"
            + (f"Valid-Until: {until}\n" if until else "")
            + f"SHA256:\n {hashlib.sha256(index).hexdigest()} {len(index)} main/binary-amd64/Packages.xz\n"
        )
        signer = ["--local-user", f"{changed.get('signer', 'archive')}@test"]
        (place / "InRelease").write_text(gpg(self.keys, *signer, "--clear-sign", text=release))

    def archive(self, cache: Path, **other: object) -> Archive:
        settings: dict[str, object] = {
            "suite": "new",
            "architecture": "amd64",
            "mirrors": lambda: given_mirrors(f"file://{self.top}/debian", ""),
            "keyring": self.keys / "ring.gpg",
            "cache": cache,
            "progress": silent,
        }
        return Archive(**{**settings, **other})


@pytest.fixture
def mirror(tmp_path: Path, keys: Path) -> Mirror:
    return Mirror(tmp_path / "mirror", keys)


def test_the_newest_packages_of_the_three_parts_are_fetched_verified_and_unpacked(
    mirror: Mirror, tmp_path: Path
) -> None:
    archive = mirror.archive(tmp_path / "cache")

    packages = archive.resolve(("tool",), frozenset({"unwanted"}))
    files = archive.download(packages, tmp_path / "packages")
    tool = unpack(packages[1], files["tool"], tmp_path / "unpacked")

    assert [(package.name, package.version, package.archive) for package in packages] == [
        ("lib", "1", "main"),
        ("tool", "2", "security"),
    ]
    assert (tool / "usr/bin/tool").read_bytes() == b"new"
    assert (tool / "usr/bin/link").readlink() == Path("/usr/bin/tool")
    assert (tool / "lib/modules/1/a.ko").read_bytes() == b"m"
    assert not (tool / "lib/modules/1/a.ko.xz").exists()


def test_what_is_in_the_cache_needs_no_mirror_until_it_is_updated(mirror: Mirror, tmp_path: Path) -> None:
    def no_mirror() -> Mirrors:
        raise BuildError("asked for a mirror")

    first = mirror.archive(tmp_path / "cache").resolve(("lib",), frozenset())
    again = mirror.archive(tmp_path / "cache", mirrors=no_mirror)

    assert again.resolve(("lib",), frozenset()) == first
    with pytest.raises(BuildError, match="asked for a mirror"):
        again.update()
    assert again.resolve(("tool",), frozenset({"unwanted"}))[0] == first[0]


def test_a_package_that_left_the_mirror_is_told_from_a_mirror_that_fails(mirror: Mirror, tmp_path: Path) -> None:
    archive = mirror.archive(tmp_path / "cache")
    packages = archive.resolve(("lib",), frozenset())
    (mirror.top / "debian/pool/lib_1.deb").unlink()

    with pytest.raises(NotThere, match=r"fetch 'file:.*/pool/lib_1\.deb': "):
        archive.download(packages, tmp_path / "packages")
    assert list((tmp_path / "packages").iterdir()) == []


def test_a_damaged_package_of_the_cache_is_fetched_again(mirror: Mirror, tmp_path: Path) -> None:
    archive = mirror.archive(tmp_path / "cache")
    packages = archive.resolve(("lib",), frozenset())
    (file,) = archive.download(packages, tmp_path / "packages").values()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])

    archive.download(packages, tmp_path / "packages")

    assert file.read_bytes() == whole


INDEX = "debian/dists/new/main/binary-amd64/Packages.xz"


def tampered(mirror: Mirror) -> None:
    file = mirror.top / "debian/dists/new/InRelease"
    file.write_text(file.read_text().replace("Suite: new", "Suite: odd"))


def unsigned(mirror: Mirror) -> None:
    (mirror.top / "debian/dists/new/InRelease").write_text("Suite: new\nCodename: new\n")


def doubled(mirror: Mirror) -> None:
    """A text signed by a stranger, before the good one."""
    file = mirror.top / "debian/dists/new/InRelease"
    good = file.read_text()
    mirror.publish(signer="stranger", codename="odd")
    file.write_text(file.read_text() + good)


def padded(mirror: Mirror) -> None:
    with (mirror.top / INDEX).open("ab") as file:
        file.write(b"more")


def exchanged(mirror: Mirror) -> None:
    content = bytearray((mirror.top / INDEX).read_bytes())
    content[-1] ^= 1
    (mirror.top / INDEX).write_bytes(content)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (tampered, r"verify 'file:.*/debian/dists/new/InRelease': (gpgv|sqv) found no good signature by keyring '"),
        (unsigned, r"verify 'file:.*/InRelease': it is not one signed text"),
        (doubled, r"verify 'file:.*/InRelease': it is not one signed text"),
        (lambda mirror: mirror.publish(signer="stranger"), r"verify 'file:.*': (gpgv|sqv) found no good signature"),
        (lambda mirror: mirror.publish(codename="old"), r"verify 'file:.*': it is of 'old', not of 'new'"),
        (
            lambda mirror: mirror.publish(valid_until=formatdate(1_700_000_000, usegmt=True)),
            r"take 'file:.*/InRelease': it was valid until Tue, 14 Nov 2023 22:13:20 GMT \(hint: --mirror URL\)",
        ),
        (padded, r"fetch 'file:.*Packages\.xz': longer than \d+ bytes"),
        (exchanged, r"fetch 'file:.*Packages\.xz': its SHA-256 is [0-9a-f]{64}, not [0-9a-f]{64} as in the signed"),
        (lambda mirror: shutil.rmtree(mirror.top), r"find suite 'new': fetch 'file:.*InRelease': .*hint: --mirror URL"),
        (
            lambda mirror: shutil.rmtree(mirror.top / "debian-security"),
            r"find suite 'new-security': fetch .*hint: --security-mirror URL",
        ),
    ],
    ids=[
        "tampered",
        "unsigned",
        "doubled",
        "stranger",
        "suite",
        "stale",
        "padded",
        "exchanged",
        "empty",
        "no security",
    ],
)
def test_a_mirror_that_lies_is_refused_in_one_line_and_the_cache_keeps_what_it_had(
    mirror: Mirror, tmp_path: Path, lie: Callable[[Mirror], object], said: str
) -> None:
    cache = tmp_path / "cache"
    before = mirror.archive(cache).resolve(("lib",), frozenset())
    lie(mirror)

    for place in (cache, tmp_path / "new cache"):
        with pytest.raises(BuildError, match=said) as refused:
            mirror.archive(place).update()
        assert "\n" not in str(refused.value)

    assert mirror.archive(cache).resolve(("lib",), frozenset()) == before
    assert not (tmp_path / "new cache/indexes.json").exists()


def test_a_stale_index_is_accepted_where_apt_accepts_it(mirror: Mirror, tmp_path: Path) -> None:
    mirror.publish(valid_until=formatdate(1_700_000_000, usegmt=True))
    one = given_mirrors(f"file://{mirror.top}/debian", "")
    as_apt = Mirrors(main=one.main, security=one.security, takes_expired=True)

    archive = mirror.archive(tmp_path / "cache", mirrors=lambda: as_apt)

    assert [package.name for package in archive.resolve(("lib",), frozenset())] == ["lib"]


def test_a_missing_keyring_and_a_missing_network_are_named(mirror: Mirror, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"find keyring '.*/none': ENOENT .*hint: it is Debian's keyring"):
        mirror.archive(tmp_path / "cache", keyring=tmp_path / "none").update()
    assert not (tmp_path / "cache").exists()

    nobody_listens = given_mirrors("http://127.0.0.1:1/debian", "")
    with pytest.raises(BuildError, match=r"fetch 'http://127\.0\.0\.1:1/.*': .*refused.* \(hint: is there a network"):
        mirror.archive(tmp_path / "cache", mirrors=lambda: nobody_listens).update()


def test_a_package_that_is_not_one_leaves_nothing(mirror: Mirror, tmp_path: Path) -> None:
    (package,) = mirror.archive(tmp_path / "cache").resolve(("lib",), frozenset())
    file = tmp_path / "lib.deb"
    whole = (mirror.top / "debian/pool/lib_1.deb").read_bytes()
    for content in (b"", b"!<arch>\n", whole[: whole.index(b"data.tar") + 100]):
        file.write_bytes(content)

        with pytest.raises(BuildError, match=r"unpack 'lib\.deb': "):
            unpack(package, file, tmp_path / "unpacked")

        assert list((tmp_path / "unpacked").iterdir()) == []
