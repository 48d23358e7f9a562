"""`pyshim install` on a node with a containerd: pods of runc and of pykata side by side, upgrade, removal.

The VMs are stand-ins: what is tested is the installation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from integration.framework import stubs
from protos.cri import v1_pb2 as pb
from protos.cri import v1_pb2_grpc
from pyshim import __version__
from pyshim.node.install import runtime as installed
from pyshim.node.install.in_cluster.payload import NodeHost, install
from pyshim.node.install.release import Sources
from scripts.dist import Origin, build_python, lay_out

from .docker import packages
from .docker.engine import Engine, remove_furniture
from .framework import images, releases, wheels
from .framework.bare_node import CONFIG, BareNode, everything, layouts
from .framework.containerd import missing_programs
from .framework.daemon import Directories
from .framework.waiting import eventually

PROJECT = Path(__file__).resolve().parents[1]
GROUND = Path("/run/node")
LATER = "9.0.0"
SOCKET = GROUND / "state" / "containerd.sock"
PAUSE = "docker.io/local/pause:test"
BRIDGE = "cniinstall"
_RELEASES = releases.RELEASES | ({releases.NEWEST: releases.found_newest()} if releases.is_newest_found() else {})
LAYOUTS = layouts(GROUND, PAUSE)
HANDLERS = {"runc", "pykata", "pykata-tdx", "pykata-snp", "pykata-remote", "pykata-debug", "pykata-warm"}
DROP_IN = Path("/etc/containerd/conf.d/pyshim.toml")
_CONFLIST = f"""\
{{"cniVersion": "0.4.0", "name": "install", "plugins": [{{"type": "bridge", "bridge": "{BRIDGE}", "ipam":
{{"type": "host-local", "dataDir": "{GROUND}/leases", "ranges": [[{{"subnet": "10.233.9.0/24"}}]]}}}}]}}
"""
_STAND_IN = f"""\
[hypervisor.qemu]
path = "{GROUND}/stubs/qemu-system-stub"
virtio_fs_daemon = "{GROUND}/stubs/virtiofsd"
"""


class Node:
    def __init__(self, bare: BareNode) -> None:
        self.bare = bare

    def pyshim(self, *words: str, code: int = 0) -> str:
        """What `pyshim WORDS` of the checkout printed, called from a shell of root's."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        done = subprocess.run(
            [PROJECT / "bin" / "pyshim", *words],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PATH": path},
        )
        assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}{self.log()}"
        return done.stdout + done.stderr

    def install(self, *words: str, code: int = 0) -> str:
        (wheel,) = GROUND.glob("*.whl")
        given = ["--socket", str(SOCKET), "--wheel", str(wheel), "--wheels", str(wheels.DIRECTORY)]
        return self.pyshim("install", *given, *words, code=code)

    def log(self) -> str:
        return self.bare.log_end()

    def runtimes(self) -> frozenset[str]:
        """Those of the files, as containerd reads them."""
        return installed.effective_runtimes(installed.effective(str(self.bare.containerd), str(CONFIG)))

    def run_pod(self, handler: str) -> str:
        metadata = pb.PodSandboxMetadata(name=f"pod-{handler}", uid=f"uid-{handler}", namespace="default")
        config = pb.PodSandboxConfig(metadata=metadata, linux=pb.LinuxPodSandboxConfig())
        request = pb.RunPodSandboxRequest(config=config, runtime_handler=handler)
        with self._channel() as channel:
            return str(v1_pb2_grpc.RuntimeServiceStub(channel).RunPodSandbox(request, timeout=120).pod_sandbox_id)

    def is_ready(self, pod: str) -> bool:
        with self._channel() as channel:
            stub = v1_pb2_grpc.RuntimeServiceStub(channel)
            status = stub.PodSandboxStatus(pb.PodSandboxStatusRequest(pod_sandbox_id=pod), timeout=30).status
            return bool(status.state == pb.SANDBOX_READY)

    def remove_pod(self, pod: str) -> None:
        with self._channel() as channel:
            stub = v1_pb2_grpc.RuntimeServiceStub(channel)
            stub.StopPodSandbox(pb.StopPodSandboxRequest(pod_sandbox_id=pod), timeout=120)
            stub.RemovePodSandbox(pb.RemovePodSandboxRequest(pod_sandbox_id=pod), timeout=120)

    def remove_pods(self) -> None:
        """Those that a failed test left."""
        with contextlib.suppress(grpc.RpcError), self._channel() as channel:
            for pod in (
                v1_pb2_grpc.RuntimeServiceStub(channel).ListPodSandbox(pb.ListPodSandboxRequest(), timeout=5).items
            ):
                self.remove_pod(pod.id)

    def answers(self) -> bool:
        with self._channel() as channel:
            try:
                v1_pb2_grpc.RuntimeServiceStub(channel).Version(pb.VersionRequest(), timeout=5)
            except grpc.RpcError:
                return False
            return True

    def _channel(self) -> grpc.Channel:
        return grpc.insecure_channel(f"unix://{SOCKET}")


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def node(layout: str) -> Iterator[Node]:
    with node_with(LAYOUTS[layout], releases.chosen(), cni=GROUND / "cni", pause=PAUSE) as made:
        yield made


