"""critest, built once by the Go client from the module proxy: `python -m integration.conformance.critest`."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

from integration.conformance.suite import Spec, Suite
from integration.framework.releases import PROJECT, go_build, run_go

VERSION = "v1.37.0"
_PACKAGE = "sigs.k8s.io/cri-tools/cmd/critest"
PROGRAMS = PROJECT / ".build" / "cache" / "critest" / VERSION
_REPORT = "junit.xml"


def build() -> None:
    """The program is there. Raises OSError saying what failed. It is the test program of its package."""
    with go_build(PROGRAMS, f"critest {VERSION}", "some minutes") as work:
        if work is None:
            return
        run_go(work, "mod", "init", "pyshim.test/critest")
        run_go(work, "get", "-t", f"{_PACKAGE}@{VERSION}")
        run_go(work, "test", "-c", "-trimpath", "-o", "bin/critest", _PACKAGE)


def _command(reports: Path, socket: str, handler: str, focus: str, within: str) -> list[str]:
    options = {
        "runtime-endpoint": socket,
        "runtime-handler": handler,
        "ginkgo.junit-report": str(reports / _REPORT),
        "ginkgo.no-color": "true",
        "ginkgo.timeout": within,
        "test.timeout": "0",
        **({"ginkgo.focus": focus} if focus else {}),
    }
    return [str(PROGRAMS / "critest"), *(f"-{name}={value}" for name, value in options.items())]


def _read(reports: Path) -> list[Spec]:
    """Raises FileNotFoundError when critest has written no JUnit report: its log is beside it."""
    cases = ElementTree.parse(reports / _REPORT).iter("testcase")
    return [
        Spec(name=name, status=case.get("status", ""), reason=_reason(case), listed_as=(_leaf(name),))
        for case in cases
        if (name := case.get("name", "")).startswith("[It]")
    ]


def _reason(case: ElementTree.Element) -> str:
    failure = case.find("failure")
    lines = [] if failure is None else (failure.get("message") or failure.text or "").strip().splitlines()
    return lines[0][:300] if lines else ""


def _leaf(name: str) -> str:
    """The end of the name, without labels."""
    return (
        name.removeprefix("[It] ")
        .removeprefix("[k8s.io] ")
        .partition(" [Conformance]")[0]
        .rpartition("runtime should ")[2]
        .strip()
    )


SUITE = Suite(name=f"critest {VERSION}", run_on=_command, prepare=lambda: None, read=_read)

if __name__ == "__main__":
    try:
        build()
    except OSError as error:
        sys.exit(f"critest: {error}")
