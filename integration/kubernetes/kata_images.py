"""What Kata's suites need of the outside: `KATA=/path/kata-containers python -m integration.kubernetes.kata_images`.

Go builds kubectl, agnhost and the yq that the suite asks for, and debootstrap a tree of Debian's packages. In the
enclosure images under the suite's names are made of that tree and of busybox.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from integration.framework.images import Blobs, image_blobs, layer, payload_layers
from integration.framework.releases import PROJECT, go_build, one_build, run_go

from . import peers

CHOICE = "KATA"
"""The environment variable with the directory of a checkout of Kata."""
SUITE = Path("tests", "integration", "kubernetes")
STAND_INS = Path("/run/pyshim-integration/kata/bin")
"""Programs that commands on the node find first."""
_CACHE = PROJECT / ".build" / "cache" / "kata-suites"
_TREE = _CACHE / "debian.tar"
_PACKAGES = (
    *("curl", "e2fsprogs", "easy-rsa", "inotify-tools", "iproute2", "iptables", "net-tools", "nginx-light", "openvpn"),
    *("procps", "stress"),
)
_LEFT_OUT = ("dev", "var/cache/apt", "var/lib/apt", "usr/share/doc", "usr/share/locale")
_YQ = "github.com/mikefarah/yq/v4"
# The script of Kata that fetches yq does nothing where this version is.
_YQ_VERSION = re.compile(r"yq_version=(v4\S+)")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_DEBIAN = {
    "kata-containers/alpine": ["sh"],
    "kata-containers/alpine-bash-curl": ["bash"],
    "kata-containers/fsnotify": ["bash"],
    "kata-containers/nginx": ["nginx", "-g", "daemon off;"],
    "kata-containers/sysbench-kata": ["bash"],
    "libpod/ubuntu": ["bash"],
}
"""Repository and command of each image that is Debian's tree."""
# The distribution's busybox lacks it.
_PRINTENV = """\
#!/bin/sh
[ $# -gt 0 ] || exec env
eval "printf '%s\\n' \"\\${$1}\""
"""
# Of a sidecar's set-up: all TCP goes through two ports of the pod. It prints the tables, as istio's does.
_REDIRECTS = """\
#!/bin/sh
set -e
for family in iptables ip6tables; do
    $family-restore <<EOT
*nat
-A OUTPUT -p tcp -j REDIRECT --to-ports 15001
-A PREROUTING -p tcp -j REDIRECT --to-ports 15006
COMMIT
EOT
    $family-save -t nat
done
"""


def checkout() -> Path:
    """Kata's directory. Raises FileNotFoundError when it has no suite."""
    named = os.environ.get(CHOICE, "")
    directory = Path(named).absolute()
    if not named or not (directory / SUITE).is_dir():
        raise FileNotFoundError(
            f"find Kata's suite: no '{directory / SUITE}' (hint: {CHOICE}=DIRECTORY of a checkout of kata-containers, "
            "not below /run or /tmp)"
        )
    return directory


def go_path(kata: Path) -> Path:
    """The directory whose `bin` has the suite's yq. Raises ValueError when the suite does not say which."""
    found = _YQ_VERSION.search((kata / "ci" / "install_yq.sh").read_text())
    if found is None:
        raise ValueError(f"find the version of yq: none in '{kata}/ci/install_yq.sh'")
    return _CACHE / f"yq-{found[1]}"


def build() -> None:
    """All of it is in the cache. Raises OSError, ValueError, CalledProcessError."""
    yq = go_path(checkout())
    peers.build(peers.CLIENTS, peers.CLIENT_NAMES)
    with go_build(yq / "bin", "yq", "a minute") as work:
        if work is not None:
            run_go(work, "mod", "init", "pyshim.test/yq")
            run_go(work, "get", f"{_YQ}@{yq.name.removeprefix('yq-')}")
            run_go(work, "build", "-trimpath", "-o", "bin/yq", _YQ)
    with one_build(_CACHE):
        if not _TREE.exists():
            print("==> making a tree of Debian's packages (some minutes, once)", flush=True)
            _make_tree()


def _make_tree() -> None:
    tree, archive = _CACHE / "debian", _TREE.with_suffix(".new")
    shutil.rmtree(tree, ignore_errors=True)
    include = f"--include={','.join(_PACKAGES)}"
    subprocess.run(
        ["debootstrap", "--variant=minbase", include, "bookworm", tree], check=True, stdout=subprocess.DEVNULL
    )
    left_out = [f"--exclude=./{name}/*" for name in _LEFT_OUT]
    subprocess.run(["tar", "-C", tree, *left_out, "-cf", archive, "."], check=True)
    archive.rename(_TREE)
    shutil.rmtree(tree)


@dataclass(slots=True)
class Images:
    """Manifests by repository, and every blob by digest."""

    manifests: dict[str, str] = field(default_factory=dict)
    blobs: Blobs = field(default_factory=dict)

    def add(self, repository: str, layers: tuple[bytes, ...], *command: str, path: str = _PATH) -> None:
        settings = {"Cmd": list(command), "Env": [f"PATH={path}"], "Labels": {"image": repository}}
        digest, blobs = image_blobs(layers, settings)
        self.blobs |= blobs
        self.manifests[repository] = digest

    def digest(self, repository: str, reference: str) -> str | None:
        """Of the manifest; an image has one, whatever tag it is asked for by."""
        return reference if reference in self.blobs else self.manifests.get(repository)


def images() -> Images:
    """The suite's images that can be made here. A registry answers that it has no other."""
    made = Images()
    busybox = (*payload_layers(), layer({"bin/printenv": _PRINTENV.encode()}, mode=0o755))
    for name in ("prometheus/busybox", "library/busybox"):
        made.add(name, busybox, "sh")
    # That of the pod in which the suite's commands on the node run, after a chroot.
    made.add("bedrock/ubuntu", busybox, "sh", path=f"{STAND_INS}:{_PATH}")
    agnhost = layer({"agnhost": (peers.CLIENTS / "agnhost").read_bytes()}, mode=0o755)
    made.add("e2e-test-images/agnhost", (*busybox, agnhost), "/agnhost")
    # Nothing in it, as in the suite's, whose point is that no program is there.
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    made.add("kata-containers/no-layer-image", (empty.getvalue(),))
    debian = (_TREE.read_bytes(),)
    for name, command in _DEBIAN.items():
        made.add(name, debian, *command)
    redirects = layer({"usr/bin/istio-iptables": _REDIRECTS.encode()}, mode=0o755)
    made.add("kata-containers/istio/proxyv2", (*debian, redirects), "istio-iptables")
    return made


if __name__ == "__main__":
    try:
        build()
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"kata_images: {error}")
