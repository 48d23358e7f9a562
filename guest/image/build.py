"""The order of the steps: resolve, look in the cache, download, unpack, assemble, write, record."""

import fcntl
import functools
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import pyshim
from guest.image import recipe
from guest.image.archive import Archive, NotThere, Progress, snapshot_mirrors
from guest.image.debian import Package, unpack
from guest.image.errors import BuildError
from guest.image.libraries import foreign_libraries
from guest.image.mirrors import Mirrors, apt_mirrors, given_mirrors
from guest.image.modules import ModuleStore, module_base
from guest.image.recipe import Architecture, Suite
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
from guest.image.toolchain import Toolchain
from guest.image.vmlinux import write_vmlinux

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything that the image depends on; `key` names the result."""

    suite: Suite
    architecture: Architecture
    host: Architecture
    """Of this machine, whose programs make the images."""
    packages: tuple[Package, ...]
    build_packages: tuple[Package, ...]
    """Those whose programs make the images, of the host's architecture."""
    checkout: Path
    site_packages: Path
    kata_agent: Path | None
    """The agent of the guest; None: our own."""

    def key(self) -> str:
        """A digest of the package digests, the agent with its libraries, and the builder."""
        digest = sha256(f"{self.suite.codename} {self.architecture.name}\n".encode())
        for package in (*self.packages, *self.build_packages):
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

    def add_agent(self, root: Path, drivers: list[str], tools: Toolchain) -> None:
        """The guest's agent, which loads `drivers`, is in the tree `root`. Raises BuildError."""
        is_native = self.architecture == self.host
        if self.kata_agent is None:
            add_own_agent(
                root,
                drivers,
                python=self.suite.python,
                checkout=self.checkout,
                site_packages=self.site_packages,
                compiler=() if is_native else tools.directories,
            )
        else:
            add_kata_agent(root, self.kata_agent, runs_here=is_native)


def _kernel_directory(packages: tuple[Package, ...], directories: dict[str, Path]) -> tuple[Path, str]:
    """The unpacked kernel package and the kernel's release."""
    for package in packages:
        modules = module_base(directories[package.name]) / "lib/modules"
        if package.name.startswith("linux-image-") and modules.is_dir():
            return directories[package.name], next(modules.iterdir()).name
    raise BuildError("find the kernel: the recipe's KERNEL_PACKAGE depends on no package with modules")


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


def by_name(packages: Iterable[Package]) -> dict[str, Package]:
    """By name. Of one name with two architectures the first has it alone, the other one as in `cpio:amd64`."""
    found: dict[str, Package] = {}
    for package in packages:
        is_other = found.get(package.name, package).architecture != package.architecture
        found[f"{package.name}:{package.architecture}" if is_other else package.name] = package
    return found


