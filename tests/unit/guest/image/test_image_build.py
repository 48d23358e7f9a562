"""Whole builds out of the package cache: the same inputs give the same bytes, and nothing is done twice."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from guest.image import recipe
from guest.image.archive import Progress
from guest.image.build import MANIFEST, Inputs, Origin, build, read_manifest
from guest.image.errors import BuildError
from guest.image.rootfs import PARTITION_OFFSET_BYTES
from pyshim.host.kernel_image import boot_file_architecture

CHECKOUT = Path(__file__).resolve().parents[4]
CACHE = CHECKOUT / ".build/cache/guest"
INIT = CHECKOUT / "guest/image/init.sh"
AGENT = recipe.AGENT_DIRECTORY
SUITE = recipe.SUITES[0]
STDLIB = f"usr/lib/{SUITE.python}"
ARTEFACTS = {"initrd.img", "rootfs.img", "sbom.spdx.json", "vmlinux", "vmlinuz"}


def silent(text: str) -> None:
    pass


def make(out: Path, cache: Path, progress: Progress = silent, kata_agent: Path | None = None) -> dict[str, Any]:
    return build(checkout=CHECKOUT, out=out, cache=cache, progress=progress, origin=Origin(), kata_agent=kata_agent)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(220)]  # a build takes seconds, on a busy machine minutes


@pytest.fixture(scope="module")
def cache() -> Path:
    if not (CACHE / "packages").is_dir():
        pytest.skip(f"no Debian packages in {CACHE}: run make guest")
    return CACHE


@pytest.fixture(scope="module")
def built(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("guest")
    make(out, cache)
    return out


def test_two_builds_give_the_same_bytes(built: Path, cache: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "deeper/out", cache)
    one = read_manifest(built)

    assert one == other
    assert {name: facts["sha256"] for name, facts in other["artefacts"].items()}.keys() == ARTEFACTS
    assert (built / "rootfs.img").read_bytes() == (tmp_path / "deeper/out/rootfs.img").read_bytes()


def test_a_second_build_only_says_that_the_first_is_current(built: Path, cache: Path) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in built.iterdir()}
    lines: list[str] = []

    make(built, cache, lines.append)

    assert lines == [f"guest image is current: {built}"]
    assert {file.name: file.stat().st_mtime_ns for file in built.iterdir()} == before


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest"])
def test_a_damaged_result_does_not_count_as_built(built: Path, tmp_path: Path, damage: str) -> None:
    for file in built.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    assert read_manifest(tmp_path) is not None
    image = tmp_path / "initrd.img"
    whole = image.read_bytes()
    if damage == "manifest":
        (tmp_path / MANIFEST).unlink()
        (tmp_path / MANIFEST).write_text("{}")
    else:
        image.unlink()
    if damage == "cut":
        image.write_bytes(whole[:-1])

    assert read_manifest(tmp_path) is None


def test_a_failed_build_leaves_the_directory_as_it_was(
    built: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in built.iterdir()}
    monkeypatch.setattr(recipe, "PMEM_MODULES", ("no_such_module",))
    monkeypatch.setattr(Inputs, "key", lambda self: "another")

    with pytest.raises(BuildError, match="find kernel module no_such_module"):
        make(built, cache)

    assert {file.name: file.stat().st_mtime_ns for file in built.iterdir()} == before


def test_the_manifest_names_every_package_with_its_digest(built: Path) -> None:
    manifest = json.loads((built / MANIFEST).read_text())

    assert set(SUITE.names((*recipe.PACKAGES, *recipe.BUILD_PACKAGES))) <= set(manifest["packages"])
    assert all(len(package["sha256"]) == 64 and package["version"] for package in manifest["packages"].values())
    assert manifest["kernel_release"].endswith("cloud-amd64")


def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root file system of the image, unpacked: it is intact."""
    if not Path("/usr/bin/fsck.erofs").exists():
        pytest.skip("/usr/bin/fsck.erofs is missing (package erofs-utils)")
    image, found = tmp_path_factory.mktemp("image") / "root.erofs", tmp_path_factory.mktemp("root")
    with (built / "rootfs.img").open("rb") as disk:
        disk.seek(PARTITION_OFFSET_BYTES)
        image.write_bytes(disk.read())
    subprocess.run(["fsck.erofs", f"--extract={found}", image], check=True, capture_output=True)
    return found


