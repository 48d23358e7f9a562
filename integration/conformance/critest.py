"""critest, built once by the Go client from the module proxy: `python -m integration.conformance.critest`."""

from __future__ import annotations

import sys

from integration.framework.releases import PROJECT, go_build, run_go

VERSION = "v1.36.0"
_PACKAGE = "sigs.k8s.io/cri-tools/cmd/critest"
PROGRAMS = PROJECT / ".build" / "cache" / "critest" / VERSION
PROGRAM = PROGRAMS / "critest"


def build() -> None:
    """The program is there. Raises OSError saying what failed. It is the test program of its package."""
    with go_build(PROGRAMS, f"critest {VERSION}", "some minutes") as work:
        if work is None:
            return
        run_go(work, "mod", "init", "pyshim.test/critest")
        run_go(work, "get", "-t", f"{_PACKAGE}@{VERSION}")
        run_go(work, "test", "-c", "-trimpath", "-o", "bin/critest", _PACKAGE)


if __name__ == "__main__":
    try:
        build()
    except OSError as error:
        sys.exit(f"critest: {error}")
