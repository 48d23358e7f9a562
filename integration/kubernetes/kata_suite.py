"""`make peers WHAT=kata-k8s KATA=DIRECTORY`: Kata's Kubernetes suite, unchanged, on the cluster of one node.

Runs in an enclosure, after `python -m integration.kubernetes.kata_images`. What each file comes to is in
kata_suite.toml; words choose files (`kata_suite caps env`), and `--page` writes the table of docs/KATA_SUITES.md. The
suite's own scripts run in an overlay of the checkout, of which only versions.yaml is changed: it has the digests of our
images. In place of a node of Kata there is:

- the class `kata` and, as kata-deploy names it, `kata-qemu`; pods without a class are runc's;
- this shim's configuration where Kata's is, below /opt/kata, so that the suite's drop-in files reach it;
- a registry that has the suite's images (kata_images.py);
- the suite's own pod for commands on the node, which sees the enclosure, and for these commands `sudo`, which runs its
  words, and `crictl`, which knows the one question that the suite has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from integration.framework import boots, enclosure, releases
from integration.framework.containerd import missing_programs
from integration.framework.cri_session import RUNC_HANDLER
from integration.framework.registry import serve

from . import cluster as clusters
from . import kata_images, peers
from .cluster import GROUND, KUBECONFIG, NODE, Cluster
from .kata_images import Images
from .services import services

TABLE = Path(__file__).with_suffix(".toml")
PAGE = releases.PROJECT / "docs" / "KATA_SUITES.md"
LOGS = releases.PROJECT / ".build" / "kata-k8s"
"""What bats said, a file each, and the results of all runs since the directory was removed."""
_RESULTS = LOGS / "results.json"
_GROUND = kata_images.STAND_INS.parent
_HANDLER = "kata-qemu"
_CONFIG = Path("/opt/kata/share/defaults/kata-containers/configuration-qemu.toml")
_NAMESPACE = "kata-containers-k8s-tests"
_HYPERVISOR = "qemu"
_LIMIT_S = 900.0
"""Of a file; the suite's own waits are 90 s each."""
_TAP = re.compile(r"(not )?ok \d+ (.*)")
_PLAN = re.compile(r"(?m)^1\.\.(\d+)$")
_PLACE = re.compile(r"(?<=<!-- from integration/kubernetes/kata_suite.toml -->\n).*?(?=<!-- end -->)", re.DOTALL)
_IMAGES_PLUGIN = "io.containerd.cri.v1.images"
_HOSTS = 'server = "{url}"\n[host."{url}"]\n  capabilities = ["pull", "resolve"]\n'
_SUDO = '#!/bin/sh\nexec "$@"\n'
_CRICTL = """\
#!/bin/sh
# crictl ... pods --name NAME --state ready -q
while [ "$1" != --name ]; do shift; done
of_pod='labels."io.kubernetes.pod.name"=='$2',labels."io.cri-containerd.kind"==sandbox'
exec {ctr} --address {socket} --namespace k8s.io containers list --quiet "$of_pod"
"""
_MEANING = {
    "passes": "passes",
    "differs": "differs",
    "skips": "skipped by the suite itself",
    "inapplicable": "not applicable",
    "unable": "cannot run on this cluster",
}
"""The words of the page for each section of the table."""
_NOT_RUN = ("inapplicable", "unable")

Table = dict[str, dict[str, str]]
"""The reason, by section and by file."""
Results = Mapping[str, Mapping[str, str]]
"""`comes_to` and `shown` of the last outcome, by file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What bats said of a file."""

    comes_to: str
    """The section of the table that it belongs to: `passes`, `skips`, `differs` for a failure, or `mixed`."""
    shown: str
    """Counts, and the tests that failed."""


