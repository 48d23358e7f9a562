"""A cluster of one node, in the enclosure: etcd, Kubernetes' own programs, and containerd.

The node has the shipped drop-in for containerd and the shipped RuntimeClass (`cluster`), or nothing of pyshim
(`bare_cluster`). Most pods of the tests name their node. Programs write where they always do; /var/lib and /var/log are
private to the enclosure, and the kubelet's directory is a file system of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from integration.framework import cri_session, crio, zygote
from integration.framework.bare_node import BareNode, layouts
from integration.framework.containerd import Containerd
from integration.framework.cri import CRI_IMAGE, HANDLER, Cri
from integration.framework.daemon import Directories, Program
from integration.framework.leaks import cgroup_roots
from integration.framework.waiting import eventually
from protos.cri import v1_pb2 as pb

from . import peers

PROJECT = Path(__file__).resolve().parents[2]
GROUND = Path("/run/pyshim-integration/kubernetes")
NODE = "node1"
BUS = GROUND / "bus"
"""The place of the node's system bus."""
ADDRESS = "192.0.2.10"
"""Of a link of the enclosure's own (RFC 5737): the kubelet wants a node address that is no loopback."""
SERVICE_ADDRESS = "10.96.0.1"
"""Of the API server as pods know it. It is an address of the node, so no kube-proxy has to translate it."""
SERVER = "https://127.0.0.1"
TOKEN = "test"
START_UP_TAINT = "pyshim.io/not-ready"
"""That of the chart's values."""
KUBELET_FILES = Path("/var/lib/kubelet")
_KUBELET_CONFIG = GROUND / "kubelet.yaml"
_ETCD = "http://127.0.0.1:2379"
_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
_RUNTIME_CLASS = PROJECT / "configs" / "kubernetes" / "runtimeclass-pykata.yaml"
KUBECONFIG: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "c", "cluster": {"server": SERVER, "insecure-skip-tls-verify": True}}],
    "users": [{"name": "u", "user": {"token": TOKEN}}],
    "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "x",
}
_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "failSwapOn": False,
    "failCgroupV1": False,
    # The disk of a test machine may be nearly full: that is not what is tested.
    "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
    # Small enough for a test to see rotation; the default is 10Mi.
    "containerLogMaxSize": "64Ki",
    "containerLogMonitorInterval": "3s",
    # How old the figures of volumes may be, by which pods are evicted; the default is 1m.
    "volumeStatsAggPeriod": "5s",
    "volumePluginDir": f"{GROUND}/volume-plugins",
    "featureGates": peers.GATES,
}
# The kubelet sets these for the whole machine.
_SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


class Refused(Exception):
    """The API server's answer to a request it does not take."""


