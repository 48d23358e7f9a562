"""An archive on small stand-ins for guest and wheels: its bytes, its lists, and which archives a node refuses."""

from __future__ import annotations

import ast
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyshim import PYTHONS, __version__
from pyshim.model.errors import FailedPrecondition
from scripts import dist
from scripts.dist import Origin

ROOT = Path(__file__).resolve().parents[3]
ORIGIN = Origin(commit="c0ffee" * 6 + "c0ff", epoch_s=1_700_000_000)
NAME = f"pyshim-{__version__}-linux-{platform.machine()}"
WHEELS = ("pip-26.3-py3-none-any.whl", "msgspec-0.22.0-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl")
_GUEST_BILL = {
    "spdxVersion": "SPDX-2.3",
    "SPDXID": "SPDXRef-DOCUMENT",
    "packages": [{"SPDXID": "SPDXRef-guest", "name": "pyshim-guest"}, {"SPDXID": "SPDXRef-crun", "name": "crun"}],
    "relationships": [
        {"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": "SPDXRef-guest"},
        {"spdxElementId": "SPDXRef-guest", "relationshipType": "CONTAINS", "relatedSpdxElement": "SPDXRef-crun"},
    ],
}
_PIP = """\
import os, pathlib, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib"))
for name in ("pip", "pyshim"):
    (site / name).mkdir(exist_ok=True)
(site / "pip" / "__main__.py").write_text("")
(site / "pyshim" / "__main__.py").write_text(os.environ["STAND_IN"])
"""
"""A pip that installs a stand-in of itself and of pyshim."""


def made_payload(ground: Path) -> Path:
    """A payload of stand-ins, whose files have the time and, before the payload, the mode of this moment."""
    guest, wheels = ground / "guest", ground / "wheels"
    guest.mkdir(parents=True)
    wheels.mkdir()
    for name in ("vmlinux", "initrd.img", "rootfs.img", "relay", "manifest.json"):
        (guest / name).write_text(f"{name}\n")
    (guest / "sbom.spdx.json").write_text(json.dumps(_GUEST_BILL))
    for name in WHEELS:
        with zipfile.ZipFile(wheels / name, "w") as wheel:
            wheel.writestr(zipfile.ZipInfo("pip/__main__.py"), _PIP)
    wheel_of_ours = ground / f"pyshim-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel_of_ours, "w") as wheel:
        wheel.writestr(zipfile.ZipInfo("stand-in"), "")
    out = ground / "payload"
    dist.lay_out(out, source=ROOT, guest=guest, wheels=wheels, wheel=wheel_of_ours, origin=ORIGIN)
    return out


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ground = tmp_path_factory.mktemp("dist")
    packed = ground / f"{NAME}.tar.gz"
    dist.write_tar(packed, made_payload(ground), NAME, ORIGIN.epoch_s)
    return packed


@pytest.fixture
def unpacked(archive: Path, tmp_path: Path) -> Path:
    subprocess.run(["tar", "-xzf", archive, "-C", tmp_path], check=True)
    return tmp_path / NAME