def outcome(said: str, code: int) -> Outcome:
    """Of a run whose output in TAP is `said`. A file with a planned test that has no result has failed, too."""
    plan = _PLAN.search(said)
    lines = [(match[1] is None, match[2]) for match in map(_TAP.fullmatch, said.splitlines()) if match]
    failed = [name for is_ok, name in lines if not is_ok]
    skipped = [name for is_ok, name in lines if is_ok and " # skip" in name]
    planned = int(plan[1]) if plan else 0
    if failed or code != 0 or not lines or len(lines) != planned:
        shown = f"{len(failed)} of {planned} failed: {'; '.join(failed) or f'{len(lines)} ran, exit code {code}'}"
        return Outcome(comes_to="differs", shown=shown)
    counted = f"{len(lines) - len(skipped)} of {len(lines)} passed"
    if not skipped:
        return Outcome(comes_to="passes", shown=counted)
    return Outcome(comes_to="skips" if len(skipped) == len(lines) else "mixed", shown=f"{counted}: {skipped[0]}")


def read_table() -> Table:
    found: Table = tomllib.loads(TABLE.read_text())
    return found


def expectations(table: Table, files: set[str]) -> dict[str, str]:
    """The section of each file. Raises ValueError naming files without a line, and lines without a file."""
    found = {name: section for section, lines in table.items() for name in lines}
    complaints = [f"no line for the file {name}" for name in sorted(files - found.keys())]
    complaints += [f"a line for no file: {name}" for name in sorted(found.keys() - files)]
    if complaints:
        raise ValueError(f"read '{TABLE.name}': {'; '.join(complaints)}")
    return found


def page_table(table: Table, results: Results) -> str:
    """The rows of the page: what each file came to, or that it did not run."""
    rows = ["| Files | Come to |\n|---|---|\n"]
    for section, lines in table.items():
        by_words: dict[str, list[str]] = {}
        for name, why in lines.items():
            by_words.setdefault(_words(section, name, why, results), []).append(name)
        rows += [f"| {', '.join(names)} | {words} |\n" for words, names in by_words.items()]
    return "".join(rows)


def _words(section: str, name: str, why: str, results: Results) -> str:
    """What the page says of a file."""
    words = _MEANING[section] + (f": {why}" if why else "")
    if section in _NOT_RUN:
        return words
    if name not in results:
        return f"not run; expected: {words}"
    return words if results[name]["comes_to"] == section else f"**{results[name]['shown']}**"


def main() -> int:
    """0 if each file came to what the table says."""
    parser = argparse.ArgumentParser(prog="python -m integration.kubernetes.kata_suite")
    parser.add_argument("--page", action="store_true", help="write the page's table from the results so far")
    parser.add_argument("names", nargs="*", help="files, as the table names them; default: all")
    asked = parser.parse_args()
    if asked.page:
        results = _read_results()
        PAGE.write_text(_PLACE.sub(lambda _: page_table(read_table(), results), PAGE.read_text()))
        return 0
    try:
        kata = kata_images.checkout()
        suite = kata / kata_images.SUITE
        files = {path.stem.removeprefix("k8s-") for path in suite.glob("k8s-*.bats")}
        expected = expectations(read_table(), files)
        if unknown := set(asked.names) - files:
            raise ValueError(f"choose files: none is named {', '.join(sorted(unknown))}")
        if missing := [*missing_programs("bats", "dnsmasq", "envsubst", "iptables", "jq", "runc"), *clusters.missing()]:
            raise FileNotFoundError(f"run Kata's suite: needs {', '.join(missing)}")
        if enclosure.MARK not in os.environ:
            raise OSError("run Kata's suite: not in an enclosure (hint: `make peers WHAT=kata-k8s`)")
    except (OSError, ValueError) as error:
        print(f"kata_suite: {error}", file=sys.stderr)
        return 2
    failed = _run(kata, expected, sorted(asked.names or files))
    print(f"\n{len(failed)} of {len(asked.names or files)} files failed" + "".join(f"\n  {each}" for each in failed))
    return 1 if failed else 0


