"""containerd's own suite for its CRI plugin, of the release that it runs on (CONTAINERD): built as critest is.

It restarts containerd, connects NRI plugins, and uses a handler of its own, runc with failpoints, for what it does to
a shim. That shim and a CNI plugin with failpoints are built with it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from integration.conformance.suite import LOG, PAUSE, REGISTRY, Spec, Suite
from integration.framework import shim_config
from integration.framework.cri_session import GROUND, NRI_SOCKET
from integration.framework.releases import PROJECT, RELEASES, chosen, go_build, run_go

_RELEASE = chosen() if chosen().is_built else RELEASES["2.3"]
_PACKAGE = f"{_RELEASE.module}/integration"
PROGRAMS = PROJECT / ".build" / "cache" / "cri-integration" / _RELEASE.version
_FAILPOINTS = ("containerd-shim-runc-fp-v1", "cni-bridge-fp")
_FAILPOINT_NETWORK = GROUND / "cni" / "failpoint"
_NRI_SOCKET = Path("/run/nri-test.sock")
IMAGES = {
    "Alpine": f"{REGISTRY}/containerd/alpine:3.14.0",
    "BusyBox": f"{REGISTRY}/containerd/busybox:1.36",
    "Pause": PAUSE,
    "ResourceConsumer": f"{REGISTRY}/e2e-test-images/resource-consumer:1.10",
    "VolumeCopyUp": f"{REGISTRY}/containerd/volume-copy-up:2.2",
    "VolumeOwnership": f"{REGISTRY}/containerd/volume-ownership:2.1",
}
"""The suite's names for its images."""
CRI_SETTINGS = '  drain_exec_sync_io_timeout = "10s"\n'
"""Those of the suite's own containerd."""
_RESULT = re.compile(r" *--- (PASS|FAIL|SKIP): (\S+)")
_BEGIN = re.compile(r"=== (?:RUN|CONT|NAME) +(\S+)")
_ERROR = re.compile(r"\s+Error:\s+(\S.*)")
_DETAIL = re.compile(r"\s+\t +\t(\S.*)")
_MESSAGE = re.compile(r"\s+\w+\.go:\d+: +(\S.*)")
"""The last one of a test that fails or is skipped without an error says why."""
_STATUS = {"PASS": "passed", "FAIL": "failed", "SKIP": "skipped"}


def build() -> None:
    """The programs are there. Raises OSError saying what failed."""
    what = f"containerd's CRI integration suite {_RELEASE.version}"
    with go_build(PROGRAMS, what, "some minutes") as work:
        if work is None:
            return
        programs = [f"{_PACKAGE}/failpoint/cmd/{name}" for name in _FAILPOINTS]
        run_go(work, "mod", "init", "pyshim.test/cri-integration")
        run_go(work, "get", "-t", *(f"{package}@{_RELEASE.version}" for package in (_PACKAGE, *programs)))
        run_go(work, "test", "-c", "-trimpath", "-o", "bin/cri-integration", _PACKAGE)
        run_go(work, "build", "-trimpath", "-o", "bin/", *programs)


def containerd_config() -> str:
    """What the suite expects of its containerd beside the tests' configuration: the handler with failpoints."""
    return f"""
[{_RELEASE.cri_table}.containerd.runtimes.runc-fp]
  runtime_type = "io.containerd.runc-fp.v1"
  runtime_path = "{PROGRAMS / _FAILPOINTS[0]}"
  pod_annotations = ["io.containerd.runtime.v2.shim.failpoint.*"]
  cni_conf_dir = "{_FAILPOINT_NETWORK}"
  cni_max_conf_num = 1
"""


def prepare() -> None:
    """The files that the suite expects are there: the network with failpoints, NRI's socket, the list of images.

    containerd runs, with the tests' network. From now on pyshim makes a pod with the host's network, which it would
    refuse: the suite uses one where it tests something else.
    """
    config = GROUND / "host-network.toml"
    config.write_text(
        re.sub(r"(?m)^\[runtime\]$", "[runtime]\nallow_host_network = true", shim_config.SHIPPED.read_text())
    )
    shim_config.bind(config, shim_config.SHIPPED)
    (GROUND / "cni" / "bin" / _FAILPOINTS[1]).symlink_to(PROGRAMS / _FAILPOINTS[1])
    network = json.loads((GROUND / "cni" / "net.d" / "10-pods.conflist").read_text())
    network["name"] = "failpoints"
    network["plugins"][0] |= {"type": _FAILPOINTS[1], "capabilities": {"io.kubernetes.cri.pod-annotations": True}}
    _FAILPOINT_NETWORK.mkdir(exist_ok=True)  # containerd makes it
    (_FAILPOINT_NETWORK / "10-pods.conflist").write_text(json.dumps(network))
    _NRI_SOCKET.symlink_to(NRI_SOCKET)
    _image_list().write_text("".join(f'{name} = "{image}"\n' for name, image in IMAGES.items()))


def _image_list() -> Path:
    return GROUND / "images.toml"


def _command(reports: Path, socket: str, handler: str, focus: str, within: str) -> list[str]:
    options = {
        "cri-endpoint": socket,
        "runtime-handler": handler,
        "containerd-bin": "containerd",
        "image-list": str(_image_list()),
        "build-dir": str(_RELEASE.programs),
        "test.v": "true",
        "test.timeout": within,
        **({"test.run": focus} if focus else {}),
    }
    return [str(PROGRAMS / "cri-integration"), *(f"-{name}={value}" for name, value in options.items())]


def _read(reports: Path) -> list[Spec]:
    return read_log((reports / LOG).read_text(errors="replace"))


def read_log(text: str) -> list[Spec]:
    """The tests of a Go test program's output, without those that only group others.

    A test that fails though none of its subtests does is one too. One that has begun and has no result is `unfinished`.
    """
    status: dict[str, str] = {}
    errors: dict[str, str] = {}
    messages: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        if found := _BEGIN.match(line):
            current = found[1]
            status.setdefault(current, "unfinished")
        elif found := _RESULT.match(line):
            status[found[2]] = _STATUS[found[1]]
        elif found := _ERROR.match(line):
            errors.setdefault(current, found[1])
        elif errors.get(current, "").endswith(":") and (found := _DETAIL.match(line)):
            errors[current] += f" {found[1]}"
        elif found := _MESSAGE.match(line):
            messages[current] = found[1]
    bad = {name for name, result in status.items() if result in ("failed", "unfinished")}
    return [
        Spec(
            name=name,
            status=result,
            reason="" if result == "passed" else errors.get(name, messages.get(name, ""))[:300],
            listed_as=(name, name.partition("/")[0]),
        )
        for name, result in status.items()
        if not (parts := {other for other in status if other.startswith(f"{name}/")})
        or (name in bad and not parts & bad)
    ]


SUITE = Suite(
    name=f"containerd's CRI integration suite {_RELEASE.version}", run_on=_command, prepare=prepare, read=_read
)

if __name__ == "__main__":
    try:
        build()
    except OSError as error:
        sys.exit(f"cri_integration: {error}")