def refuse_others(packages: tuple[Package, ...], expected: Path) -> None:
    """`packages` have the digests of the manifest `expected`. Raises BuildError naming the first that has another."""
    try:
        wanted = {name: facts["sha256"] for name, facts in json.loads(expected.read_text())["packages"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise BuildError(f"read manifest {expected}: {exc}") from exc
    found = {name: package.sha256 for name, package in by_name(packages).items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            text = f"{found.get(name, 'none')} in place of {wanted.get(name, 'none')}"
            raise BuildError(f"take the packages of {expected}: {name} has digest {text}")


def _assemble(inputs: Inputs, archive: Archive, cache: Path, partial: Path, progress: Progress) -> str:
    """Write the artefacts into `partial`; the kernel's release."""

    def unpacked(packages: tuple[Package, ...]) -> dict[str, Path]:
        files = archive.download(packages, cache / "packages")
        return {package.name: unpack(package, files[package.name], cache / "unpacked") for package in packages}

    progress("unpack packages")
    directories = unpacked(inputs.packages)
    tools = Toolchain(unpacked(inputs.build_packages).values(), inputs.host)
    kernel, release = _kernel_directory(inputs.packages, directories)
    bzimage = (kernel / f"boot/vmlinuz-{release}").read_bytes()
    (partial / "vmlinuz").write_bytes(bzimage)
    write_vmlinux(bzimage, partial / "vmlinux", tools)
    store = ModuleStore(kernel, release, busybox=tools.path("busybox"))
    with tempfile.TemporaryDirectory(dir=partial, prefix="scratch-") as scratch:
        root, initrd = Path(scratch, "root"), Path(scratch, "initrd")
        root.mkdir()
        initrd.mkdir()
        progress("assemble root file system, compile Python modules")
        write_root(
            root,
            suite=inputs.suite,
            architecture=inputs.architecture,
            packages=[directory for name, directory in directories.items() if not name.startswith("linux-image-")],
            store=store,
            add_agent=functools.partial(inputs.add_agent, tools=tools),
        )
        later = inputs.architecture.later_modules
        write_initrd(initrd, busybox=root / "usr/bin/busybox", store=store, later=later)
        progress("write root image and initrd")
        pack_root(root, partial / "rootfs.img", mkfs=tools.argv("mkfs.erofs"))
        pack_initrd(initrd, partial / "initrd.img", cpio=tools.argv("cpio"))
    return release


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the packages of a build come from."""

    suite: str = ""
    """Its code name; empty: the recipe's first."""
    architecture: str = ""
    """Of the guest; empty: this machine's."""
    mirror: str = ""
    """The address of a Debian mirror; empty: the mirror of the host's apt."""
    security_mirror: str = ""
    """The same for security updates; empty: beside the mirror."""
    snapshot: str = ""
    """A time of Debian's snapshot service in place of a mirror; empty: what the suite says."""
    keyring: Path | None = None
    """Debian's keys; None: where the package debian-archive-keyring has them."""
    update: bool = False
    """The newest packages are taken, not those of the build before."""


def find_suite(codename: str) -> Suite:
    """The recipe's suite of this code name, or its first. Raises BuildError."""
    for suite in recipe.SUITES:
        if codename in ("", suite.codename):
            return suite
    raise BuildError(f"take suite '{codename}': the recipe has {', '.join(suite.codename for suite in recipe.SUITES)}")


def find_architecture(name: str) -> Architecture:
    """The recipe's architecture of this name, Debian's or the kernel's. Raises BuildError."""
    for architecture in recipe.ARCHITECTURES:
        if name in (architecture.name, architecture.machine):
            return architecture
    known = ", ".join(architecture.name for architecture in recipe.ARCHITECTURES)
    raise BuildError(f"take architecture '{name}': the recipe has {known}")


def open_archive(origin: Origin, suite: Suite, architecture: Architecture, cache: Path, progress: Progress) -> Archive:
    """The archive of the suite; nothing has been fetched. Raises BuildError for an origin that is not one."""
    snapshot = origin.snapshot or suite.snapshot
    if snapshot and (origin.mirror or origin.security_mirror):
        raise BuildError(f"take snapshot {snapshot}: a mirror is given, too")
    if origin.security_mirror and not origin.mirror:
        raise BuildError("take the security mirror: no mirror is given beside it (hint: --mirror URL)")
    mirrors: Callable[[], Mirrors] = apt_mirrors
    if snapshot:
        mirrors = functools.partial(snapshot_mirrors, snapshot)
    elif origin.mirror:
        mirrors = functools.partial(given_mirrors, origin.mirror, origin.security_mirror)
    if snapshot or origin.mirror:
        mirrors()  # what is given is checked, also when nothing will be fetched
    name = f"{suite.codename}-{snapshot}" if snapshot else suite.codename
    return Archive(
        suite=suite.codename,
        architecture=architecture.name,
        mirrors=mirrors,
        keyring=origin.keyring,
        cache=cache
        / "indexes"
        / (name if architecture.machine == os.uname().machine else f"{name}-{architecture.name}"),
        progress=progress,
    )


def build(
    *,
    checkout: Path,
    out: Path,
    cache: Path,
    progress: Progress,
    origin: Origin,
    kata_agent: Path | None = None,
    expected: Path | None = None,
) -> dict[str, Any]:
    """The manifest of the guest in `out`, which is built unless it was built of the same inputs before.

    With `kata_agent`, a program, the guest has this agent in place of ours. With `expected`, a manifest, the packages
    must be those of it.

    Files get their names when complete, the manifest last: a reader of the manifest finds its files. Raises BuildError.
    """
    started_s = time.monotonic()
    site_packages = Path(sysconfig.get_path("purelib"))
    if kata_agent is not None and not kata_agent.is_file():
        raise BuildError(f"take kata-agent {kata_agent}: there is no such file")
    suite, host = find_suite(origin.suite), find_architecture(os.uname().machine)
    architecture = find_architecture(origin.architecture) if origin.architecture else host
    archive = open_archive(origin, suite, architecture, cache, progress)
    tool_archive = archive if architecture == host else open_archive(origin, suite, host, cache, progress)
    kernel = recipe.KERNEL_PACKAGE.format(architecture=architecture.name)
    wanted = (kernel, *(recipe.PACKAGES if kata_agent is None else recipe.KATA_PACKAGES))
    tools = (*recipe.BUILD_PACKAGES, *(() if architecture == host else recipe.COMPILER_PACKAGES))

    def inputs_now() -> Inputs:
        packages = archive.resolve(suite.names(wanted), recipe.WITHOUT_PACKAGES)
        build_packages = tool_archive.resolve(suite.names(tools), recipe.WITHOUT_PACKAGES)
        if expected is not None:
            refuse_others((*packages, *build_packages), expected)
        return Inputs(
            suite=suite,
            architecture=architecture,
            host=host,
            packages=packages,
            build_packages=build_packages,
            checkout=checkout,
            site_packages=site_packages,
            kata_agent=kata_agent,
        )

    with _locked(cache):
        if architecture != host and kata_agent is None:
            site_packages = foreign_libraries(checkout, architecture, cache, progress)
        if origin.update:
            archive.update()
            if tool_archive is not archive:
                tool_archive.update()
        inputs = inputs_now()
        key = inputs.key()
        manifest = read_manifest(out)
        if manifest is not None and manifest["key"] == key:
            progress(f"guest image is current: {out}")
            return manifest
        if os.geteuid() != 0:
            raise BuildError("build the guest: not root (its own interpreter compiles Python modules in a chroot)")
        try:
            archive.download((*inputs.packages, *inputs.build_packages), cache / "packages")
        except NotThere:
            # The indexes are older than the archive, which has only the newest version.
            archive.update()
            tool_archive.update()
            inputs = inputs_now()
            key = inputs.key()
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".partial-") as partial_name:
            partial = Path(partial_name)
            release = _assemble(inputs, archive, cache, partial, progress)
            (partial / SBOM).write_text(inputs.bill_of_materials(key))
            artefacts = {
                file.name: {"size_bytes": file.stat().st_size, "sha256": _file_digest(file)}
                for file in sorted(partial.iterdir())
            }
            packages = by_name((*inputs.packages, *inputs.build_packages))
            manifest = {
                "version": MANIFEST_VERSION,
                "key": key,
                "suite": suite.codename,
                "architecture": architecture.name,
                "kernel_release": release,
                "artefacts": artefacts,
                "packages": {
                    name: {"version": package.version, "sha256": package.sha256}
                    for name, package in sorted(packages.items())
                },
            }
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            (out / MANIFEST).unlink(missing_ok=True)
            for name in (*artefacts, MANIFEST):
                os.replace(partial / name, out / name)
    progress(f"guest image built in {time.monotonic() - started_s:.0f} s: {out}")
    return manifest
