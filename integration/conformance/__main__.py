"""`python -m integration.conformance [--suite NAME]... [--handler NAME]... [--focus TEXT]`, within the enclosure.

Each suite runs on each handler, and a table says what passes. With CRI=crio critest only, on CRI-O. Reports and logs go
to `.build/conformance`. The exit status is 1 when pyshim fails a spec that runc passes and the tables of
docs/CALLERS.md, in section Conformance or CRI-O, do not list.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace

import grpc

from integration import records
from integration.conformance import cri_integration, critest
from integration.conformance.suite import LOG, PAUSE, REGISTRY_PORT, Spec, Suite
from integration.conformance.suite_images import suite_images
from integration.framework import boots, crio, releases
from integration.framework.cri import HANDLER, Cri
from integration.framework.cri_session import GROUND, RUNC_HANDLER, cri_daemon, crio_daemon
from integration.framework.daemon import Daemon
from integration.framework.registry import serve

SUITES = {"critest": critest.SUITE, "cri-integration": cri_integration.SUITE}
REPORTS = releases.PROJECT / ".build" / "conformance"
PAGE = releases.PROJECT / "docs" / "CALLERS.md"
_IMAGES_PLUGIN = "io.containerd.cri.v1.images"
REGISTRIES = ("registry.k8s.io", "k8s.gcr.io", "gcr.io", "us-central1-docker.pkg.dev")
"""Those that critest names."""
_HOSTS = 'server = "{url}"\n[host."{url}"]\n  capabilities = ["pull", "resolve"]\n'
_DOWN_S = 3.0
"""A suite that ends containerd looks once a second whether it is gone, before it waits for the next one."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.conformance")
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all that the container runtime has")
    parser.add_argument("--handler", action="append", help=f"default: {RUNC_HANDLER} and {HANDLER}")
    parser.add_argument("--focus", default="", help="a regular expression: only specs whose names match")
    parser.add_argument("--within", default="4h", help="limit for each suite on each handler; default: 4h")
    parser.add_argument("--warm", action="store_true", help="VMs continue from a template in place of booting")
    words = parser.parse_args()
    names = words.suite or (["critest"] if crio.is_chosen() else list(SUITES))
    handlers = words.handler or [RUNC_HANDLER, HANDLER]
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    if words.warm:
        boots.Template(GROUND / "template").bind()
    found = _run(names, handlers, words.focus, words.within)
    listed = listed_specs(PAGE.read_text(), "CRI-O" if crio.is_chosen() else "Conformance")
    unlisted = [_compare(SUITES[name].name, found[name], listed) for name in names]
    if not words.focus:
        for name in names:
            _record(SUITES[name].name, found[name])
    return int(any(unlisted))


def listed_specs(page: str, section: str) -> frozenset[str]:
    """The names between backquotes in the first column of the section's tables; none without such a section."""
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return frozenset(name for cell in cells for name in cell.split("`")[1::2])


def _compare(suite: str, found: dict[str, list[Spec]], listed: frozenset[str]) -> bool:
    """Whether pyshim fails what runc passes and `listed` has not. Prints the table of the suite."""
    for handler, specs in found.items():
        counts = Counter(spec.status for spec in specs)
        print(f"==> {suite} on {handler}: " + ", ".join(f"{counts[status]} {status}" for status in sorted(counts)))
    if HANDLER not in found:
        return False
    passed = {spec.name: spec for spec in found.get(RUNC_HANDLER, ()) if spec.status == "passed"}
    ours = {spec.name: spec for spec in found[HANDLER]}
    missing = [replace(spec, status="missing") for name, spec in passed.items() if name not in ours]
    unlisted = False
    for spec in (*ours.values(), *missing):
        if spec.status in ("passed", "skipped"):
            continue
        beside = "runc passes" if spec.name in passed else "runc not"
        is_new = spec.name in passed and listed.isdisjoint(spec.listed_as)
        unlisted |= is_new
        print(f"{spec.status} ({beside}{', not listed' if is_new else ''}): {spec.name}\n    {spec.reason}")
    return unlisted


