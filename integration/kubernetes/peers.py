"""The programs of a cluster, built once by the Go client from the module proxy; etcd is the distribution's.

`python -m integration.kubernetes.peers` builds them, outside the enclosure, which has no network. The tests of this
directory are collected where KUBELET is set, which `make peers WHAT=kubelet` does.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from integration.framework.releases import go_build, run_go

VERSION = os.environ.get("KUBERNETES", "v1.34.4")
MINOR = int(VERSION.split(".")[1])
GATES = dict.fromkeys(("ContainerStopSignals", *(["ImageVolume"] if MINOR < 35 else [])), True)
"""Of the API server and the kubelet: what a release of this minor number has, and not by default."""
_STAGING = VERSION.replace("v1.", "v0.", 1)
"""The version under which the modules that kubernetes keeps in its own tree are published."""
PROGRAMS = Path(__file__).resolve().parents[2] / ".build" / "cache" / "kubernetes" / VERSION
NAMES = ("kubelet", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
CLIENTS = PROGRAMS.with_name(f"{VERSION}-clients")
CLIENT_NAMES = ("kubectl", "kube-proxy", "agnhost")
"""What a suite of tests needs besides, in CLIENTS."""
_PACKAGES = {"agnhost": "k8s.io/kubernetes/test/images/agnhost"}
"""Those that are not below cmd."""
_TOOLS = """\
//go:build tools

package tools

import (
{imports}
)
"""
_STAGED = re.compile(r"^\s*(k8s\.io/\S+) => \./staging/", re.MULTILINE)


def are_chosen() -> bool:
    return bool(os.environ.get("KUBELET"))


def build(programs: Path = PROGRAMS, names: Sequence[str] = NAMES) -> None:
    """The programs of these names are in the directory `programs`. Raises OSError saying what failed.

    The go.mod of kubernetes replaces some thirty modules by directories of its own tree. A module that requires
    kubernetes has to replace them by their published versions.
    """
    with go_build(programs, f"{' and '.join(names)} {VERSION}", "up to a quarter of an hour") as work:
        if work is None:
            return
        packages = [_PACKAGES.get(name, f"k8s.io/kubernetes/cmd/{name}") for name in names]
        found = json.loads(run_go(work, "mod", "download", "-json", f"k8s.io/kubernetes@{VERSION}"))
        theirs = Path(found["GoMod"]).read_text()
        staged = "\n".join(f"\t{name} => {name} {_STAGING}" for name in _STAGED.findall(theirs))
        go_line = re.findall(r"^go .*$", theirs, re.MULTILINE)[0]
        (work / "go.mod").write_text(
            f"module pyshim.test/kubernetes\n\n{go_line}\n\nrequire k8s.io/kubernetes {VERSION}\n\n"
            f"replace (\n{staged}\n)\n"
        )
        (work / "tools.go").write_text(_TOOLS.format(imports="\n".join(f'\t_ "{package}"' for package in packages)))
        run_go(work, "mod", "tidy", "-e")
        major, minor = VERSION[1:].split(".")[:2]
        stamp = {"gitVersion": VERSION, "gitMajor": major, "gitMinor": minor}
        flags = " ".join(f"-X k8s.io/component-base/version.{key}={value}" for key, value in stamp.items())
        run_go(work, "build", "-trimpath", "-ldflags", f"-s -w {flags}", "-o", "bin/", *packages)


if __name__ == "__main__":
    try:
        build()
    except OSError as error:
        sys.exit(f"peers: {error}")
