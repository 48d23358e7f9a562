"""The order of the steps: resolve, look in the cache, download, unpack, assemble, write, record."""

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from guest.image import recipe
from guest.image.cpio import cpio_archive
from guest.image.debian import Package, Progress, dependency_closure, download, index_lookup, run, unpack
from guest.image.errors import BuildError
from guest.image.interpreter import (
    AGENT_ROOT,
    Source,
    agent_sources,
    compiled,
    library_sources,
    stdlib_sources,
    with_bundle,
)
from guest.image.modules import ModuleStore
from guest.image.resume import Resumption
from guest.image.rootfs import Unpacked, erofs_image, loader_tree, root_tree
from guest.image.snapshot import keep_agent
from guest.image.tree import Tree
from guest.image.vmlinux import write_vmlinux

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything that decides what the image is; `key` names the result."""

    packages: tuple[Package, ...]
    sources: tuple[Source, ...]
    checkout: Path

    def key(self) -> str:
        """A digest over package digests, our sources and the builder itself."""
        digest = sha256()
        for package in self.packages:
            digest.update(f"{package.name}={package.version} {package.sha256}\n".encode())
        builder = sorted((self.checkout / "guest/image").glob("*.py"))
        for file in [*builder, *(source.file for source in self.sources)]:
            digest.update(f"{file.name} {sha256(file.read_bytes()).hexdigest()}\n".encode())
        return digest.hexdigest()


def _index_state() -> str:
    """Changes when apt's indexes or its choice of versions may have changed; costs no apt call."""
    places = (Path("/var/lib/apt/lists"), Path("/etc/apt/preferences"), Path("/etc/apt/preferences.d"))
    files = [file for place in places for file in (place, *place.glob("*")) if file.exists()]
    return "\n".join(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in sorted(files))


def resolve_packages(cache: Path, progress: Progress) -> tuple[Package, ...]:
    """The packages of the recipe with their dependencies, at the versions the machine's apt indexes offer.

    Remembered in `cache` until the indexes or the recipe change: asking apt is most of the time of a build with
    nothing to do.
    """
    roots = (*recipe.PACKAGES, *recipe.TOOL_PACKAGES)
    remembered = cache / "resolution.json"

    def question() -> list[object]:
        return [_index_state(), sorted(roots), sorted(recipe.WITHOUT_PACKAGES)]

    try:
        asked, answer = json.loads(remembered.read_text())
        if asked == question():
            return tuple(Package(**{**fields, "depends": tuple(map(tuple, fields["depends"]))}) for fields in answer)
    except (OSError, ValueError, TypeError, KeyError):
        pass  # absent, or written by another version of this file
    try:
        packages = dependency_closure(roots, recipe.WITHOUT_PACKAGES, index_lookup)
    except BuildError:
        # a fresh machine has no indexes at all, and an old one may name packages that left the archive
        progress("fetch Debian package indexes")
        run(["apt-get", "update", "-q"])
        packages = dependency_closure(roots, recipe.WITHOUT_PACKAGES, index_lookup)
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
    """Two builds into one cache happen one after the other."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return sha256(file.read()).hexdigest()


def read_manifest(out: Path) -> dict[str, Any] | None:
    """The manifest in `out`, if it is ours and the files it names are there with the sizes it gives."""
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


def _sources(checkout: Path, start: Path) -> list[Source]:
    entry = Source(path=f"{AGENT_ROOT}/start.py", file=start)
    return [*agent_sources(checkout, recipe.AGENT_SOURCES), entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What an image is made of, ready on disk and in memory: packages, kernel, modules, byte code."""

    unpacked: Unpacked
    kernel: Path
    release: str
    store: ModuleStore
    modules: dict[str, bytes]

    @property
    def bzimage(self) -> bytes:
        """The kernel as Debian ships it."""
        return (self.kernel / f"boot/vmlinuz-{self.release}").read_bytes()

    def bundled(self) -> dict[str, bytes]:
        """The byte code as it lies in the guest: the agent's modules in one file."""
        return with_bundle(self.modules, recipe.BUNDLED_STDLIB)

    def tree(self, python: dict[str, bytes]) -> Tree:
        """The root file system of the recipe, with `python` as the interpreter's modules."""
        wanted = (*recipe.LOADER_MODULES, *recipe.BACKGROUND_MODULES, *recipe.ON_DEMAND_MODULES)
        return root_tree(self.unpacked, python, self.release, self.store.closure(wanted))

    def keep_agent(self, tree: Tree, kernel: Path, scratch: Path) -> Resumption:
        """How a guest with the root file system `tree` goes on as its agent, whose memory is in `tree` too."""
        return keep_agent(
            tree,
            kernel=kernel,
            release=self.release,
            store=self.store,
            erofs_tool=self.unpacked.command("usr/bin/mkfs.erofs"),
            scratch=scratch,
        )