class Cluster:
    """The API server's client, and the node's containerd."""

    def __init__(self, cri: Cri, kubelet: Daemon) -> None:
        self.cri = cri
        self.kubelet = kubelet
        self.warnings: list[str] = []
        """Those of the last call's answer."""
        self._tls = ssl.create_default_context()
        self._tls.check_hostname = False
        self._tls.verify_mode = ssl.CERT_NONE

    def call(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", within_s: float = 60
    ) -> Any:
        """The answer as an object, or else as text. Raises Refused with the server's message."""
        answer, has_object = self._ask(method, path, body, kind, within_s)
        return json.loads(answer) if has_object else answer

    def watch(self, path: str, since: str) -> list[Any]:
        """The objects of a kind, as they became one after the other after version `since` and until now."""
        answer, _ = self._ask("GET", f"{path}watch=1&resourceVersion={since}&timeoutSeconds=2", None, "", 60)
        return [json.loads(line)["object"] for line in answer.splitlines()]

    def _ask(self, method: str, path: str, body: Any, kind: str, within_s: float) -> tuple[str, bool]:
        """The answer's text, and whether that is an object."""
        request = urllib.request.Request(
            f"{SERVER}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": kind},
        )
        try:
            with urllib.request.urlopen(request, timeout=within_s, context=self._tls) as reply:
                self.warnings = reply.headers.get_all("Warning", [])
                return reply.read().decode(errors="replace"), "json" in reply.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            raise Refused(error.read().decode(errors="replace")) from error

    def node(self) -> Any:
        return self.call("GET", f"/api/v1/nodes/{NODE}")

    def create(self, kind: str, value: Mapping[str, Any]) -> Any:
        """`kind` is the plural in a path of the namespace `default`."""
        return self.call("POST", f"/api/v1/namespaces/default/{kind}", value)

    def pod(self, name: str) -> Any:
        return self.call("GET", f"/api/v1/namespaces/default/pods/{name}")

    def log(self, pod: str, container: str = "main") -> str:
        return str(self.call("GET", f"/api/v1/namespaces/default/pods/{pod}/log?container={container}"))

    def events(self, pod: str) -> list[tuple[str, str]]:
        """Reason and message of each event of the pod, oldest first."""
        listed = self.call("GET", f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={pod}")
        return [(item["reason"], item.get("message", "")) for item in listed["items"]]

    def event(self, pod: str, reason: str) -> str:
        """The message of the pod's first event of that reason, once there is one."""
        return eventually(
            lambda: next((text or " " for found, text in self.events(pod) if found == reason), ""),
            what=lambda: f"an event {reason} of pod {pod}; there are {self.events(pod)}",
        )

    def phase(self, pod: str, *phases: str) -> Any:
        """The pod, once it is in one of the phases."""

        def reached() -> Any:
            found = self.pod(pod)
            return found if found["status"]["phase"] in phases else None

        return eventually(
            reached,
            what=lambda: f"pod {pod} is {' or '.join(phases)}: {self.pod(pod)['status']}; {self.events(pod)}",
            within_s=250,
            every_s=0.3,
        )

    def configure_kubelet(self, **settings: Any) -> None:
        """The kubelet's configuration: the usual, earlier settings, and `settings`."""
        before = json.loads(_KUBELET_CONFIG.read_text()) if _KUBELET_CONFIG.exists() else _KUBELET
        _KUBELET_CONFIG.write_text(json.dumps({**before, **settings}))

    @contextlib.contextmanager
    def kubelet_with(self, **settings: Any) -> Iterator[None]:
        """The kubelet has been restarted with `settings`; at the end of the block it is so with those it had before."""
        before = _KUBELET_CONFIG.read_text()
        self.configure_kubelet(**settings)
        self._restart_kubelet()
        try:
            yield
        finally:
            _KUBELET_CONFIG.write_text(before)
            self._restart_kubelet()

    def _restart_kubelet(self) -> None:
        self.kubelet.stop()
        for state in KUBELET_FILES.glob("*_manager_state"):  # of another policy, with which it would not start
            state.unlink()
        self.start_kubelet()

    def start_kubelet(self) -> None:
        """It runs, and has said that the node is ready."""
        begun_s = time.time()
        self.kubelet.start()
        eventually(
            lambda: _node_is_ready(self, begun_s),
            what=lambda: f"the node is ready: {_log_end('kubelet')}",
            within_s=200,
            every_s=0.3,
        )

    @contextlib.contextmanager
    def runtime_class(self, name: str, handler: str, **overhead: str) -> Iterator[None]:
        """A further RuntimeClass."""
        made = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": handler}
        made |= {"overhead": {"podFixed": overhead}} if overhead else {}
        self.call("POST", _CLASSES, made)
        try:
            yield
        finally:
            self.call("DELETE", f"{_CLASSES}/{name}")

    def stats(self) -> Any:
        """The kubelet's own summary."""
        return self.call("GET", f"/api/v1/nodes/{NODE}/proxy/stats/summary")

    def delete(self, pod: str, grace_s: int | None = None) -> None:
        """The pod is gone from the API, so the kubelet has ended all of it. A pod that is not there is fine."""
        query = "" if grace_s is None else f"?gracePeriodSeconds={grace_s}"
        with contextlib.suppress(Refused):
            self.call("DELETE", f"/api/v1/namespaces/default/pods/{pod}{query}")
        eventually(lambda: not self.exists(pod), what=f"pod {pod} is gone", within_s=150, every_s=0.3)

    def remove_ended_sandboxes(self) -> None:
        """As the kubelet does once a minute with the sandboxes of pods that are gone."""
        for sandbox in self.cri.call("ListPodSandbox").items:
            if sandbox.state == pb.SANDBOX_NOTREADY:
                self.cri.call("RemovePodSandbox", pod_sandbox_id=sandbox.id)

    def exists(self, pod: str) -> bool:
        try:
            self.pod(pod)
        except Refused:
            return False
        return True

    @contextlib.contextmanager
    def running(self, name: str, *containers: Mapping[str, Any], **spec: Any) -> Iterator[str]:
        """A pod of the class `pykata` for the block; `containers` and `spec` as `manifest` takes them."""
        self.create("pods", manifest(name, *containers, **spec))
        try:
            yield name
        finally:
            self.delete(name, 1)


def container(script: str, name: str = "main", **more: Any) -> dict[str, Any]:
    """A container that runs a line of shell."""
    return {"name": name, "image": CRI_IMAGE, "imagePullPolicy": "Never", "command": ["sh", "-c", script], **more}


def manifest(name: str, *containers: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    """A pod on the node; a key of `spec` replaces what is usual in these tests."""
    usual = {
        "nodeName": NODE,
        "runtimeClassName": "pykata",
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    metadata = {"name": name, "labels": {"app": name}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {**usual, "containers": list(containers), **spec},
    }


@contextlib.contextmanager
def cluster(more_config: str = "", default: str = HANDLER) -> Iterator[Cluster]:
    """A node that is ready and has the RuntimeClass, until the end of the block. containerd's configuration has
    `more_config`, and `default` for pods without a class.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ground())
        stack.enter_context(_machine())
        if crio.is_chosen():
            cri = stack.enter_context(cri_session.crio_daemon(PROJECT / "bin"))
        else:
            cri = stack.enter_context(cri_session.cri_daemon(PROJECT / "bin", more_config, default=default))
        made = stack.enter_context(_control_plane(cri))
        made.call("POST", _CLASSES, yaml.safe_load(_RUNTIME_CLASS.read_text()))
        yield made


@contextlib.contextmanager
def bare_cluster() -> Iterator[Cluster]:
    """A node that is ready, where nothing of pyshim is, until the end of the block. Its first pods are to be runc's."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ground())
        stack.enter_context(_machine())
        stack.enter_context(cri_session.pod_network())
        node = BareNode(ground=cri_session.GROUND, state=Path("/run/containerd"))
        layout = next(iter(layouts(node.ground, cri_session.PAUSE_IMAGE).values()))
        stack.enter_context(node.laid_out(layout))
        zygote.keep_away()
        cri_session.make_furniture(node.state)
        node.restart_containerd()
        # Started by the node's own command; this is its client.
        daemon = Containerd(Directories(root=node.ground, state=node.state), binaries=PROJECT / "bin")
        cri = Cri(daemon, logs=GROUND / "pods")
        stack.callback(cri.close)
        cri_session.import_images(daemon)
        taints = [{"key": START_UP_TAINT, "effect": "NoSchedule"}]
        yield stack.enter_context(_control_plane(cri, registerWithTaints=taints))


@contextlib.contextmanager
def _control_plane(cri: Cri, **settings: Any) -> Iterator[Cluster]:
    """All but the runtime; `settings` are the kubelet's, whose cAdvisor finds containerd by an option of its own."""
    with contextlib.ExitStack() as stack:
        _write_keys()
        stack.enter_context(_kubelet_files())
        socket = cri.daemon.directories.socket
        # cAdvisor's way to containerd; from 1.37 on the kubelet has no such option.
        cadvisor = [f"--containerd={socket}"] if peers.MINOR < 37 else []
        kubelet = Daemon(str(peers.PROGRAMS / "kubelet"), *_kubelet(), *cadvisor)
        made = Cluster(cri, kubelet)
        stack.enter_context(Daemon("etcd", *_etcd()))
        stack.enter_context(Daemon(str(peers.PROGRAMS / "kube-apiserver"), *_api_server()))
        eventually(lambda: _is_ready(made), what=lambda: f"the API server answers: {_log_end('kube-apiserver')}")
        stack.enter_context(Daemon(str(peers.PROGRAMS / "kube-controller-manager"), *_controllers()))
        stack.enter_context(Daemon(str(peers.PROGRAMS / "kube-scheduler"), *_scheduler()))
        made.configure_kubelet(containerRuntimeEndpoint=f"unix://{socket}", **settings)
        stack.callback(kubelet.stop)
        made.start_kubelet()
        eventually(lambda: _has_account(made), what=lambda: f"an account: {_log_end('kube-controller-manager')}")
        yield made


@contextlib.contextmanager
def _ground() -> Iterator[None]:
    """The directories of the cluster and of its containerd; another cluster may follow."""
    GROUND.mkdir(parents=True)
    try:
        yield
    finally:
        for directory in filter(Path.exists, (GROUND, cri_session.GROUND)):
            shutil.rmtree(directory)


@contextlib.contextmanager
def _machine() -> Iterator[None]:
    """A link with the node's address, a private /var/log, the directories that a node's first pods make and that stay.

    The machine's settings are put back at the end, which SIGTERM brings about, too.
    """
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = {name: Path("/proc/sys", name).read_text() for name in _SYSCTLS}
    subprocess.run(["mount", "-t", "tmpfs", "logs", "/var/log"], check=True)
    subprocess.run(["ip", "link", "add", NODE, "type", "bridge"], check=True)
    subprocess.run(["ip", "address", "add", f"{ADDRESS}/24", "dev", NODE], check=True)
    subprocess.run(["ip", "address", "add", f"{SERVICE_ADDRESS}/32", "dev", NODE], check=True)
    subprocess.run(["ip", "link", "set", NODE, "up"], check=True)
    for directory in ("/run/containerd", "/run/pyshim/nri"):
        Path(directory).mkdir(parents=True, exist_ok=True)
    for hierarchy in dict(cgroup_roots()).values():
        for quality in ("besteffort", "burstable"):
            (hierarchy / "kubepods" / quality).mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "delete", NODE], check=True)
        subprocess.run(["umount", "/var/log"], check=True)
        for name, value in before.items():
            Path("/proc/sys", name).write_text(value)
        signal.signal(signal.SIGTERM, former)


@contextlib.contextmanager
def _kubelet_files() -> Iterator[None]:
    """The kubelet's directory is a tmpfs. On an overlay files have another device than their directory, and the kubelet
    counts only what has the device of a volume's directory: every volume would be empty for it.
    """
    KUBELET_FILES.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "kubelet", KUBELET_FILES], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--recursive", KUBELET_FILES], check=True)


