"""The chart's image, built by configs/helm/Dockerfile: `python -m integration.kubernetes.image`, as root.

buildah builds it. No registry is asked: the base images are Debian's packages (debootstrap), under the names that the
Dockerfile has. Of the second image only the guest's relay differs, so that an upgrade has something to bring.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from integration.framework.releases import PROJECT, one_build

REPOSITORY = "docker.io/local/pyshim"
FIRST, SECOND = "first", "second"
DOCKERFILE = PROJECT / "configs" / "helm" / "Dockerfile"
_CACHE = PROJECT / ".build" / "cache" / "chart-image"
_BASES = ("docker.io/library/debian:12", "docker.io/library/debian:12-slim")
_PAYLOAD = "/opt/pyshim-image/payload"
_UNUSED = ("integration", "tests", "docs", "bench")
"""Of a checkout: what no image is made of."""


def archive(tag: str) -> Path:
    """The image as `ctr images import` takes it."""
    return _CACHE / f"{tag}.tar"


def build() -> None:
    """Both archives are of this checkout's files. Raises CalledProcessError, OSError."""
    with one_build(_CACHE):
        files = _tracked()
        inputs = [*files, str(Path(__file__).relative_to(PROJECT))]
        wanted = sha256(b"".join(map(_digest, inputs))).hexdigest()
        mark = _CACHE / ".complete"
        if mark.exists() and mark.read_text() == wanted:
            return
        mark.unlink(missing_ok=True)
        print("==> building the chart's image with configs/helm/Dockerfile (some minutes)", flush=True)
        _make_base()
        _build(files)
        _change(FIRST, SECOND)
        for tag in (FIRST, SECOND):
            archive(tag).unlink(missing_ok=True)
            _buildah("push", "--quiet", f"{REPOSITORY}:{tag}", f"docker-archive:{archive(tag)}:{REPOSITORY}:{tag}")
        mark.write_text(wanted)


def _tracked() -> list[str]:
    """The files of a clone, without those that no image has any use for and without links to directories."""
    command = ["git", "ls-files", "-z", "--", ".", *(f":!{name}" for name in _UNUSED)]
    found = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    return [name for name in found.split("\0") if name and (PROJECT / name).is_file()]


def _digest(name: str) -> bytes:
    return sha256(f"{name}\n".encode() + (PROJECT / name).read_bytes()).digest()


def _make_base() -> None:
    if _BASES[0] in _buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
        return
    tree = _CACHE / "debian"
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", tree], check=True, stdout=subprocess.DEVNULL)
    made = _buildah("from", "scratch").strip()
    _buildah("add", "--quiet", made, str(tree), "/")
    _buildah("commit", "--quiet", "--rm", made, _BASES[0])
    _buildah("tag", *_BASES)
    shutil.rmtree(tree)


def _build(files: list[str]) -> None:
    context = _CACHE / "context"
    shutil.rmtree(context, ignore_errors=True)
    for name in files:
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PROJECT / name, context / name)
    words = ["--pull=never", "--network=host", "--layers", "--file", str(DOCKERFILE)]
    if authority := os.environ.get("PIP_CERT"):  # of this machine's way to the package index
        words += [f"--volume={authority}:/etc/authority.crt:ro", "--env=PIP_CERT=/etc/authority.crt"]
    _buildah("build", *words, "--tag", f"{REPOSITORY}:{FIRST}", str(context))
    shutil.rmtree(context)


def _change(source: str, target: str) -> None:
    made = _buildah("from", "--pull=never", f"{REPOSITORY}:{source}").strip()
    changed = _CACHE / "relay"
    changed.write_bytes((PROJECT / ".build" / "guest" / "relay").read_bytes() + b"\0")
    changed.chmod(0o755)
    _buildah("copy", "--quiet", made, str(changed), f"{_PAYLOAD}/guest/relay")
    listed = 'new=$(sha256sum guest/relay) && sed -i "s|.*  guest/relay$|$new|" SHA256SUMS'
    _buildah("run", made, "--", "sh", "-c", f"cd {_PAYLOAD} && {listed}")
    _buildah("commit", "--quiet", "--rm", made, f"{REPOSITORY}:{target}")
    changed.unlink()


def _buildah(*words: str) -> str:
    """What `buildah WORDS` printed; its messages go to a file beside the images, its mounts end with it."""
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
    command = [
        "unshare",
        "--mount",
        "buildah",
        "--root",
        str(_CACHE / "store"),
        "--runroot",
        str(_CACHE / "run"),
        *words,
    ]
    with (_CACHE / "log").open("ab") as log:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    try:
        build()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"image: {error} (hint: {_CACHE}/log)")