def _run(kata: Path, expected: Mapping[str, str], names: list[str]) -> list[str]:
    """The files that did not come to what was expected, and what they came to."""
    failed = []
    LOGS.mkdir(parents=True, exist_ok=True)
    why = {name: reason for lines in read_table().values() for name, reason in lines.items()}
    for name in names:
        if expected[name] in _NOT_RUN:
            print(f"{name}: not run, {_MEANING[expected[name]]}: {why[name]}", flush=True)
        if expected[name] == "unable":
            failed.append(f"{name}: {_MEANING['unable']}: {why[name]}")
    images = kata_images.images()
    with _node(images) as kube, _suite(kata, images, kube.cri.daemon.directories.socket) as suite:
        try:
            for name in names:
                if expected[name] in _NOT_RUN:
                    continue
                started = time.monotonic()
                found = _file(suite, name)
                _keep(name, found)
                is_right = found.comes_to == expected[name]
                verdict = "as expected" if is_right else f"FAILED, expected: {expected[name]}"
                print(f"{name}: {found.shown}; {time.monotonic() - started:.0f} s; {verdict}", flush=True)
                if not is_right:
                    failed.append(f"{name}: {found.shown}")
        finally:
            for log in (*GROUND.glob("*.log"), kube.cri.daemon.directories.log):
                shutil.copy(log, LOGS)
            _detach_disks()
    return failed


def _read_results() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    return found


def _keep(name: str, found: Outcome) -> None:
    results = _read_results() | {name: {"comes_to": found.comes_to, "shown": found.shown}}
    _RESULTS.write_text(json.dumps(results, indent=1))


def _file(suite: Path, name: str) -> Outcome:
    """The result of a file; pods and other objects that it leaves are removed."""
    log = LOGS / f"{name}.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            ["bats", "--tap", f"k8s-{name}.bats"],
            cwd=suite,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            code = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            code = process.wait()
    kinds = "deployments,replicationcontrollers,jobs,cronjobs,pods,services,persistentvolumeclaims"
    _kubectl("delete", kinds, "--all", "--force", "--grace-period=0", "--wait=true", "--timeout=60s")
    return outcome(log.read_text(errors="replace"), code)


def _kubectl(*words: str) -> None:
    subprocess.run(["kubectl", *words], env=_environment(), check=False, capture_output=True)


def _environment() -> dict[str, str]:
    go = _GROUND / "go"
    return {
        "PATH": f"{go}/bin:{kata_images.STAND_INS}:{peers.CLIENTS}:{os.defpath}:/usr/sbin:/sbin",
        "HOME": str(_GROUND),
        "LANG": "C.UTF-8",
        "GOPATH": str(go),
        "KUBECONFIG": str(_GROUND / "kubeconfig"),
        "KATA_HYPERVISOR": _HYPERVISOR,
        "CONTAINER_RUNTIME": "containerd",
        "target_branch": "main",  # or the suite asks the checkout's origin
    }


@contextlib.contextmanager
def _suite(kata: Path, images: Images, socket: Path) -> Iterator[Path]:
    """The directory of the bats files, set up by the suite's own script; `socket` is containerd's. What is written to
    the checkout stays in the enclosure.
    """
    copy = _GROUND / "checkout"
    for name in ("checkout", "upper", "work"):
        (_GROUND / name).mkdir()
    options = f"lowerdir={kata},upperdir={_GROUND}/upper,workdir={_GROUND}/work"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "checkout", copy], check=True)
    (copy / "versions.yaml").write_text(_with_our_digests((kata / "versions.yaml").read_text(), images))
    suite = copy / kata_images.SUITE
    shutil.copytree(kata_images.go_path(kata), _GROUND / "go")
    kata_images.STAND_INS.mkdir()
    crictl = _CRICTL.format(ctr=releases.chosen().programs / "ctr", socket=socket)
    for name, script in (("sudo", _SUDO), ("crictl", crictl)):
        (kata_images.STAND_INS / name).write_text(script)
        (kata_images.STAND_INS / name).chmod(0o755)
    usual = KUBECONFIG["contexts"][0]
    context = {**usual, "context": {**usual["context"], "namespace": _NAMESPACE}}
    (_GROUND / "kubeconfig").write_text(json.dumps({**KUBECONFIG, "contexts": [context]}))
    subprocess.run(["bash", "setup.sh"], cwd=suite, env=_environment(), check=True, stdout=subprocess.DEVNULL)
    try:
        yield suite
    finally:
        _kubectl("delete", "pods", "--all", "--all-namespaces", "--force", "--grace-period=0", "--timeout=60s")