@pytest.fixture(scope="module")
def root(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(built, tmp_path_factory)


def in_guest(root: Path, script: str) -> str:
    """What `script` prints in the guest's interpreter, started as the first process starts it."""
    if os.geteuid() != 0:
        pytest.skip("changing the root needs root")
    argv = ["chroot", root, "/usr/bin/python3", "-I", "-c", f"import sys; sys.path.insert(0, '/{AGENT}')\n{script}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_guests_interpreter_imports_all_of_the_agent(root: Path) -> None:
    script = (
        "import importlib, pkgutil\n"
        "for top in ('guest', 'pyshim', 'protos'):\n"
        "    package = importlib.import_module(top)\n"
        "    for found in pkgutil.walk_packages(package.__path__, f'{top}.'):\n"
        "        if found.name != 'protos.generate':\n"
        "            importlib.import_module(found.name)\n"
        "            print(found.name)\n"
    )

    imported = in_guest(root, script).split()

    assert {"guest.agent.__main__", "guest.forwarder.__main__", "pyshim.ttrpc", "pyshim.cdi"} <= set(imported)
    assert "protos.agent.agent_pb2" in imported


def test_the_agent_starts_as_the_first_process_starts_it(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("changing the root needs root")
    (line,) = (line for line in INIT.read_text().splitlines() if "start.py" in line)
    words = shlex.split(line)[2:]  # after `set --`
    (root / "dev/null").touch()
    argv = ["chroot", root, *words, "agent.server_addr=unix:///run/agent.sock"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr is not None
        said = agent.stderr.readline()
        agent.kill()

    assert "msg=listening" in said, said
    assert (root / "run/agent.sock").is_socket()


def test_the_first_process_leaves_none_of_the_initrd_behind() -> None:
    """switch_root removes the initrd: what was started there in the background may not be executed yet."""
    lines = [line.split("#")[0].rstrip() for line in INIT.read_text().splitlines()]

    assert [line for line in lines if line.endswith("&")] == []


def test_the_guests_interpreter_has_its_standard_library_yaml_and_the_fast_protobuf(root: Path) -> None:
    script = (
        "import asyncio, ctypes, hashlib, http.client, json, logging, lzma, ssl, subprocess, uuid, yaml\n"
        "from google.protobuf.internal import api_implementation\n"
        "print(hashlib.sha256(b'').hexdigest()[:8], ssl.OPENSSL_VERSION.split()[0], yaml.safe_load('a: 1'))\n"
        "print(ctypes.CDLL(None).getpid() > 0, api_implementation.Type())\n"
    )

    assert in_guest(root, script).splitlines() == ["e3b0c442 OpenSSL {'a': 1}", "True upb"]


def test_every_module_has_byte_code_that_is_not_compared_with_its_source(root: Path) -> None:
    sources = [file for place in (STDLIB, AGENT) for file in (root / place).rglob("*.py")]
    assert len(sources) > 500
    tag = f"cpython-{SUITE.python.removeprefix('python').replace('.', '')}"
    for source in sources:
        flags = (source.parent / "__pycache__" / f"{source.stem}.{tag}.pyc").read_bytes()[4:8]
        assert flags == (1).to_bytes(4, "little"), source  # PEP 552: hash-based, unchecked


def test_programs_and_extension_modules_find_their_libraries(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("changing the root needs root")
    places = ("usr/bin", "usr/sbin", f"{STDLIB}/lib-dynload", AGENT)
    files = [file for place in places for file in (root / place).rglob("*") if not file.is_symlink()]
    lacking = set()
    for file in files:
        if file.is_file() and file.read_bytes()[:4] == b"\x7fELF" and file.name != "busybox":
            argv = ["chroot", root, "/lib64/ld-linux-x86-64.so.2", "--list", f"/{file.relative_to(root)}"]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode != 0 or "not found" in done.stdout:
                lacking.add(file.name.partition(".")[0])

    gone = {"nis"} if SUITE.python == "python3.11" else set()
    assert lacking == {"_curses", "_curses_panel", "_dbm", "_sqlite3", "readline"} | gone


def test_the_kernel_has_the_entry_qemu_starts(built: Path) -> None:
    """An ELF note owned by Xen of type 18, XEN_ELFNOTE_PHYS32_ENTRY: QEMU looks for it in a kernel that is ELF."""
    note = (4).to_bytes(4, "little") + (8).to_bytes(4, "little") + (18).to_bytes(4, "little") + b"Xen\0"

    assert note in (built / "vmlinux").read_bytes()


def test_a_guest_with_a_given_kata_agent_has_none_of_ours(
    built: Path, cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = tmp_path / "kata-agent"
    program.write_text("#!/bin/sh\necho kata-agent version 4.1.0\n")

    manifest = build(
        checkout=CHECKOUT, out=tmp_path / "out", cache=cache, progress=silent, origin=Origin(), kata_agent=program
    )

    ours = read_manifest(built)
    assert ours is not None
    assert manifest["artefacts"]["initrd.img"] == ours["artefacts"]["initrd.img"]
    assert manifest["artefacts"]["vmlinux"] == ours["artefacts"]["vmlinux"]
    root = unpacked(tmp_path / "out", tmp_path_factory)
    assert os.access(root / recipe.KATA_AGENT, os.X_OK)
    assert not (root / AGENT).exists()
    assert not (root / "usr/bin/python3").is_symlink()


@pytest.mark.parametrize("suite", [suite.codename for suite in recipe.SUITES[1:]])
def test_a_guest_of_another_suite_imports_the_agent(
    cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, suite: str
) -> None:
    if not (cache / "indexes" / suite).is_dir():
        pytest.skip(
            f"no packages of {suite} in {cache}: run make guest GUEST='--suite {suite} --out .build/guest-{suite}'"
        )
    origin = Origin(suite=suite)

    manifest = build(checkout=CHECKOUT, out=tmp_path / "out", cache=cache, progress=silent, origin=origin)

    assert manifest["suite"] == suite
    root = unpacked(tmp_path / "out", tmp_path_factory)
    assert in_guest(root, "import guest.agent.__main__, yaml\nprint(sys.version_info >= (3, 11))") == "True\n"


def test_a_guest_of_another_processor_has_its_programs_and_the_same_byte_code(
    built: Path, cache: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = next(each for each in recipe.ARCHITECTURES if each.machine != os.uname().machine)
    if not (cache / "indexes" / f"{SUITE.codename}-{other.name}").is_dir():
        pytest.skip(f"no packages for {other.name} in {cache}: run make guest GUEST='--arch {other.name}'")
    origin = Origin(architecture=other.name)

    one, two = (
        build(checkout=CHECKOUT, out=tmp_path / name, cache=cache, progress=silent, origin=origin)
        for name in ("one", "two")
    )

    assert one == two
    assert (tmp_path / "one/rootfs.img").read_bytes() == (tmp_path / "two/rootfs.img").read_bytes()
    assert (one["architecture"], one["kernel_release"].rpartition("-")[2]) == (other.name, other.name)
    assert boot_file_architecture(str(tmp_path / "one/vmlinux")) == other.machine
    assert boot_file_architecture(str(tmp_path / "one/initrd.img")) == other.machine
    own, foreign = unpacked(built, tmp_path_factory), unpacked(tmp_path / "one", tmp_path_factory)
    programs = [path for path in foreign.rglob("*") if path.is_file() and not path.is_symlink()]
    found = {boot_file_architecture(str(path)) for path in programs if path.read_bytes()[:4] == b"\x7fELF"}
    assert found == {other.machine}
    compiled = [path.relative_to(foreign) for path in foreign.rglob("*.pyc")]
    shared = [path for path in compiled if (own / path).exists()]
    assert [path for path in shared if (own / path).read_bytes() != (foreign / path).read_bytes()] == []
    # Debian names the settings of the interpreter's own build after the processor.
    assert [path.name for path in compiled if path not in shared and other.triplet not in path.name] == []
    assert len(compiled) > 500


def test_a_kata_agent_that_is_not_there_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=f"take kata-agent {tmp_path}/none: there is no such file"):
        build(
            checkout=CHECKOUT,
            out=tmp_path / "out",
            cache=cache,
            progress=silent,
            origin=Origin(),
            kata_agent=tmp_path / "none",
        )
