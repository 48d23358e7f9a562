"""Helm, built once by the Go client from the module proxy: `python -m integration.kubernetes.helm`.

Tests of the chart take it from here or from PATH, and are skipped without it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from integration.framework.releases import go_build, run_go

VERSION = "v3.19.0"
CHART = Path(__file__).resolve().parents[2] / "configs" / "helm" / "pyshim"
_BUILT = Path(__file__).resolve().parents[2] / ".build" / "cache" / "helm" / VERSION / "helm"


def find() -> str | None:
    """The program."""
    return str(_BUILT) if _BUILT.exists() else shutil.which("helm")


def build() -> None:
    """The program is there. Raises OSError saying what failed."""
    with go_build(_BUILT.parent, f"helm {VERSION}", "some minutes") as work:
        if work is None:
            return
        run_go(work, "mod", "init", "pyshim.test/helm")
        run_go(work, "get", f"helm.sh/helm/v3/cmd/helm@{VERSION}")
        run_go(work, "build", "-trimpath", "-ldflags", "-s -w", "-o", "bin/", "helm.sh/helm/v3/cmd/helm")


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
