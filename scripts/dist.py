"""What a release consists of: `python -m scripts.dist payload DIR` and `python -m scripts.dist all DIR`.

The payload is what a node installs: wheels for every supported Python, the guest, configurations and `install`. An
image for nodes brings it unpacked (`make payload`), the archive packs it (`make dist`). The same commit gives the same
bytes: files are those of the commit, in the order of their names, with its time; wheels are locked by digests; the
guest is reproducible by itself. docs/RELEASES.md says how a release is made and checked.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, NamedTuple

from guest.image.recipe import MTIME_S
from guest.image.sbom import SBOM, part, related
from pyshim import PYTHONS, __version__
from pyshim.model.architecture import go_architecture
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.node.cli.command import PYSHIM, manual_page
from pyshim.node.install.release import GUEST_FILES, Sources
from scripts.install import SUMS

PROJECT = Path(__file__).resolve().parents[1]
MACHINE = os.environ.get("MACHINE") or platform.machine()
"""The processor of the nodes, as `uname -m` says it."""
LIBRARIES = ("ttrpc", "cdi")
_LOCKS = ("requirements.lock", "requirements-image.lock")
_GLIBC_MINOR = 36
"""Of Debian 12, the oldest that is supported: wheels for it and for all C libraries before it are taken."""
_GUEST_FILES = (*GUEST_FILES, "manifest.json", SBOM)
_HELM = "application/vnd.cncf.helm"


class Origin(NamedTuple):
    """Where the files come from."""

    commit: str
    """Empty where no git is there to ask, as in the build of an image."""
    epoch_s: int
    """The time of every file."""


# ---- what a node installs


def lay_out(out: Path, *, source: Path, guest: Path, wheels: Path, wheel: Path, origin: Origin) -> None:
    """`out` is the payload, with its release.json, bill of materials and digests.

    `source` is a checkout, `guest` what 'make guest' built, `wheels` has the locked dependencies, `wheel` is ours.
    """
    out.mkdir()
    for name in ("LICENSE", "CHANGELOG.md", "requirements.lock"):
        shutil.copy(source / name, out)
    shutil.copy(source / "scripts" / "install.py", out / "install")
    (out / "install").chmod(0o755)
    (out / "README").write_text(_README)
    shutil.copytree(source / "configs", out / "configs", ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    shutil.copy(wheel, out)
    (out / "wheels").mkdir()
    for path in wheels.glob("*.whl"):
        shutil.copy(path, out / "wheels")
    (out / "guest").mkdir()
    for name in _GUEST_FILES:
        shutil.copy(guest / name, out / "guest")
    (out / "pyshim.1").write_text(manual_page(PYSHIM))
    names = [path.name for path in (out / "wheels").iterdir()]
    release = {
        "version": __version__,
        "commit": origin.commit,
        "machine": MACHINE,
        "pythons": PYTHONS,
        "glibc": f"2.{max(map(glibc_minor, names), default=0)}",
    }
    (out / "release.json").write_text(json.dumps(release, indent=1) + "\n")
    (out / SBOM).write_text(json.dumps(bill_of_materials(out, origin), indent=1) + "\n")
    write_sums(out, {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()})


_README = """\
pyshim for nodes of any Linux distribution with glibc, for the processor and the Pythons of release.json.

    ./install --check      read the whole archive, look at this node, change nothing
    ./install --dry-run    say what would be written
    ./install --restart    install or upgrade, restart the container runtime, run a test pod; all of it or nothing

