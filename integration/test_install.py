"""`pyshim install` on a node with Debian's containerd: pods of runc and of pykata side by side, upgrade, removal.

The node's /etc, /opt, /usr/local and /var/lib are overlays of the test's own. The VMs are stand-ins: what is tested is
the installation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bench import stubs
from protos.cri import v1_pb2 as pb
from protos.cri import v1_pb2_grpc
from pyshim.node.in_cluster.host import Host
from pyshim.node.in_cluster.payload import install
from pyshim.node.release import Sources

from .framework import images, wheels
from .framework.containerd import DEBIAN
from .framework.waiting import eventually

PROJECT = Path(__file__).resolve().parents[1]
GROUND = Path("/run/node")
SOCKET = GROUND / "containerd.sock"
CONFIG = Path("/etc/containerd/config.toml")
PAUSE = "docker.io/local/pause:test"
BRIDGE = "cniinstall"
_OVERLAYS = ("/etc", "/opt", "/usr/local", "/var/lib")
_LOOKED_AT = ("/etc", "/opt", "/usr/local")
_CONFLIST = f"""\
{{"cniVersion": "0.4.0", "name": "install", "plugins": [{{"type": "bridge", "bridge": "{BRIDGE}", "ipam":
{{"type": "host-local", "dataDir": "{GROUND}/leases", "ranges": [[{{"subnet": "10.233.9.0/24"}}]]}}}}]}}
"""
# In place of systemd, of which this node has this command only.
_SYSTEMCTL = f"""\
#!/bin/sh
[ "$*" = "restart containerd" ] || exit 1
if [ -e {GROUND}/pid ]; then
    kill "$(cat {GROUND}/pid)"
    while kill -0 "$(cat {GROUND}/pid)" 2>/dev/null; do sleep 0.05; done
fi
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PYSHIM_ZYGOTE=off
setsid containerd --root {GROUND}/root --state {GROUND}/state --address {SOCKET} >>{GROUND}/log 2>&1 </dev/null &
echo $! >{GROUND}/pid
"""
_STAND_IN = f"""\
[hypervisor.qemu]
path = "{GROUND}/stubs/qemu-system-stub"
virtio_fs_daemon = "{GROUND}/stubs/virtiofsd"
"""


class Node:
    def pyshim(self, *words: str, code: int = 0) -> str:
        """What `pyshim WORDS` of the checkout printed."""
        done = subprocess.run([PROJECT / "bin" / "pyshim", *words], capture_output=True, text=True, check=False)
        assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}{self.log()}"
        return done.stdout + done.stderr

    def install(self, *words: str, code: int = 0) -> str:
        (wheel,) = GROUND.glob("*.whl")
        given = ["--socket", str(SOCKET), "--wheel", str(wheel), "--wheels", str(wheels.DIRECTORY)]
        return self.pyshim("install", *given, *words, code=code)

    def log(self) -> str:
        return (GROUND / "log").read_text(errors="replace")[-3000:] if (GROUND / "log").exists() else ""

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


def everything() -> dict[str, tuple[int, bytes]]:
    """All files of the node that an installation may touch."""
    found: dict[str, tuple[int, bytes]] = {}
    for top in _LOOKED_AT:
        for directory, names, files in os.walk(top):
            for name in (*names, *files):
                path = Path(directory, name)
                mode = path.lstat().st_mode
                is_file = stat.S_ISREG(mode) and path.stat().st_size < 1 << 20
                content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if is_file else b""
                found[str(path)] = (mode, content)
    return found


@pytest.fixture
def node() -> Iterator[Node]:
    GROUND.mkdir()
    mounted = []
    made = Node()
    try:
        for number, top in enumerate(_OVERLAYS):
            upper, work = GROUND / f"upper{number}", GROUND / f"work{number}"
            upper.mkdir()
            work.mkdir()
            options = f"lowerdir={top},upperdir={upper},workdir={work}"
            subprocess.run(["mount", "-t", "overlay", "-o", options, "node", top], check=True)
            mounted.append(top)
        opt = f'  [plugins."io.containerd.internal.v1.opt"]\n    path = "{GROUND}/opt"\n'
        pause = f'[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "{PAUSE}"\n  restrict_oom_score_adj = true\n'
        CONFIG.parent.mkdir(exist_ok=True)
        CONFIG.write_text(DEBIAN.replace('  [plugins."io.containerd.grpc.v1.cri"]\n', "") + opt + pause)
        shutil.rmtree("/etc/cni", ignore_errors=True)
        Path("/etc/cni/net.d").mkdir(parents=True)
        Path("/etc/cni/net.d/10-install.conflist").write_text(_CONFLIST)
        systemctl = Path("/usr/local/sbin/systemctl")
        systemctl.write_text(_SYSTEMCTL)
        systemctl.chmod(0o755)
        stubs.config(GROUND)
        Path("/etc/pyshim/config.d").mkdir(parents=True)
        Path("/etc/pyshim/config.d/10-stand-in.toml").write_text(_STAND_IN)
        with Sources(checkout=str(PROJECT), guest="", lock="", wheel=None, wheels=None) as sources:
            shutil.copy(sources.wheel(), GROUND)
        subprocess.run([systemctl, "restart", "containerd"], check=True)
        eventually(made.answers, what=lambda: f"containerd answers: {made.log()}")
        images.write_archive(GROUND / "pause.tar", PAUSE, ("sleep", "100000"))
        ctr = ["ctr", f"--address={SOCKET}", "--namespace=k8s.io"]
        subprocess.run([*ctr, "images", "import", GROUND / "pause.tar"], check=True, capture_output=True)
        yield made
    finally:
        made.remove_pods()
        _end()
        subprocess.run(["ip", "link", "delete", BRIDGE], check=False, capture_output=True)
        for top in reversed(mounted):
            subprocess.run(["umount", top], check=True)
        shutil.rmtree(GROUND)
        # runc's shim makes it with the first container of a namespace, and leaves it.
        with contextlib.suppress(FileNotFoundError):
            Path("/run/containerd/runc/k8s.io").rmdir()


def _end() -> None:
    """containerd has ended, and with it its mounts below the ground."""
    try:
        pid = int((GROUND / "pid").read_text())
    except FileNotFoundError:
        return
    os.kill(pid, 15)
    eventually(lambda: not Path(f"/proc/{pid}").exists(), what="containerd has ended")


def runtimes() -> set[str]:
    document = tomllib.loads(CONFIG.read_text())
    return set(document["plugins"]["io.containerd.grpc.v1.cri"].get("containerd", {}).get("runtimes", {}))


def refused_without_a_change(node: Node) -> None:
    """containerd is stopped; its configuration is no TOML, or has a runtime of our name; the prefix is read-only."""
    nowhere = str(GROUND / "nowhere")
    assert "connect to containerd at" in node.install("--restart", "--socket", nowhere, code=1)
    text = CONFIG.read_text()
    for wrong, words in (
        ("version = [\n", f"parse '{CONFIG}'"),
        (f'{text}[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.pykata]\n', "add runtime 'pykata'"),
    ):
        CONFIG.write_text(wrong)
        assert words in node.install(code=1)
        assert CONFIG.read_text() == wrong
    CONFIG.write_text(text)
    subprocess.run(["mount", "-o", "remount,ro", "/opt"], check=True)
    assert "EROFS" in node.install(code=1)
    subprocess.run(["mount", "-o", "remount,rw", "/opt"], check=True)


def install_as_the_image_does(scratch: Path, guest: Path) -> str:
    """What `pyshim node-agent` does with the payload of its image; here the host's namespaces are ours."""
    payload = scratch / "payload"
    shutil.copytree(wheels.DIRECTORY, payload / "wheels")
    shutil.copytree(guest, payload / "guest")
    shutil.copy(PROJECT / "requirements.lock", payload)
    (wheel,) = GROUND.glob("*.whl")
    shutil.copy(wheel, payload)
    host = Host(enter=(), root="")
    options = ("--socket", str(SOCKET))
    said = asyncio.run(install(host, str(payload), python="/usr/bin/python3", handlers=(), options=options))
    assert not list(Path("/var/lib").glob("pyshim-install-*"))
    return said