def gather(inputs: Inputs, cache: Path, scratch: Path, progress: Progress) -> Material:
    """All material, downloaded, unpacked and compiled."""
    files = download(inputs.packages, cache / "packages", progress)
    progress("unpack packages")
    directories = {p.name: unpack(p, files[p.name], cache / "unpacked") for p in inputs.packages}
    unpacked = Unpacked(directories=directories)
    kernel, release = _kernel_directory(inputs.packages, directories)
    progress("compile Python modules")
    stdlib = stdlib_sources([directories["libpython3.11-minimal"], directories["libpython3.11-stdlib"]])
    for package, name in recipe.PYTHON_LIBRARIES.items():
        stdlib += library_sources(directories[package], name)
    return Material(
        unpacked=unpacked,
        kernel=kernel,
        release=release,
        store=ModuleStore(kernel / "lib/modules" / release),
        modules=compiled([*stdlib, *inputs.sources], [*unpacked.command("usr/bin/python3.11"), "-I", "-S"], scratch),
    )


def _assemble(inputs: Inputs, cache: Path, partial: Path, progress: Progress, *, runs_agent: bool) -> dict[str, Any]:
    """Write the artefacts into `partial`; the manifest's facts about the content."""
    with tempfile.TemporaryDirectory(dir=partial, prefix="scratch-") as scratch_name:
        scratch = Path(scratch_name)
        material = gather(inputs, cache, scratch, progress)
        progress("write kernel, initrd and root image")
        kernel, erofs_tool = partial / "vmlinux", material.unpacked.command("usr/bin/mkfs.erofs")
        (partial / "vmlinuz").write_bytes(material.bzimage)
        write_vmlinux(material.bzimage, material.unpacked.command("usr/bin/lz4"), kernel, scratch)
        tree = material.tree(material.bundled())
        resumption = None
        if runs_agent:
            progress("boot once, to keep the agent's memory")
            resumption = material.keep_agent(tree, kernel, scratch)
        erofs_image(tree, erofs_tool, partial / "rootfs.img", scratch)
        loader = loader_tree(material.release, material.store, resumption=resumption)
        (partial / "initrd.img").write_bytes(cpio_archive(loader, recipe.MTIME_S))
    return {"kernel_release": material.release, "root_content_bytes": tree.size_bytes}


def find_inputs(checkout: Path, cache: Path, start: Path, progress: Progress) -> Inputs:
    """The inputs of a build from `checkout` that starts the program `start` in the guest."""
    return Inputs(
        packages=resolve_packages(cache, progress), sources=tuple(_sources(checkout, start)), checkout=checkout
    )


def build(*, checkout: Path, out: Path, cache: Path, progress: Progress, start: Path | None = None) -> dict[str, Any]:
    """The manifest of the guest in `out`, which is built unless it is there already from equal inputs.

    `start` replaces the agent's entry (benchmarks boot a program of their own), and is executed at each boot. Files
    appear under their names complete, the manifest last: whoever reads a manifest finds what it describes. Raises
    BuildError.
    """
    started_s = time.monotonic()
    with _locked(cache):
        inputs = find_inputs(checkout, cache, start or checkout / "guest/image/start.py", progress)
        key = inputs.key()
        manifest = read_manifest(out)
        if manifest is not None and manifest["key"] == key:
            progress(f"guest image is current: {out}")
            return manifest
        out.mkdir(parents=True, exist_ok=True)
        try:
            download(inputs.packages, cache / "packages", progress)
        except BuildError:
            # the indexes may be older than the archive, which drops a version when it has the next
            progress("fetch Debian package indexes")
            run(["apt-get", "update", "-q"])
            inputs = find_inputs(checkout, cache, start or checkout / "guest/image/start.py", progress)
            key = inputs.key()
        with tempfile.TemporaryDirectory(dir=out, prefix=".partial-") as partial_name:
            partial = Path(partial_name)
            facts = _assemble(inputs, cache, partial, progress, runs_agent=start is None)
            artefacts = {
                file.name: {"size_bytes": file.stat().st_size, "sha256": _file_digest(file)}
                for file in sorted(partial.iterdir())
            }
            manifest = {
                "version": MANIFEST_VERSION,
                "key": key,
                **facts,
                "artefacts": artefacts,
                "packages": {p.name: {"version": p.version, "sha256": p.sha256} for p in inputs.packages},
            }
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            (out / MANIFEST).unlink(missing_ok=True)
            for name in (*artefacts, MANIFEST):
                os.replace(partial / name, out / name)
    progress(f"guest image built in {time.monotonic() - started_s:.0f} s: {out}")
    return manifest