@contextlib.contextmanager
def node_with(config: str, release: releases.Release, *, cni: Path, pause: str) -> Iterator[Node]:
    """A node whose containerd runs; `cni` and `pause` are what `config` says."""
    GROUND.mkdir()
    made = Node(BareNode(ground=GROUND, state=SOCKET.parent, release=release))
    try:
        with made.bare.laid_out(config, "/var/lib"):
            (cni / "net.d").mkdir(parents=True, exist_ok=True)
            (cni / "net.d" / "10-install.conflist").write_text(_CONFLIST)
            (GROUND / "cni").mkdir(exist_ok=True)
            (GROUND / "cni" / "bin").symlink_to("/usr/lib/cni")
            stubs.config(GROUND)
            Path("/etc/pyshim/config.d").mkdir(parents=True)
            Path("/etc/pyshim/config.d/10-stand-in.toml").write_text(_STAND_IN)
            with Sources(checkout=str(PROJECT), guest="", lock="", wheel=None, wheels=None) as sources:
                shutil.copy(sources.wheel(), GROUND)
            made.bare.restart_containerd()
            eventually(made.answers, what=lambda: f"containerd answers: {made.log()}")
            images.write_archive(GROUND / "pause.tar", pause, ("sleep", "100000"))
            ctr = [str(release.programs / "ctr"), f"--address={SOCKET}", "--namespace=k8s.io"]
            subprocess.run([*ctr, "images", "import", GROUND / "pause.tar"], check=True, capture_output=True)
            try:
                yield made
            finally:
                made.remove_pods()
    finally:
        subprocess.run(["ip", "link", "delete", BRIDGE], check=False, capture_output=True)
        shutil.rmtree(GROUND)
        # containerd makes it for NRI, which is on by default in 2.x, and leaves it.
        shutil.rmtree("/run/nri", ignore_errors=True)
        # runc's shim makes it with the first container of a namespace, and leaves it.
        with contextlib.suppress(FileNotFoundError):
            Path("/run/containerd/runc/k8s.io").rmdir()


def refused_without_a_change(node: Node) -> None:
    """containerd is stopped; its configuration is no TOML, has our runtime, cannot take a table, is a link in a loop or
    into a read-only store; the prefix is full or read-only.
    """
    nowhere = str(GROUND / "nowhere")
    assert "connect to containerd at" in node.install("--restart", "--socket", nowhere, code=1)
    text = CONFIG.read_text()
    table = (releases.RELEASES["1.6"] if "version = 2" in text else releases.chosen()).cri_table
    for wrong, words in (
        ("version = [\n", f"parse '{CONFIG}'"),
        (f"{text}[{table}.containerd.runtimes.pykata]\n", "add runtime 'pykata'"),
    ):
        CONFIG.write_text(wrong)
        assert words in node.install(code=1)
        assert CONFIG.read_text() == wrong
    if "version = 2" in text:
        inline = (
            f'version = 2\n[{table}.containerd]\nruntimes = {{runc = {{runtime_type = "io.containerd.runc.v2"}}}}\n'
        )
        CONFIG.write_text(inline)
        assert "an inline table, key = {...}, takes no additions" in node.install(code=1)
        assert CONFIG.read_text() == inline
    CONFIG.unlink()
    CONFIG.symlink_to(CONFIG.name)
    assert f"follow '{CONFIG}': its links are a loop" in node.install(code=1)
    CONFIG.unlink()
    if "imports" not in text:
        store = GROUND / "store"
        store.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "store", store], check=True)
        (store / "config.toml").write_text(text)
        subprocess.run(["mount", "-o", "remount,ro", store], check=True)
        CONFIG.symlink_to(store / "config.toml")
        assert f"change '{store}/config.toml': EROFS" in node.install(code=1)
        assert CONFIG.read_text() == text
        CONFIG.unlink()
        subprocess.run(["umount", store], check=True)
        store.rmdir()
    CONFIG.write_text(text)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "full", "/opt"], check=True)
    said = node.install(code=1)
    subprocess.run(["umount", "/opt"], check=True)
    assert re.search(r"install pyshim: '/opt' has \d MiB free, and a release takes \d+", said)
    subprocess.run(["mount", "-o", "remount,bind,ro", "/opt"], check=True)
    assert "EROFS" in node.install(code=1)
    subprocess.run(["mount", "-o", "remount,bind,rw", "/opt"], check=True)


