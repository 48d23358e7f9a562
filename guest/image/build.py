"""The order of the steps: resolve, look in the cache, download, unpack, assemble, write, record."""

import fcntl
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import pyshim
from guest.image import recipe
from guest.image.debian import (
    MACHINE,
    Archive,
    Package,
    Progress,
    dependency_closure,
    download,
    index_lookup,
    refuse_unauthenticated,
    snapshot_archive,
    unpack,
    update_indexes,
)
from guest.image.errors import BuildError
from guest.image.modules import ModuleStore
from guest.image.rootfs import (
    add_kata_agent,
    add_own_agent,
    agent_files,
    library_files,
    pack_initrd,
    pack_root,
    write_initrd,
    write_root,
)
from guest.image.sbom import SBOM, bill_of_materials
from guest.image.vmlinux import write_vmlinux

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything that the image depends on; `key` names the result."""

    packages: tuple[Package, ...]
    checkout: Path
    site_packages: Path
    kata_agent: Path | None
    """The agent of the guest; None: our own."""

    def key(self) -> str:
        """A digest of the package digests, the agent with its libraries, and the builder."""
        digest = sha256()
        for package in self.packages:
            digest.update(f"{package.name}={package.version} {package.sha256}\n".encode())
        builder = sorted(file for file in (self.checkout / "guest/image").iterdir() if file.is_file())
        agent = (
            [(self.checkout, agent_files(self.checkout)), (self.site_packages, library_files(self.site_packages))]
            if self.kata_agent is None
            else [(self.kata_agent.parent, [self.kata_agent])]
        )
        for base, files in ((self.checkout, builder), *agent):
            for file in files:
                digest.update(f"{file.relative_to(base)} {sha256(file.read_bytes()).hexdigest()}\n".encode())
        return digest.hexdigest()

    def bill_of_materials(self, key: str) -> str:
        if self.kata_agent is not None:
            agent = f"kata-agent-{_file_digest(self.kata_agent)[:16]}"
            return bill_of_materials(self.packages, {}, agent=agent, key=key)
        libraries = {"protobuf": metadata.version("protobuf")}
        return bill_of_materials(self.packages, libraries, agent=pyshim.__version__, key=key)

    def add_agent(self, root: Path) -> None:
        """The guest's agent is in the tree `root`. Raises BuildError."""
        if self.kata_agent is None:
            add_own_agent(root, checkout=self.checkout, site_packages=self.site_packages)
        else:
            add_kata_agent(root, self.kata_agent)


def _index_state() -> str:
    """A text that changes when apt's indexes or its choice of versions may have changed. Calls no apt."""
    places = tuple(
        map(Path, ("/var/lib/apt/lists", "/etc/apt/preferences", "/etc/apt/preferences.d", "/etc/apt/sources.list.d"))
    )
    files = [file for place in places for file in (place, *place.glob("*")) if file.exists()]
    return "\n".join(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in sorted(files))


def resolve_packages(
    wanted: tuple[str, ...], cache: Path, progress: Progress, *, archive: Archive = MACHINE
) -> tuple[Package, ...]:
    """The kernel and the packages `wanted` with their dependencies, at the versions apt's indexes offer.

    The result is stored in `cache` until the indexes or the recipe change: apt takes most of the time of a build with
    nothing to do. Raises BuildError, also for sources that apt accepts unsigned.
    """
    roots = (recipe.KERNEL_PACKAGE, *wanted, *archive)
    remembered = cache / f"resolution-{sha256(' '.join(sorted(roots)).encode()).hexdigest()[:8]}.json"

    def question() -> list[object]:
        return [_index_state(), sorted(roots), sorted(recipe.WITHOUT_PACKAGES)]

    try:
        asked, answer = json.loads(remembered.read_text())
        if asked == question():
            return tuple(Package(**{**fields, "depends": tuple(map(tuple, fields["depends"]))}) for fields in answer)
    except (OSError, ValueError, TypeError, KeyError):
        pass  # absent, or written by another version of this file
    refuse_unauthenticated(archive)
    names, lookup = (recipe.KERNEL_PACKAGE, *wanted), index_lookup(archive)
    try:
        packages = dependency_closure(names, recipe.WITHOUT_PACKAGES, lookup)
    except BuildError:
        # a new machine has no indexes, and old indexes may name packages that have left the archive
        update_indexes(progress, archive=archive)
        packages = dependency_closure(names, recipe.WITHOUT_PACKAGES, lookup)
    cache.mkdir(parents=True, exist_ok=True)
    remembered.write_text(json.dumps([question(), [asdict(package) for package in packages]]))
    return packages


def _kernel_directory(packages: tuple[Package, ...], directories: dict[str, Path]) -> tuple[Path, str]:
    """The unpacked kernel package and the kernel's release."""
    for package in packages:
        modules = directories[package.name] / "lib/modules"
        if package.name.startswith("linux-image-") and modules.is_dir():
            return directories[package.name], next(modules.iterdir()).name
    raise BuildError(f"find the kernel: {recipe.KERNEL_PACKAGE} depends on no package with modules")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Only one build at a time uses the cache."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return sha256(file.read()).hexdigest()