@pytest.mark.timeout(600)
def test_install_upgrade_and_uninstall(node: Node, scratch: Path) -> None:
    before = everything()

    assert "write /etc/pyshim/configuration.toml" in node.install("--dry-run")
    assert everything() == before

    refused_without_a_change(node)
    assert everything() == before

    said = node.install("--restart")
    assert runtimes() == {"runc", "pykata", "pykata-tdx", "pykata-snp", "pykata-remote", "pykata-debug"}
    assert "change /etc/containerd/config.toml" in said
    assert "ok: containerd" in node.pyshim("verify", "--socket", str(SOCKET))
    assert "ok     /etc/pyshim/configuration.toml" in node.pyshim("status")
    pid = (GROUND / "pid").read_text()
    assert "nothing to do" in node.install("--restart")
    assert (GROUND / "pid").read_text() == pid, "containerd was restarted for nothing"
    pods = {handler: node.run_pod(handler) for handler in ("runc", "pykata")}
    (first,) = [path.name for path in Path("/opt/pyshim/releases").iterdir()]

    guest = scratch / "guest"
    guest.mkdir()
    for name in ("vmlinux", "initrd.img", "rootfs.img"):
        (guest / name).symlink_to(PROJECT / ".build" / "guest" / name)
    (guest / "relay").write_bytes((PROJECT / ".build" / "guest" / "relay").read_bytes() + b"\0")

    stand_in = Path("/etc/pyshim/config.d/10-stand-in.toml")
    stand_in.write_text(_STAND_IN.replace("qemu-system-stub", "nothing"))
    installed = everything()
    assert "open hypervisor" in node.install("--guest", str(guest), "--restart", code=1)
    eventually(node.answers, what=lambda: f"containerd answers: {node.log()}")
    assert everything() == installed
    stand_in.write_text(_STAND_IN)

    said = install_as_the_image_does(scratch, guest)
    assert f"release {first} stays" in said
    (second,) = {path.name for path in Path("/opt/pyshim/releases").iterdir()} - {first}
    assert json.loads(node.pyshim("status", "--json"))["pods"] == {first: ["default/pod-pykata"], second: []}
    assert f"processes of {first}: " in node.pyshim("status")
    assert all(node.is_ready(pod) for pod in pods.values())

    assert "pods run with it" in node.pyshim("uninstall", code=1)
    node.remove_pod(pods["pykata"])
    node.pyshim("uninstall", "--restart")
    assert everything() == before
    eventually(node.answers, what=lambda: f"containerd answers: {node.log()}")
    assert node.is_ready(pods["runc"])
    node.remove_pod(pods["runc"])
    assert "nothing is installed" in node.pyshim("uninstall")