def install_later_release_as_the_image_does(scratch: Path, guest: Path) -> str:
    """What `pyshim node-agent` does with the payload of a later image; here the host's namespaces are ours."""
    source = scratch / "source"
    for name in ("pyshim", "hypervisors", "protos", "configs"):
        shutil.copytree(PROJECT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    (source / "pyshim" / "__init__.py").write_text(
        (PROJECT / "pyshim" / "__init__.py").read_text().replace(f'"{__version__}"', f'"{LATER}"')
    )
    built = scratch / "built"
    built.mkdir()
    _, wheel = build_python(source, built, 0x60000000)
    payload = scratch / "payload"
    lay_out(payload, source=PROJECT, guest=guest, wheels=wheels.DIRECTORY, wheel=wheel, origin=Origin("", 0))
    host = NodeHost(enter=(), root="")
    options = ("--socket", str(SOCKET))
    said = asyncio.run(install(host, str(payload), python="/usr/bin/python3", handlers=(), options=options))
    assert not list(Path("/var/lib").glob("pyshim-install-*"))
    return said


@pytest.mark.timeout(600)
def test_install_upgrade_and_uninstall(node: Node, layout: str, scratch: Path) -> None:
    before = everything()

    assert "write /etc/pyshim/configuration.toml" in node.install("--dry-run")
    assert everything() == before

    refused_without_a_change(node)
    assert everything() == before

    said = node.install("--restart")
    assert node.runtimes() == HANDLERS
    assert ("change /etc/containerd/config.toml" in said) == (layout not in ("imports", "version-4"))
    assert DROP_IN.exists() == (layout in ("version-3", "version-4", "imports"))
    assert "ok: containerd" in node.pyshim("verify", "--socket", str(SOCKET))
    assert "ok     /etc/pyshim/configuration.toml" in node.pyshim("status")
    pid = (GROUND / "pid").read_text()
    assert "nothing to do" in node.install("--restart")
    assert (GROUND / "pid").read_text() == pid, "containerd was restarted for nothing"
    pods = {handler: node.run_pod(handler) for handler in ("runc", "pykata")}
    (first,) = [path.name for path in Path("/opt/pyshim/releases").iterdir()]

    guest = scratch / "guest"
    guest.mkdir()
    for name in ("vmlinux", "initrd.img", "rootfs.img", "manifest.json", "sbom.spdx.json"):
        (guest / name).symlink_to(PROJECT / ".build" / "guest" / name)
    (guest / "relay").write_bytes((PROJECT / ".build" / "guest" / "relay").read_bytes() + b"\0")

    stand_in = Path("/etc/pyshim/config.d/10-stand-in.toml")
    stand_in.write_text(_STAND_IN.replace("qemu-system-stub", "nothing"))
    before_fault = everything()
    assert "open hypervisor" in node.install("--guest", str(guest), "--restart", code=1)
    eventually(node.answers, what=lambda: f"containerd answers: {node.log()}")
    assert everything() == before_fault
    stand_in.write_text(_STAND_IN)

    said = install_later_release_as_the_image_does(scratch, guest)
    assert f"release {first} stays" in said
    (second,) = {path.name for path in Path("/opt/pyshim/releases").iterdir()} - {first}
    assert json.loads(node.pyshim("status", "--json"))["pods"] == {first: ["default/pod-pykata"], second: []}
    assert [each["release"] for each in json.loads(node.pyshim("list", "--json"))] == [first]
    assert f"processes of {first}: " in node.pyshim("status")
    assert second.startswith(f"{LATER}-")
    state = json.loads(Path(f"/run/vc/sbs/{pods['pykata']}/persist.json").read_text())
    assert state["Pyshim"]["Shim"]["Version"] == __version__
    assert all(node.is_ready(pod) for pod in pods.values())

    before_downgrade = everything()
    assert f"install pyshim {__version__}: the node has {LATER}, which is later" in node.install("--restart", code=1)
    assert everything() == before_downgrade
    assert f"release {first}" in node.install("--restart", "--downgrade")
    assert all(node.is_ready(pod) for pod in pods.values())

    assert "pods run with it" in node.pyshim("uninstall", code=1)
    node.remove_pod(pods["pykata"])
    node.pyshim("uninstall", "--restart")
    assert everything() == before
    eventually(node.answers, what=lambda: f"containerd answers: {node.log()}")
    assert node.is_ready(pods["runc"])
    node.remove_pod(pods["runc"])
    assert "nothing is installed" in node.pyshim("uninstall")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", _RELEASES.values(), ids=_RELEASES)
def test_a_fresh_install_on_the_unmodified_default_of_a_release(release: releases.Release) -> None:
    containerd = release.programs / "containerd"
    if not containerd.exists():
        build = f"{releases.CHOICE}={release.generation} python -m integration.framework.releases"
        pytest.skip(f"containerd {release.generation} is not built (hint: {build})")
    default = subprocess.run([containerd, "config", "default"], check=True, capture_output=True, text=True).stdout
    (pause,) = re.findall(r"^ +sandbox(?:_image)? = ['\"](.+)['\"]$", default, re.MULTILINE)
    with node_with(default, release, cni=Path("/etc/cni"), pause=pause) as node:
        Path("/opt/cni").mkdir(exist_ok=True)
        Path("/opt/cni/bin").symlink_to("/usr/lib/cni")
        before = everything()

        node.install("--restart")

        assert node.runtimes() == HANDLERS
        pod = node.run_pod("pykata")
        assert node.is_ready(pod)
        node.remove_pod(pod)
        node.pyshim("uninstall", "--restart")
        assert everything() == before


DOCKERS = 'disabled_plugins = ["cri"]\n'
"""containerd's configuration in the package of docker-ce, without its comments."""
DAEMON_JSON = Path("/etc/docker/daemon.json")


@pytest.fixture
def docker_node() -> Iterator[tuple[Node, Engine]]:
    """A node as docker-ce's packages leave it, whose dockerd has a runtime of the operator's."""
    try:
        unpacked = packages.programs()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    if missing := missing_programs("iptables", "runc"):
        pytest.skip(f"needs {', '.join(missing)}")
    ground = GROUND / "engine"
    ground.mkdir(parents=True)
    made = Node(BareNode(ground=GROUND, state=SOCKET.parent))
    try:
        with made.bare.laid_out(DOCKERS, "/var/lib"):
            with Sources(checkout=str(PROJECT), guest="", lock="", wheel=None, wheels=None) as sources:
                shutil.copy(sources.wheel(), GROUND)
            DAEMON_JSON.parent.mkdir(exist_ok=True)
            client = Path("/usr/local/bin/docker")
            client.unlink(missing_ok=True)
            client.symlink_to(unpacked / "usr/bin/docker")
            made.bare.restart_containerd()
            eventually(SOCKET.exists, what=lambda: f"containerd listens: {made.log()}")
            directories = Directories(root=GROUND / "root", state=SOCKET.parent)
            mine = {"mine": {"path": "/usr/bin/crun"}}
            with Engine(directories, unpacked, ground, settings=DAEMON_JSON, runtimes=mine) as engine:
                yield made, engine
    finally:
        remove_furniture(ground)
        shutil.rmtree(GROUND)


@pytest.mark.vm
@pytest.mark.timeout(900)
def test_install_for_docker_alone(docker_node: tuple[Node, Engine]) -> None:
    node, engine = docker_node
    before = everything()
    socket = ("--socket", str(GROUND / "engine" / "docker.sock"))
    words = ("--kind", "docker", *socket, "--handler", "pykata", "--restart")
    assert "--kind docker needs no CRI" in node.install(code=1)

    assert "change" not in node.install(*words)
    assert "ran a container with io.containerd.pykata.v2" in node.pyshim("verify", *socket)
    assert "change /etc/docker/daemon.json" in node.install(*words, "--daemon-json")
    assert json.loads(DAEMON_JSON.read_text())["runtimes"].keys() == {"mine", "pykata"}
    assert CONFIG.read_text() == DOCKERS
    assert "ran a container with pykata" in node.pyshim("verify", *socket)
    assert "container runtime Docker" in node.pyshim("status")
    assert "nothing to do" in node.install(*words, "--daemon-json")

    before_fault = everything()
    Path("/etc/pyshim/config.d").mkdir()
    broken = Path("/etc/pyshim/config.d/10-broken.toml")
    broken.write_text('[hypervisor.qemu]\npath = "/nothing"\n')
    assert "'/nothing': ENOENT" in node.install(*words, "--handler", "pykata-debug", "--daemon-json", code=1)
    shutil.rmtree(broken.parent)
    assert everything() == before_fault

    node.pyshim("uninstall", "--restart", *socket)
    assert everything() == before
    assert "mine" in engine.docker("info", "--format", "{{json .Runtimes}}").out