The options are those of 'pyshim install' (pyshim.1). The node needs Python, QEMU and virtiofsd.
"""


def glibc_minor(wheel: str) -> int:
    """The oldest C library, 2.N, that can load the wheel of this file name; 0 for one without machine code."""
    names = {"manylinux1": 5, "manylinux2010": 12, "manylinux2014": 17}
    platforms = wheel.removesuffix(".whl").rpartition("-")[2].split(".")
    found = [names[name] for each in platforms if (name := each.partition("_")[0]) in names]
    found += [int(number) for each in platforms for number in re.findall(r"^manylinux_2_(\d+)_", each)]
    return min(found, default=0)


def bill_of_materials(payload: Path, origin: Origin) -> dict[str, Any]:
    """SPDX 2.3: pyshim, each wheel with its digest, and all that the guest's own bill has."""
    guest = json.loads((payload / "guest" / SBOM).read_text())
    (guest_id,) = (
        each["relatedSpdxElement"] for each in guest["relationships"] if each["relationshipType"] == "DESCRIBES"
    )
    parts = []
    for path in sorted((payload / "wheels").iterdir()):
        name, version = path.name.split("-")[:2]
        locator = f"pkg:pypi/{name.replace('_', '-').lower()}@{version}"
        parts.append(_package(f"wheel-{path.name}", name, version, locator) | {"checksums": [_spdx_checksum(path)]})
    whole = _package("pyshim", "pyshim", __version__, f"pkg:generic/pyshim@{__version__}")
    contents = [*(each["SPDXID"] for each in parts), guest_id]
    return {
        **guest,
        "name": "pyshim",
        "documentNamespace": f"https://spdx.org/spdxdocs/pyshim-{__version__}-{origin.commit}",
        "creationInfo": {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(origin.epoch_s)),
            "creators": ["Tool: pyshim-dist"],
        },
        "packages": [whole, *parts, *guest["packages"]],
        "relationships": [
            related("SPDXRef-DOCUMENT", "DESCRIBES", whole["SPDXID"]),
            *(related(whole["SPDXID"], "CONTAINS", each) for each in contents),
            *(each for each in guest["relationships"] if each["relationshipType"] != "DESCRIBES"),
        ],
    }


def _package(spdx_id: str, name: str, version: str, locator: str) -> dict[str, Any]:
    return part(name, version, locator) | {"SPDXID": "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", spdx_id)}


def _spdx_checksum(path: Path) -> dict[str, str]:
    return {"algorithm": "SHA256", "checksumValue": _digest(path)}


def download_wheels(out: Path) -> None:
    """`out` has the locked dependencies and pip for every supported Python. Raises CalledProcessError."""
    platforms = [f"manylinux_2_{minor}_{MACHINE}" for minor in range(_GLIBC_MINOR, 4, -1)]
    platforms += [f"{name}_{MACHINE}" for name in ("manylinux2014", "manylinux2010", "manylinux1")]
    for version in PYTHONS:
        print(f"==> wheels for Python {version}", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        locked = ["--require-hashes", "--only-binary", ":all:", "--python-version", version, "--implementation", "cp"]
        where = [word for each in platforms for word in ("--platform", each)]
        locks = [word for name in _LOCKS for word in ("-r", str(PROJECT / name))]
        subprocess.run([*pip, *locked, *where, *locks, "-d", out], check=True)


# ---- the files of a release


def write_tar(out: Path, top: Path, prefix: str, epoch_s: int) -> None:
    """`out` is a tar.gz of the files below `top`, whose bytes depend on names, contents and executable bits only."""
    with (
        out.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=epoch_s) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        _add_files(archive, top, f"{prefix}/", epoch_s)


def _add_files(archive: tarfile.TarFile, top: Path, prefix: str, epoch_s: int) -> None:
    for path in sorted((path for path in top.rglob("*") if path.is_file()), key=lambda path: path.parts):
        item = tarfile.TarInfo(f"{prefix}{path.relative_to(top)}")
        item.size, item.mtime = path.stat().st_size, epoch_s
        item.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
        with path.open("rb") as file:
            archive.addfile(item, file)


def write_chart(out: Path, source: Path, epoch_s: int) -> None:
    """`out` has the chart as `helm package` names it, and the same as an OCI image layout in a tar."""
    import yaml

    top = source / "configs" / "helm" / "pyshim"
    chart = yaml.safe_load((top / "Chart.yaml").read_text())
    packed = out / f"{chart['name']}-{chart['version']}.tgz"
    write_tar(packed, top, chart["name"], epoch_s)
    with tempfile.TemporaryDirectory() as made:
        layout = Path(made)
        blobs = layout / "blobs" / "sha256"
        blobs.mkdir(parents=True)

        def blob(content: bytes, kind: str) -> dict[str, object]:
            digest = sha256(content).hexdigest()
            (blobs / digest).write_bytes(content)
            return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": blob(json.dumps(chart).encode(), f"{_HELM}.config.v1+json"),
            "layers": [blob(packed.read_bytes(), f"{_HELM}.chart.content.v1.tar+gzip")],
            "annotations": {
                "org.opencontainers.image.title": chart["name"],
                "org.opencontainers.image.version": chart["version"],
            },
        }
        named = blob(json.dumps(manifest).encode(), str(manifest["mediaType"]))
        index = {"schemaVersion": 2, "manifests": [named | {"annotations": _named(chart["version"])}]}
        (layout / "index.json").write_text(json.dumps(index))
        (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        with tarfile.open(out / f"pyshim-chart-{chart['version']}.oci.tar", "w", format=tarfile.PAX_FORMAT) as archive:
            _add_files(archive, layout, "", epoch_s)


def _named(version: str) -> dict[str, str]:
    return {"org.opencontainers.image.ref.name": version}


def provenance(files: Mapping[str, Path], payload: Path, origin: Origin) -> dict[str, Any]:
    """An in-toto statement: which files, from which commit and inputs, by which program. It says no time and no host.

    Source: in-toto attestation framework, Statement v1; SLSA provenance v1.
    """
    wheels = sorted((payload / "wheels").iterdir())
    guest = payload / "guest" / "manifest.json"
    inputs = [{"name": "commit", "digest": {"gitCommit": origin.commit}}]
    inputs += [
        {"name": str(path.relative_to(payload)), "digest": {"sha256": _digest(path)}} for path in (guest, *wheels)
    ]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [_subject(name, path) for name, path in sorted(files.items())],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://pyshim.io/make-dist/v1",
                "externalParameters": {"version": __version__, "machine": platform.machine()},
                "resolvedDependencies": inputs,
            },
            "runDetails": {"builder": {"id": "https://pyshim.io/scripts/dist.py"}},
        },
    }