def read_manifest(out: Path) -> dict[str, Any] | None:
    """The manifest in `out`, if it is ours and its files are there with the right sizes."""
    try:
        manifest: dict[str, Any] = json.loads((out / MANIFEST).read_text())
        if manifest["version"] != MANIFEST_VERSION:
            return None
        for name, facts in manifest["artefacts"].items():
            if (out / name).stat().st_size != facts["size_bytes"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest


def refuse_others(packages: tuple[Package, ...], expected: Path) -> None:
    """`packages` have the digests of the manifest `expected`. Raises BuildError naming the first that has another."""
    try:
        wanted = {name: facts["sha256"] for name, facts in json.loads(expected.read_text())["packages"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise BuildError(f"read manifest {expected}: {exc}") from exc
    found = {package.name: package.sha256 for package in packages}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            text = f"{found.get(name, 'none')} in place of {wanted.get(name, 'none')}"
            raise BuildError(f"take the packages of {expected}: {name} has digest {text}")


def _assemble(inputs: Inputs, cache: Path, partial: Path, progress: Progress) -> str:
    """Write the artefacts into `partial`; the kernel's release."""
    files = download(inputs.packages, cache / "packages", progress)
    progress("unpack packages")
    directories = {p.name: unpack(p, files[p.name], cache / "unpacked") for p in inputs.packages}
    kernel, release = _kernel_directory(inputs.packages, directories)
    bzimage = (kernel / f"boot/vmlinuz-{release}").read_bytes()
    (partial / "vmlinuz").write_bytes(bzimage)
    write_vmlinux(bzimage, partial / "vmlinux")
    store = ModuleStore(kernel, release)
    with tempfile.TemporaryDirectory(dir=partial, prefix="scratch-") as scratch:
        root, initrd = Path(scratch, "root"), Path(scratch, "initrd")
        root.mkdir()
        initrd.mkdir()
        progress("assemble root file system, compile Python modules")
        write_root(
            root,
            packages=[directory for name, directory in directories.items() if not name.startswith("linux-image-")],
            store=store,
            add_agent=inputs.add_agent,
        )
        write_initrd(initrd, busybox=root / "usr/bin/busybox", store=store)
        progress("write root image and initrd")
        pack_root(root, partial / "rootfs.img")
        pack_initrd(initrd, partial / "initrd.img")
    return release


def build(
    *,
    checkout: Path,
    out: Path,
    cache: Path,
    progress: Progress,
    kata_agent: Path | None = None,
    snapshot: str = "",
    expected: Path | None = None,
) -> dict[str, Any]:
    """The manifest of the guest in `out`, which is built unless it was built of the same inputs before.

    With `kata_agent`, a program, the guest has this agent in place of ours. Packages come from the machine's apt
    sources, or from Debian's archive at the time `snapshot`; with `expected`, a manifest, they must be those of it.

    Files get their names when complete, the manifest last: a reader of the manifest finds its files. Raises BuildError.
    """
    started_s = time.monotonic()
    site_packages = Path(sysconfig.get_path("purelib"))
    if kata_agent is not None and not kata_agent.is_file():
        raise BuildError(f"take kata-agent {kata_agent}: there is no such file")
    archive = MACHINE
    if snapshot:
        archive = snapshot_archive(snapshot, cache / f"snapshot-{snapshot}", suite=recipe.SUITE)
    wanted = recipe.PACKAGES if kata_agent is None else recipe.KATA_PACKAGES

    def inputs_now() -> Inputs:
        packages = resolve_packages(wanted, cache, progress, archive=archive)
        if expected is not None:
            refuse_others(packages, expected)
        return Inputs(packages=packages, checkout=checkout, site_packages=site_packages, kata_agent=kata_agent)

    with _locked(cache):
        inputs = inputs_now()
        key = inputs.key()
        manifest = read_manifest(out)
        if manifest is not None and manifest["key"] == key:
            progress(f"guest image is current: {out}")
            return manifest
        out.mkdir(parents=True, exist_ok=True)
        try:
            download(inputs.packages, cache / "packages", progress, archive=archive)
        except BuildError:
            # the indexes may be older than the archive, which has only the newest version
            update_indexes(progress, archive=archive)
            inputs = inputs_now()
            key = inputs.key()
        with tempfile.TemporaryDirectory(dir=out, prefix=".partial-") as partial_name:
            partial = Path(partial_name)
            release = _assemble(inputs, cache, partial, progress)
            (partial / SBOM).write_text(inputs.bill_of_materials(key))
            artefacts = {
                file.name: {"size_bytes": file.stat().st_size, "sha256": _file_digest(file)}
                for file in sorted(partial.iterdir())
            }
            manifest = {
                "version": MANIFEST_VERSION,
                "key": key,
                "kernel_release": release,
                "artefacts": artefacts,
                "packages": {p.name: {"version": p.version, "sha256": p.sha256} for p in inputs.packages},
            }
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            (out / MANIFEST).unlink(missing_ok=True)
            for name in (*artefacts, MANIFEST):
                os.replace(partial / name, out / name)
    progress(f"guest image built in {time.monotonic() - started_s:.0f} s: {out}")
    return manifest