class Daemon(Program):
    """One program of the cluster, with its log in GROUND."""

    def __init__(self, program: str, *arguments: str) -> None:
        name = Path(program).name
        super().__init__(name, GROUND / f"{name}.log")
        self._command = (program, *arguments)

    def start(self) -> None:
        self._run(self._command, environment=_environment(), directory=GROUND)


def _environment() -> dict[str, str]:
    bus = f"unix:path={BUS}"
    return {"PATH": os.defpath + ":/usr/sbin:/sbin", "HOME": "/root", "DBUS_SYSTEM_BUS_ADDRESS": bus}


def _log_end(name: str) -> str:
    return (GROUND / f"{name}.log").read_text(errors="replace")[-3000:]


def _write_keys() -> None:
    """A token, the key pair of service accounts, and the kubelet's files."""
    (GROUND / "tokens.csv").write_text(f'{TOKEN},admin,1,"system:masters"\n')
    subprocess.run(["openssl", "genrsa", "-out", GROUND / "sa.key", "2048"], check=True, capture_output=True)
    subprocess.run(
        ["openssl", "rsa", "-in", GROUND / "sa.key", "-pubout", "-out", GROUND / "sa.pub"],
        check=True,
        capture_output=True,
    )
    (GROUND / "kubeconfig").write_text(json.dumps(KUBECONFIG))