def run_install(unpacked: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`install WORDS` as a shell of a node's runs it."""
    command = [sys.executable, "-I", str(unpacked / "install"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_the_same_files_give_the_same_bytes(archive: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        again = tmp_path / "again.tar.gz"
        dist.write_tar(again, made_payload(tmp_path), NAME, ORIGIN.epoch_s)
    finally:
        os.umask(before)

    assert again.read_bytes() == archive.read_bytes()


def test_an_archive_is_what_a_node_of_any_distribution_needs(archive: Path) -> None:
    with tarfile.open(archive) as found:
        items = {item.name.removeprefix(f"{NAME}/"): item for item in found.getmembers()}
        release = json.load(found.extractfile(f"{NAME}/release.json") or io.BytesIO())

    assert {"README", "LICENSE", "CHANGELOG.md", "SHA256SUMS", "requirements.lock", "pyshim.1"} < items.keys()
    assert {
        f"guest/{name}" for name in ("vmlinux", "initrd.img", "rootfs.img", "relay", "sbom.spdx.json")
    } < items.keys()
    assert {"configs/systemd/pyshim-zygote.service", "configs/configuration-qemu.toml"} < items.keys()
    assert "configs/helm/pyshim/Chart.yaml" in items
    assert {f"wheels/{name}" for name in WHEELS} < items.keys()
    assert items["install"].mode == 0o755
    assert {(item.mtime, item.uid, item.uname) for item in items.values()} == {(ORIGIN.epoch_s, 0, "")}
    assert release == {
        "version": __version__,
        "commit": ORIGIN.commit,
        "machine": platform.machine(),
        "pythons": list(PYTHONS),
        "glibc": "2.17",
    }


def test_a_whole_archive_is_taken(unpacked: Path) -> None:
    done = run_install(unpacked, "--check")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"pyshim {__version__}: the archive is whole, and this node can install it\n"
    checked = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=unpacked, check=False)
    assert checked.returncode == 0


def test_an_older_python_can_read_install_and_so_refuse_itself() -> None:
    ast.parse((ROOT / "scripts" / "install.py").read_text(), feature_version=(3, 7))


def _changed_release(**values: Any) -> Callable[[Path], None]:
    def change(unpacked: Path) -> None:
        path = unpacked / "release.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def _linked(unpacked: Path) -> None:
    (unpacked / "LICENSE").rename(unpacked.parent / "LICENSE")
    (unpacked / "LICENSE").symlink_to("../LICENSE")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut file": (lambda top: os.truncate(top / "guest/vmlinux", 3), "'guest/vmlinux' was cut or altered"),
    "altered file": (lambda top: (top / "guest/relay").write_text("RELAY\n"), "'guest/relay' was cut or altered"),
    "lost file": (lambda top: (top / "requirements.lock").unlink(), "'requirements.lock' is missing"),
    "lost directory": (lambda top: shutil.rmtree(top / "guest"), "'guest/initrd.img' is missing"),
    "added file": (
        lambda top: (top / "wheels/evil-1-py3-none-any.whl").touch(),
        "evil-1-py3-none-any.whl' is not of",
    ),
    "link": (_linked, "'LICENSE' was cut or altered"),
    "lost list": (lambda top: (top / "SHA256SUMS").unlink(), "SHA256SUMS': [Errno 2]"),
    "cut list": (lambda top: os.truncate(top / "SHA256SUMS", 70), "is not of the archive"),
    "list of nonsense": (lambda top: (top / "SHA256SUMS").write_bytes(b"\xff\n"), "SHA256SUMS': 'utf-8' codec"),
    "no release": (lambda top: (top / "release.json").unlink(), "release.json': [Errno 2]"),
    "cut release": (lambda top: os.truncate(top / "release.json", 9), "release.json': "),
    "release of nonsense": (lambda top: (top / "release.json").write_text("[]"), "there is no glibc, machine"),
    "other Python": (_changed_release(pythons=["3.9"]), "the archive has packages for 3.9 (hint: PYTHON"),
    "other processor": (
        _changed_release(machine="s390x"),
        "the archive is for s390x",
    ),
    "later C library": (_changed_release(glibc="2.999"), "the archive needs glibc 2.999 or later"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_archive_that_does_not_fit_is_refused_by_name(damage: str, unpacked: Path) -> None:
    change, said = DAMAGES[damage]
    change(unpacked)

    done = run_install(unpacked, "--restart")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("install: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_cut_archive_cannot_be_unpacked(archive: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes()[:-20])

    assert subprocess.run(["tar", "-xzf", cut, "-C", tmp_path], capture_output=True, check=False).returncode != 0


def test_install_runs_the_archives_pyshim_with_its_parts_and_options(unpacked: Path) -> None:
    said = "import sys; print(sys.prefix); print(sys.argv[1:]); sys.exit(3)"

    done = run_install(unpacked, "--restart", "--handler", "pykata", STAND_IN=said)

    wheel = f"{unpacked}/pyshim-{__version__}-py3-none-any.whl"
    parts = ["--wheel", wheel, "--wheels", f"{unpacked}/wheels", "--lock", f"{unpacked}/requirements.lock"]
    words = ["install", *parts, "--guest", f"{unpacked}/guest", "--restart", "--handler", "pykata"]
    stage, printed = done.stdout.splitlines()
    assert (done.returncode, printed, done.stderr) == (3, str(words), "")
    assert not Path(stage).exists()


def test_a_failing_pip_is_named_with_what_it_said(unpacked: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", unpacked / "install"],
        env={name: text for name, text in os.environ.items() if name != "STAND_IN"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.startswith("install: run '")
    assert "KeyError: 'STAND_IN'" in done.stderr
    stage = re.search(r"/\S+/pyshim-install-[^/]+", done.stderr)
    assert stage
    assert not Path(stage[0]).exists()


@pytest.mark.root
def test_a_full_disk_is_refused_with_its_room(unpacked: Path) -> None:
    small = f"mount -t tmpfs -o size=8m full /var/lib && exec {sys.executable} -I {unpacked}/install --restart"

    done = subprocess.run(["unshare", "--mount", "sh", "-c", small], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (1, "install: '/var/lib' has 8 MiB free, 120 are needed\n")


def test_sigterm_reaches_pyshim_which_undoes_its_work_before_install_ends(unpacked: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    undo = f"signal.signal(signal.SIGTERM, lambda *_: (open({str(fifo)!r}, 'w').write('undone'), sys.exit(7)))"
    stand_in = f"import signal, sys\n{undo}\nopen({str(fifo)!r}, 'w').write('begun')\nsignal.pause()"
    command = [sys.executable, "-I", str(unpacked / "install")]

    with subprocess.Popen(command, env={**os.environ, "STAND_IN": stand_in}) as install:
        assert fifo.read_text() == "begun"
        install.terminate()
        assert fifo.read_text() == "undone"

    assert install.returncode == 7


@pytest.mark.parametrize(
    ("wheel", "minor"),
    [
        ("a-1-py3-none-any.whl", 0),
        ("a-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl", 17),
        ("a-1-cp311-abi3-manylinux_2_34_x86_64.whl", 34),
        ("a-1-cp311-cp311-manylinux1_x86_64.manylinux_2_5_x86_64.whl", 5),
        ("a-1-cp36-abi3-manylinux2010_x86_64.whl", 12),
    ],
)
def test_the_c_library_that_a_wheel_needs_is_in_its_name(wheel: str, minor: int) -> None:
    assert dist.glibc_minor(wheel) == minor


def test_the_bill_of_materials_has_every_wheel_and_the_guests_packages(archive: Path) -> None:
    with tarfile.open(archive) as found:
        bill = json.load(found.extractfile(f"{NAME}/sbom.spdx.json") or io.BytesIO())
    ids = [each["SPDXID"] for each in bill["packages"]]
    related = {
        (each["spdxElementId"], each["relationshipType"], each["relatedSpdxElement"]) for each in bill["relationships"]
    }

    assert [each["name"] for each in bill["packages"]] == ["pyshim", "msgspec", "pip", "pyshim-guest", "crun"]
    assert len(set(ids)) == len(ids)
    assert ("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-pyshim") in related
    assert ("SPDXRef-pyshim", "CONTAINS", "SPDXRef-guest") in related
    assert ("SPDXRef-guest", "CONTAINS", "SPDXRef-crun") in related
    assert {each for relation in related for each in relation[::2]} - {"SPDXRef-DOCUMENT"} == set(ids)
    assert bill["creationInfo"]["created"] == "2023-11-14T22:13:20Z"


def test_the_statement_names_each_file_and_input_by_digest(archive: Path, unpacked: Path) -> None:
    statement = dist.provenance({archive.name: archive}, unpacked, ORIGIN)

    digest = subprocess.run(["sha256sum", archive], check=True, capture_output=True, text=True).stdout.split()[0]
    assert statement["subject"] == [{"name": archive.name, "digest": {"sha256": digest}}]
    inputs = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert inputs[0] == {"name": "commit", "digest": {"gitCommit": ORIGIN.commit}}
    assert [each["name"] for each in inputs[1:]] == [
        "guest/manifest.json",
        *(f"wheels/{name}" for name in sorted(WHEELS)),
    ]


def test_the_chart_is_packed_as_helm_packs_it_and_as_an_oci_artifact(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        dist.write_chart(tmp_path / name, ROOT, ORIGIN.epoch_s)
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    (packed,) = tmp_path.glob("one/*.tgz")
    (layout,) = tmp_path.glob("one/*.oci.tar")

    assert one == two
    with tarfile.open(packed) as chart:
        assert "pyshim/Chart.yaml" in chart.getnames()
    with tarfile.open(layout) as oci:

        def blob(item: dict[str, Any]) -> bytes:
            found = oci.extractfile("blobs/sha256/" + item["digest"].removeprefix("sha256:"))
            assert found
            return found.read()

        index = json.load(oci.extractfile("index.json") or io.BytesIO())
        manifest = json.loads(blob(index["manifests"][0]))
        assert json.loads(blob(manifest["config"]))["name"] == "pyshim"
        assert blob(manifest["layers"][0]) == packed.read_bytes()
    assert manifest["layers"][0]["mediaType"] == "application/vnd.cncf.helm.chart.content.v1.tar+gzip"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    top = tmp_path / "repository"
    top.mkdir()
    (top / "file").write_text("one\n")
    git = ["git", "-C", str(top), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    environment = {**os.environ, "GIT_COMMITTER_DATE": "2023-11-14T22:13:20Z"}
    subprocess.run([*git, "commit", "-qm", "one"], check=True, env=environment)
    return top


def test_a_release_is_made_of_a_commit_only(repository: Path, tmp_path: Path) -> None:
    origin = dist.origin_of(repository)
    dist.export(repository, origin.commit, tmp_path / "out")
    (repository / "file").write_text("two\n")

    assert origin.epoch_s == ORIGIN.epoch_s
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]
    assert (tmp_path / "out" / "file").stat().st_mtime == ORIGIN.epoch_s
    with pytest.raises(FailedPrecondition, match="1 files differ from the commit: file"):
        dist.origin_of(repository)


@pytest.mark.slow
@pytest.mark.parametrize("name", dist.LIBRARIES)
def test_a_library_is_a_package_whose_readme_runs_without_pyshim(name: str, tmp_path: Path) -> None:
    source = Path(shutil.copytree(ROOT / "packages" / name, tmp_path / "source"))  # with the files behind the link
    sdist, wheel = dist.build_python(source, tmp_path, ORIGIN.epoch_s)
    readme = (ROOT / "packages" / name / "README.md").read_text()
    example = tmp_path / "example.py"
    example.write_text(readme.partition("```python\n")[2].partition("```")[0])
    (tmp_path / "vendor.json").write_text(
        '{"cdiVersion": "0.6.0", "kind": "vendor.example/gpu", "devices": [{"name": "0", "containerEdits":'
        ' {"env": ["GPU=0"]}}]}'
    )
    example.write_text(example.read_text().replace("/etc/cdi", str(tmp_path)))
    libraries = [each for each in sys.path if each.endswith("site-packages")]
    program = f"import runpy, sys; sys.path[:0] = {[str(wheel), *libraries]}; runpy.run_path({str(example)!r})"

    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == {"ttrpc": "b'value of key'\n", "cdi": "{'process': {'env': ['GPU=0']}}\n"}[name]
    with tarfile.open(sdist) as packed:
        assert any(member.endswith(f"/src/{name}/py.typed") for member in packed.getnames())
