"""The releases of containerd that the tests can run, and what differs between them for a test.

CONTAINERD chooses one by its generation: `CONTAINERD=2.3 make integration`, or `newest`, the newest release that the Go
module proxy serves. Without it the tests run Debian's.
`python -m integration.framework.releases` builds the chosen one from the Go module proxy; later runs find it built.
The build needs a network, so it happens outside the enclosure. Nothing but this module asks which release it is.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHOICE = "CONTAINERD"
NEWEST = "newest"
SANDBOXER_CHOICE = "SANDBOXER"
PROJECT = Path(__file__).resolve().parents[2]
CACHE = PROJECT / ".build" / "cache" / "containerd"
_NEWEST_FILE = CACHE / NEWEST
_MODULE_2 = "github.com/containerd/containerd/v2"
_API_MODULE, _API = "github.com/containerd/containerd/api", "next.txtpb"
_PROGRAMS = ("containerd", "ctr", "containerd-shim-runc-v2")
# Snapshotters that no test uses and that need C libraries.
_TAGS = "no_btrfs,no_devmapper,no_zfs"
_DEBIAN = Path("/usr/bin")
_NRI = "io.containerd.nri.v1.nri"
_CRI_1, _CRI_2_RUNTIME, _CRI_2_IMAGES = (
    "io.containerd.grpc.v1.cri",
    "io.containerd.cri.v1.runtime",
    "io.containerd.cri.v1.images",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One containerd, by the first two numbers of its version."""

    generation: str
    version: str = ""
    """As the Go module proxy names it; "" for the distribution's package."""

    @property
    def is_built(self) -> bool:
        """Built from source, so it has to be built before a test can run it."""
        return bool(self.version)

    @property
    def programs(self) -> Path:
        """The directory of containerd, ctr and runc's shim."""
        return CACHE / self.version if self.is_built else _DEBIAN

    @property
    def api(self) -> Path:
        """The descriptors of its protocols: protobuf's FileDescriptorSet in text form."""
        return self.programs / _API

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(map(int, self.generation.split(".")))

    @property
    def module(self) -> str:
        """The Go module."""
        return _MODULE_2 if self.numbers >= (2,) else _MODULE_2.removesuffix("/v2")

    @property
    def config_version(self) -> int:
        """Of the tests' configuration file: one in which every release finds its sockets in the same table."""
        return 3 if self.numbers >= (2,) else 2

    @property
    def cri_plugins(self) -> tuple[str, ...]:
        """The plugins that are to be disabled where no test asks for CRI."""
        nri = (_NRI,) if self.numbers >= (1, 7) else ()
        return (_CRI_1, *nri) if self.numbers < (2,) else (_CRI_1, _CRI_2_RUNTIME, _CRI_2_IMAGES, *nri)

    @property
    def drop_in(self) -> Path:
        """The shipped configuration of the runtime handler."""
        name = "containerd-2.x-pykata.toml" if self.numbers >= (2,) else "containerd-1.x-pykata.toml"
        return PROJECT / "configs" / "containerd" / name

    @property
    def task_api(self) -> int:
        """The version of the Task API that `start` answers to it."""
        return 3 if self.numbers >= (2, 3) else 2

    @property
    def has_sandbox_api(self) -> bool:
        """A runtime handler may ask for it by `sandboxer`."""
        return self.numbers >= (2,)

    @property
    def has_erofs_snapshotter(self) -> bool:
        return self.numbers >= (2, 1)

    @property
    def leaves_mounts_to_shims(self) -> bool:
        """A shim may say that it mounts an image's layers itself."""
        return self.numbers >= (2, 2)

    @property
    def ctr_prints_codes(self) -> bool:
        """An error that `ctr` prints ends with the code of the API's error."""
        return self.numbers < (2,)

    @property
    def client_import(self) -> tuple[str, ...]:
        """Options of `ctr images import` for a snapshotter that the transfer service does not unpack to."""
        return ("--local",) if self.numbers >= (2,) else ()

    @property
    def cri_table(self) -> str:
        """The table of the configuration that holds `containerd.runtimes`."""
        return f'plugins."{_CRI_1 if self.numbers < (2,) else _CRI_2_RUNTIME}"'

    @property
    def has_nri(self) -> bool:
        """NRI as plugins of today speak it."""
        return self.numbers >= (1, 7)

    def cri_config(self, *, sandbox_image: str, cni: Path, nri: Path, more: str = "") -> str:
        """The pause image, CNI's directories `bin` and `net.d` below `cni`, and NRI's socket and directories in `nri`.

        `more` are lines for CRI's own table.

        runc's processes keep their OOM score: lowering it takes a capability that this machine may not have.
        """
        own = f"  restrict_oom_score_adj = true\n{more}"
        table = f'[{self.cri_table}.cni]\n  conf_dir = "{cni}/net.d"\n'
        nri_table = (
            f'[plugins."{_NRI}"]\n  disable = false\n  socket_path = "{nri}/nri.sock"\n'
            f'  plugin_path = "{nri}/plugins"\n  plugin_config_path = "{nri}/conf.d"\n'
        )
        if self.numbers < (2,):
            head = f'[{self.cri_table}]\n  sandbox_image = "{sandbox_image}"\n{own}'
            return f'{head}{table}  bin_dir = "{cni}/bin"\n{nri_table if self.has_nri else ""}'
        image = f'[plugins."{_CRI_2_IMAGES}".pinned_images]\n  sandbox = "{sandbox_image}"\n'
        key = f'bin_dirs = ["{cni}/bin"]' if self.numbers >= (2, 1) else f'bin_dir = "{cni}/bin"'
        return f"{image}[{self.cri_table}]\n{own}{table}  {key}\n{nri_table}"