def _etcd() -> list[str]:
    peer = "http://127.0.0.1:2380"
    return [
        f"--data-dir={GROUND}/etcd",
        f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    ]


def _api_server() -> list[str]:
    return [
        f"--etcd-servers={_ETCD}",
        "--secure-port=443",
        f"--advertise-address={ADDRESS}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--cert-dir={GROUND}/api-server",
        f"--token-auth-file={GROUND}/tokens.csv",
        "--authorization-mode=AlwaysAllow",
        "--service-cluster-ip-range=10.96.0.0/24",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={GROUND}/sa.pub",
        f"--service-account-signing-key-file={GROUND}/sa.key",
        "--allow-privileged=true",
        # A webhook behind a Service is called at its pods: there is no kube-proxy.
        "--enable-aggregator-routing=true",
        *(f"--feature-gates={gate}=true" for gate in peers.GATES),
    ]


def _controllers() -> list[str]:
    return [
        *_client_of_the_api_server(),
        f"--root-ca-file={GROUND}/api-server/apiserver.crt",
        f"--service-account-private-key-file={GROUND}/sa.key",
    ]


def _scheduler() -> list[str]:
    return _client_of_the_api_server()


def _client_of_the_api_server() -> list[str]:
    kinds = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    return [*(f"--{kind}={GROUND}/kubeconfig" for kind in kinds), "--leader-elect=false", "--bind-address=127.0.0.1"]