def _record(suite: str, found: dict[str, list[Spec]]) -> None:
    """A whole run with pyshim and with runc is in the README."""
    if not {HANDLER, RUNC_HANDLER} <= found.keys():
        return
    ran = [{spec.name for spec in found[name] if spec.status != "skipped"} for name in (HANDLER, RUNC_HANDLER)]
    passed = [sum(spec.status == "passed" for spec in found[name]) for name in (HANDLER, RUNC_HANDLER)]
    name, _, version = suite.rpartition(" ")
    sandboxer = ", Sandbox API" if releases.sandboxer() == "shim" else ""
    text = f"{version}: {passed[0]} of {len(ran[0])}, runc {passed[1]} of {len(ran[1])}"
    records.add(f"{name}{sandboxer}", text)


def _run(names: list[str], handlers: list[str], focus: str, within: str) -> dict[str, dict[str, list[Spec]]]:
    """What each suite says, by its name and by the handler."""
    found: dict[str, dict[str, list[Spec]]] = {}
    GROUND.mkdir(parents=True, exist_ok=True)
    images = suite_images(GROUND)
    with serve("127.0.0.1", images.blobs, images.digest, REGISTRY_PORT) as registry, _daemon(registry.url) as cri:
        _change_network()
        log = cri.daemon.directories.log
        try:
            for name in names:
                SUITES[name].prepare()
                found[name] = {handler: _suite(name, cri, handler, focus, within) for handler in handlers}
        finally:
            shutil.copyfile(log, REPORTS / log.name)
    return found


def _daemon(url: str) -> AbstractContextManager[Cri]:
    """The container runtime, which pulls the suites' images from the registry at `url`."""
    binaries = releases.PROJECT / "bin"
    if crio.is_chosen():
        return crio_daemon(binaries, dict.fromkeys(REGISTRIES, url.removeprefix("http://")))
    hosts = GROUND / "certs.d" / "_default"
    hosts.mkdir(parents=True)
    (hosts / "hosts.toml").write_text(_HOSTS.format(url=url))
    registry = f'[plugins."{_IMAGES_PLUGIN}".registry]\n  config_path = "{hosts.parent}"\n'
    more = registry + cri_integration.containerd_config()
    return cri_daemon(binaries, more, settings=cri_integration.CRI_SETTINGS, pause=PAUSE)


def _change_network() -> None:
    """The network of pods has host ports from now on, and its leases are in CNI's own directory, where a suite looks.

    containerd reads its configuration again.
    """
    config = GROUND / "cni" / "net.d" / "10-pods.conflist"
    network = json.loads(config.read_text())
    del network["plugins"][0]["ipam"]["dataDir"]
    network["plugins"].append({"type": "portmap", "capabilities": {"portMappings": True}})
    made = config.with_suffix(".new")
    made.write_text(json.dumps(network))
    made.replace(config)


def _suite(name: str, cri: Cri, handler: str, focus: str, within: str) -> list[Spec]:
    """Every spec of the suite on the handler. Pods that it leaves are removed."""
    suite: Suite = SUITES[name]
    print(f"==> {suite.name} on {handler}", flush=True)
    reports = REPORTS / name / handler
    reports.mkdir(parents=True)
    command = suite.run_on(reports, f"unix://{cri.daemon.directories.socket}", handler, focus, within)
    # A suite runs containerd and ctr itself.
    environment = {**os.environ, "PATH": f"{releases.chosen().programs}:{os.environ['PATH']}"}
    with (reports / LOG).open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=reports, env=environment
        )
        _finish(process, cri.daemon)
    cri.connect()
    for pod in cri.sandboxes():
        for call in ("StopPodSandbox", "RemovePodSandbox"):
            with contextlib.suppress(grpc.RpcError):
                cri.call(call, pod_sandbox_id=pod)
    return suite.read(reports)


def _finish(process: subprocess.Popen[bytes], daemon: Daemon) -> None:
    """The suite has ended. When it ends the daemon, that is started again, as a service manager does."""
    while process.poll() is None:
        time.sleep(0.5)
        if daemon.has_ended:
            time.sleep(_DOWN_S)
            with contextlib.suppress(AssertionError):  # ended once more, before it answered here
                daemon.start()


if __name__ == "__main__":
    sys.exit(main())