RELEASES = {
    release.generation: release
    for release in (
        Release(generation="1.6"),
        Release(generation="1.7", version="v1.7.34"),
        Release(generation="2.1", version="v2.1.9"),
        Release(generation="2.3", version="v2.3.4"),
    )
}


def sandboxer() -> str:
    """The sandboxer of the tests' runtime handler: `shim` makes pods by the Sandbox API, without a pause container."""
    return os.environ.get(SANDBOXER_CHOICE) or "podsandbox"


def chosen() -> Release:
    """The release that CONTAINERD names. Raises ValueError with the names that are known."""
    name = os.environ.get(CHOICE) or next(iter(RELEASES))
    if name == NEWEST:
        return found_newest()
    if name not in RELEASES:
        raise ValueError(f"choose containerd {name!r}: {CHOICE} is one of {', '.join(RELEASES)} or {NEWEST}")
    return RELEASES[name]


def newest_version(versions: Iterable[str]) -> str:
    """The highest of the released versions; release candidates do not count. Raises ValueError when there is none."""
    released = [version for version in versions if re.fullmatch(r"v\d+\.\d+\.\d+", version)]
    if not released:
        raise ValueError("choose the newest containerd: the Go module proxy serves no release")
    return max(released, key=lambda version: tuple(map(int, version[1:].split("."))))


def release_of(version: str) -> Release:
    """The release `version`, such as v2.4.2."""
    return Release(generation=".".join(version[1:].split(".")[:2]), version=version)


def find_newest() -> Release:
    """The newest release that the Go module proxy serves. Tests without a network find it by `found_newest`."""
    CACHE.mkdir(parents=True, exist_ok=True)
    version = newest_version(run_go(CACHE, "list", "-m", "-versions", _MODULE_2).split())
    _NEWEST_FILE.write_text(version)
    return release_of(version)


def found_newest() -> Release:
    """What `find_newest` found the last time. Raises ValueError before its first call."""
    try:
        return release_of(_NEWEST_FILE.read_text())
    except OSError as error:
        raise ValueError(
            f"choose containerd '{NEWEST}': not looked up yet "
            f"(hint: {CHOICE}={NEWEST} python -m integration.framework.releases)"
        ) from error


def is_newest_found() -> bool:
    return _NEWEST_FILE.exists()


def build(release: Release) -> None:
    """The programs of `release` are in its directory. Raises OSError saying what failed.

    The Go client fetches and checks the modules. It builds from a module of its own that requires containerd, because
    `go install` refuses modules whose go.mod excludes something, as those of 1.7 and 2.1 do.
    """
    if not release.is_built:
        return
    with go_build(release.programs, f"containerd {release.version}", "some minutes") as work:
        if work is not None:
            packages = [f"{release.module}/cmd/{name}" for name in _PROGRAMS]
            run_go(work, "mod", "init", "pyshim.test/containerd")
            run_go(work, "get", *(f"{package}@{release.version}" for package in packages))
            run_go(work, "build", "-trimpath", "-tags", _TAGS, "-o", "bin/", *packages)
            shutil.copy(Path(run_go(work, "list", "-m", "-f", "{{.Dir}}", _API_MODULE).strip()) / _API, work / "bin")


@contextmanager
def one_build(cache: Path) -> Iterator[None]:
    """The directory is there, and no other build in it runs within the block."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def go_build(programs: Path, what: str, how_long: str) -> Iterator[Path | None]:
    """A directory in which the caller builds into `bin`, which becomes `programs` afterwards; None when that is there.

    One build of a directory at a time; a build that failed leaves no `programs`. Raises OSError without a Go client.
    """
    cache = programs.parent
    with one_build(cache):
        if programs.exists():
            yield None
            return
        if shutil.which("go") is None:
            raise FileNotFoundError(f"build {what}: no program 'go' (hint: install Go)")
        work = cache / f".{programs.name}"
        shutil.rmtree(work, ignore_errors=True)
        (work / "bin").mkdir(parents=True)
        print(f"==> building {what} ({how_long}, once)", flush=True)
        yield work
        (work / "bin").rename(programs)
        shutil.rmtree(work)


def run_go(directory: Path, *words: str) -> str:
    """What `go WORDS` printed. Raises ChildProcessError with the end of its messages when it fails."""
    environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
    done = subprocess.run(["go", *words], cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join(line for line in done.stderr.splitlines() if not re.match("go: (downloading|added) ", line))
        raise ChildProcessError(f"go {words[0]}: exit code {done.returncode}: {said[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        build(find_newest() if os.environ.get(CHOICE) == NEWEST else chosen())
    except (OSError, ValueError) as error:
        sys.exit(f"releases: {error}")
