"""`python -m integration.conformance [--handler NAME]... [--focus TEXT]`, within the enclosure: critest, and a table.

With CRI=crio on CRI-O. Reports and its log go to `.build/conformance`. The exit status is 1 when pyshim fails a
spec that runc passes and docs/KUBERNETES.md does not list.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from integration.conformance import critest
from integration.conformance.suite_images import suite_images
from integration.framework import crio, releases
from integration.framework.cri import HANDLER, Cri
from integration.framework.cri_session import GROUND, RUNC_HANDLER, cri_daemon, crio_daemon
from integration.framework.registry import serve

REPORTS = releases.PROJECT / ".build" / "conformance"
PAGE = releases.PROJECT / "docs" / "KUBERNETES.md"
_IMAGES_PLUGIN = "io.containerd.cri.v1.images"
REGISTRIES = ("registry.k8s.io", "k8s.gcr.io", "gcr.io", "us-central1-docker.pkg.dev")
"""Those that the suite names."""
_HOSTS = 'server = "{url}"\n[host."{url}"]\n  capabilities = ["pull", "resolve"]\n'


@dataclass(frozen=True, slots=True)
class Spec:
    """One spec of the suite: `status` is critest's, `reason` the first line of a failure."""

    name: str
    status: str
    reason: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.conformance")
    parser.add_argument("--handler", action="append", help=f"default: {RUNC_HANDLER} and {HANDLER}")
    parser.add_argument("--focus", default="", help="a regular expression: only specs whose names match")
    parser.add_argument("--within", default="4h", help="limit for each handler, as critest takes it; default: 4h")
    words = parser.parse_args()
    handlers = words.handler or [RUNC_HANDLER, HANDLER]
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    found = _run(handlers, {"ginkgo.timeout": words.within, **({"ginkgo.focus": words.focus} if words.focus else {})})
    for handler, specs in found.items():
        counts = Counter(spec.status for spec in specs)
        print(f"==> {handler}: " + ", ".join(f"{counts[status]} {status}" for status in sorted(counts)))
    passed = {spec.name for spec in found.get(RUNC_HANDLER, ()) if spec.status == "passed"}
    failed = [spec for spec in found.get(HANDLER, ()) if spec.status not in ("passed", "skipped")]
    page = PAGE.read_text()
    unlisted = [spec for spec in failed if spec.name in passed and leaf(spec) not in page]
    for spec in failed:
        beside = "runc passes" if spec.name in passed else "runc not"
        print(f"{spec.status} ({beside}{', not listed' if spec in unlisted else ''}): {spec.name}\n    {spec.reason}")
    return int(bool(unlisted))


def _run(handlers: list[str], options: Mapping[str, str]) -> dict[str, list[Spec]]:
    GROUND.mkdir(parents=True)
    images = suite_images(GROUND)
    with serve("127.0.0.1", images.blobs, images.digest) as registry, _daemon(registry.url) as cri:
        _map_ports()
        log = cri.daemon.directories.log
        try:
            socket = f"unix://{cri.daemon.directories.socket}"
            return {handler: _suite(handler, socket, options) for handler in handlers}
        finally:
            shutil.copyfile(log, REPORTS / log.name)


def _daemon(url: str) -> AbstractContextManager[Cri]:
    """The container runtime, which pulls the suite's images from the registry at `url`."""
    binaries = releases.PROJECT / "bin"
    if crio.is_chosen():
        return crio_daemon(binaries, dict.fromkeys(REGISTRIES, url.removeprefix("http://")))
    hosts = GROUND / "certs.d" / "_default"
    hosts.mkdir(parents=True)
    (hosts / "hosts.toml").write_text(_HOSTS.format(url=url))
    return cri_daemon(binaries, f'[plugins."{_IMAGES_PLUGIN}".registry]\n  config_path = "{hosts.parent}"\n')


def _map_ports() -> None:
    """The network of pods has host ports from now on: containerd reads its configuration again."""
    config = GROUND / "cni" / "net.d" / "10-pods.conflist"
    network = json.loads(config.read_text())
    network["plugins"].append({"type": "portmap", "capabilities": {"portMappings": True}})
    made = config.with_suffix(".new")
    made.write_text(json.dumps(network))
    made.replace(config)


def _suite(handler: str, socket: str, more: Mapping[str, str]) -> list[Spec]:
    """Every spec of the suite on the handler; `more` are critest's options."""
    print(f"==> critest {critest.VERSION} on {handler}", flush=True)
    report = REPORTS / handler
    report.mkdir()
    options = {
        "runtime-endpoint": socket,
        "runtime-handler": handler,
        "ginkgo.junit-report": str(report / "junit.xml"),
        "ginkgo.no-color": "true",
        "test.timeout": "0",
        **more,
    }
    command = [str(critest.PROGRAM), *(f"-{name}={value}" for name, value in options.items())]
    with (report / "critest.log").open("wb") as log:
        subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=report, check=False)
    return read_report(report / "junit.xml")


def read_report(file: Path) -> list[Spec]:
    """The specs of a JUnit report. Raises FileNotFoundError when critest has written none: its log is beside it."""
    cases = ElementTree.parse(file).iter("testcase")
    return [
        Spec(case.get("name", ""), case.get("status", ""), _reason(case))
        for case in cases
        if case.get("name", "").startswith("[It]")
    ]


def _reason(case: ElementTree.Element) -> str:
    failure = case.find("failure")
    lines = [] if failure is None else (failure.get("message") or failure.text or "").strip().splitlines()
    return lines[0][:300] if lines else ""


def leaf(spec: Spec) -> str:
    """The name as the page lists it: its end, without labels."""
    name = spec.name.removeprefix("[It] ").removeprefix("[k8s.io] ").partition(" [Conformance]")[0]
    return name.rpartition("runtime should ")[2].strip()


if __name__ == "__main__":
    sys.exit(main())
