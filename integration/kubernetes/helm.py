"""Helm, built once by the Go client from the module proxy: `python -m integration.kubernetes.helm`.

Tests of the chart take it from here or from PATH, and are skipped without it.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

from integration.framework.releases import run_go

VERSION = "v3.19.0"
CHART = Path(__file__).resolve().parents[2] / "configs" / "helm" / "pyshim"
_CACHE = Path(__file__).resolve().parents[2] / ".build" / "cache" / "helm"
_BUILT = _CACHE / VERSION / "helm"


def find() -> str | None:
    """The program."""
    return str(_BUILT) if _BUILT.exists() else shutil.which("helm")


def build() -> None:
    """The program is there. Raises OSError saying what failed."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _BUILT.exists():
            return
        work = _CACHE / f".{VERSION}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        print(f"==> building helm {VERSION} (some minutes, once)", flush=True)
        run_go(work, "mod", "init", "pyshim.test/helm")
        run_go(work, "get", f"helm.sh/helm/v3/cmd/helm@{VERSION}")
        run_go(work, "build", "-trimpath", "-ldflags", "-s -w", "-o", "bin/", "helm.sh/helm/v3/cmd/helm")
        _BUILT.parent.mkdir(exist_ok=True)
        (work / "bin" / "helm").rename(_BUILT)
        shutil.rmtree(work)


def template(program: str, *words: str) -> str:
    """What `helm template` renders of the chart. Raises CalledProcessError, whose stderr says why not."""
    # A helm that was built without its Makefile takes 1.20 for the version of a cluster that it does not ask.
    usual = ["--kube-version=1.34.0", "--set=image.repository=registry.test/pyshim"]
    command = [program, "template", "pyshim", str(CHART), *usual, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    try:
        build()
    except OSError as error:
        sys.exit(f"helm: {error}")