def _with_our_digests(versions: str, images: Images) -> str:
    """The suite takes the digests of some images from this file: those that we have are ours."""
    for image in yaml.safe_load(versions)["docker_images"].values():
        if isinstance(image, dict) and "digest" in image:
            ours = images.manifests.get(image["registry"].partition("/")[2])
            versions = versions.replace(image["digest"], ours or image["digest"])
    return versions


@contextlib.contextmanager
def _node(images: Images) -> Iterator[Cluster]:
    """A cluster as kata-deploy leaves one, with a registry beside it."""
    _GROUND.mkdir(parents=True)
    with (
        serve("127.0.0.1", images.blobs, images.digest) as registry,
        _configuration(),
        clusters.cluster(_containerd_config(registry.url), default=RUNC_HANDLER) as kube,
        kube.runtime_class("kata", _HANDLER, cpu="250m", memory="320Mi"),
        kube.runtime_class(_HANDLER, _HANDLER, cpu="250m", memory="320Mi"),
    ):
        label = {"metadata": {"labels": {"katacontainers.io/kata-runtime": "true"}}}
        kube.call("PATCH", f"/api/v1/nodes/{NODE}", label, "application/merge-patch+json")
        kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": _NAMESPACE}})
        with services(kube):
            yield kube


@contextlib.contextmanager
def _configuration() -> Iterator[None]:
    """This shim's configuration is where Kata's is; VMs continue from a template."""
    layers = _GROUND / "opt"
    for name in ("upper", "work"):
        (layers / name).mkdir(parents=True)
    options = f"lowerdir=/opt,upperdir={layers}/upper,workdir={layers}/work"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "opt", "/opt"], check=True)
    try:
        boots.Template(_GROUND / "template").make()
        _CONFIG.parent.mkdir(parents=True)
        shutil.copy(_GROUND / "template" / "configuration.toml", _CONFIG)
        yield
    finally:
        subprocess.run(["umount", "/opt"], check=True)


def _containerd_config(registry: str) -> str:
    """The handler, and the registry in place of all others."""
    hosts = _GROUND / "certs.d" / "_default"
    hosts.mkdir(parents=True)
    (hosts / "hosts.toml").write_text(_HOSTS.format(url=registry))
    release = releases.chosen()
    images = f'plugins."{_IMAGES_PLUGIN}"' if release.numbers >= (2,) else release.cri_table
    return f"""
[{images}.registry]
  config_path = "{hosts.parent}"
[{release.cri_table}.containerd.runtimes.{_HANDLER}]
  runtime_type = "io.containerd.pykata.v2"
  privileged_without_host_devices = true
  pod_annotations = ["io.katacontainers.*"]
  [{release.cri_table}.containerd.runtimes.{_HANDLER}.options]
    ConfigPath = "{_CONFIG}"
"""


def _detach_disks() -> None:
    """Loop devices over the disks that the suite makes outlive the enclosure: none is left."""
    listed = subprocess.run(["losetup", "--list", "--json"], check=True, capture_output=True, text=True).stdout
    for device in json.loads(listed or '{"loopdevices": []}')["loopdevices"]:
        if re.match(r"/tmp/disk\.\w+\.img", device["back-file"] or ""):
            subprocess.run(["losetup", "--detach", device["name"]], check=False)


if __name__ == "__main__":
    sys.exit(main())