def _subject(name: str, path: Path) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": _digest(path)}}


def write_sums(directory: Path, files: Mapping[str, Path]) -> None:
    """The digests of `files`, by their names below `directory`, as `sha256sum --check` reads them."""
    lines = (f"{_digest(path)}  {name}\n" for name, path in sorted(files.items()))
    (directory / SUMS).write_text("".join(lines))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


# ---- the build


def origin_of(checkout: Path) -> Origin:
    """Raises FailedPrecondition for changes that are in no commit."""
    changed = _git(checkout, "status", "--porcelain", "--untracked-files=no").splitlines()
    if changed:
        named = ", ".join(line.split()[-1] for line in changed[:5])
        raise FailedPrecondition(f"make a release: {len(changed)} files differ from the commit: {named}")
    commit, epoch_s = _git(checkout, "log", "-1", "--format=%H %ct").split()
    return Origin(commit=commit, epoch_s=int(epoch_s))


def _git(checkout: Path, *words: str) -> str:
    command = ["git", "-c", f"safe.directory={checkout}", "-C", str(checkout), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def export(checkout: Path, commit: str, out: Path) -> None:
    """`out` has the commit's files, with modes and times that depend on the commit only."""
    out.mkdir()
    git = ["git", "-c", f"safe.directory={checkout}", "-C", str(checkout), "-c", "tar.umask=0022"]
    packed = subprocess.run([*git, "archive", "--format=tar", commit], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-xp", "-C", out], input=packed, check=True)


def build_python(source: Path, out: Path, epoch_s: int) -> list[Path]:
    """The sdist and the wheel of the Python project in `source`, made in `out`. Raises FailedPrecondition."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s)}
    with tempfile.TemporaryDirectory() as made:
        for kind in ("sdist", "wheel"):  # beside the sources, setuptools leaves files that a wheel would have
            program = f"import sys; from setuptools.build_meta import build_{kind} as build; build(sys.argv[1])"
            command = [sys.executable, "-c", program, made]
            done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise FailedPrecondition(f"make the {kind} of '{source}': {done.stderr.strip()[-1500:]}")
        (packed,) = Path(made).glob("*.tar.gz")
        (wheel,) = Path(made).glob("*.whl")
        subprocess.run(["tar", "-xzf", packed, "-C", made], check=True)
        name = packed.name.removesuffix(".tar.gz")
        write_tar(out / packed.name, Path(made, name), name, epoch_s)  # setuptools' has the time of its making
        return [out / packed.name, Path(shutil.copy(wheel, out))]


def guest_directory() -> Path:
    """Where the guest for the nodes' processor was built."""
    is_native = platform.machine() == MACHINE
    return PROJECT / ".build" / ("guest" if is_native else f"guest-{go_architecture(MACHINE)}")


def make_payload(out: Path) -> None:
    """The payload of this checkout's files, in a commit or not."""
    origin = Origin(commit="", epoch_s=int(os.environ.get("SOURCE_DATE_EPOCH", MTIME_S)))
    with (
        tempfile.TemporaryDirectory() as made,
        Sources(checkout=str(PROJECT), guest="", lock="", wheel=None, wheels=None) as sources,
    ):
        download_wheels(Path(made))
        lay_out(
            out, source=PROJECT, guest=guest_directory(), wheels=Path(made), wheel=Path(sources.wheel()), origin=origin
        )


def make_all(out: Path) -> None:
    """All that a release consists of, of the commit that is checked out, by that commit's own program."""
    origin = origin_of(PROJECT)
    with tempfile.TemporaryDirectory() as made:
        source = Path(made, "source")
        export(PROJECT, origin.commit, source)
        words = [str(out.absolute()), origin.commit, str(origin.epoch_s), str(guest_directory())]
        subprocess.run([sys.executable, "-m", "scripts.dist", "files", *words], cwd=source, check=True)


def make_files(out: Path, commit: str, epoch_s: str, guest: str) -> None:
    """The files of a release, of this tree, which is that of the commit and of its time."""
    origin = Origin(commit, int(epoch_s))
    out.mkdir()
    with tempfile.TemporaryDirectory() as made:
        wheels, payload = Path(made, "wheels"), Path(made, "payload")
        download_wheels(wheels)
        for project in (PROJECT, *(PROJECT / "packages" / name for name in LIBRARIES)):
            print(f"==> sdist and wheel of {project.relative_to(PROJECT)}", flush=True)
            build_python(project, out, origin.epoch_s)
        (wheel,) = out.glob("pyshim-*.whl")
        lay_out(payload, source=PROJECT, guest=Path(guest), wheels=wheels, wheel=wheel, origin=origin)
        print("==> archive", flush=True)
        name = f"pyshim-{__version__}-linux-{MACHINE}"
        write_tar(out / f"{name}.tar.gz", payload, name, origin.epoch_s)
        shutil.copy(payload / SBOM, out / f"{name}.spdx.json")
        write_chart(out, PROJECT, origin.epoch_s)
        files = {path.name: path for path in out.iterdir()}
        statement = json.dumps(provenance(files, payload, origin), indent=1) + "\n"
        (out / f"pyshim-{__version__}.intoto.json").write_text(statement)
        write_sums(out, {path.name: path for path in out.iterdir()})


def main(words: list[str]) -> int:
    if words[:1] == ["files"]:
        make_files(Path(words[1]), *words[2:])
        return 0
    verbs = {"payload": make_payload, "all": make_all}
    if len(words) != 2 or words[0] not in verbs:
        print(f"dist: say {' or '.join(verbs)}, and a directory", file=sys.stderr)
        return 2
    out = Path(words[1])
    aside = out.with_name(f"{out.name}~")
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
    try:
        verbs[words[0]](aside)
    except (OSError, ShimError, subprocess.CalledProcessError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        print(f"dist: {error}", file=sys.stderr)
        return 1
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)
    for path in sorted(out.iterdir()):
        size = sum(each.stat().st_size for each in (path.rglob("*") if path.is_dir() else (path,)) if each.is_file())
        print(f"{size:>12,}  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