def _kubelet() -> list[str]:
    return [
        f"--config={GROUND}/kubelet.yaml",
        f"--kubeconfig={GROUND}/kubeconfig",
        f"--hostname-override={NODE}",
        f"--node-ip={ADDRESS}",
        f"--cert-dir={GROUND}/kubelet-certificates",
    ]


def _is_ready(cluster: Cluster) -> bool:
    try:
        return bool(cluster.call("GET", "/readyz", within_s=5) == "ok")
    except (OSError, Refused):
        return False


def _node_is_ready(cluster: Cluster, since_s: float) -> bool:
    """The kubelet has said so after `since_s`, in seconds since the epoch, and no controller doubts it any more."""
    try:
        node = cluster.call("GET", f"/api/v1/nodes/{NODE}", within_s=5)
    except (OSError, Refused):
        return False
    ready = next((each for each in node["status"]["conditions"] if each["type"] == "Ready"), {"status": "Unknown"})
    if ready["status"] != "True" or _seconds(ready["lastHeartbeatTime"]) < int(since_s):
        return False
    return all(not each["key"].startswith("node.kubernetes.io/") for each in node["spec"].get("taints", ()))


def _seconds(time_stamp: str) -> float:
    return datetime.fromisoformat(time_stamp).timestamp()


def _has_account(cluster: Cluster) -> bool:
    try:
        return bool(cluster.call("GET", "/api/v1/namespaces/default/serviceaccounts/default"))
    except Refused:
        return False


def missing() -> list[str]:
    """The programs that these tests need and this machine lacks."""
    found = [name for name in ("etcd", "openssl") if shutil.which(name) is None]
    return found + [str(peers.PROGRAMS / name) for name in peers.NAMES if not (peers.PROGRAMS / name).exists()]
