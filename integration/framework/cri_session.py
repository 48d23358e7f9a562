"""The session's CRI containerd: own root and state beside the plain one's, CNI's bridge plugin, both images.

The configuration given to containerd is the shipped drop-in of configs/containerd: what is tested is what is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from integration.framework import stubs
from pyshim.node.install.handlers import Handler

from . import crio, erofs, images, releases
from .cgroups import STATES
from .containerd import Containerd, remove_daemon_files
from .cri import CRI_IMAGE, HANDLER, Cri, Pod
from .daemon import Directories
from .waiting import eventually

PROJECT = Path(__file__).resolve().parents[2]
GROUND = Path("/run/pyshim-integration/cri")
STATE = Path("/run/containerd-cri")
PAUSE_IMAGE = "docker.io/local/pause:test"
BRIDGE = "cnipyshim"
REMOTE_HANDLER = "pykata-remote"
SANDBOX_API_HANDLER = "pykata-sandbox-api"
"""Its sandboxes are asked for through containerd's Sandbox API, where containerd has it, and have a stand-in as VM."""
SANDBOX_API_VM_HANDLER = "pykata-sandbox-api-vm"
"""As that one, with the VM that a test's `SANDBOX_API_VM_CONFIG` says."""
STAND_IN_HANDLER = "pykata-stand-in"
"""Its pods have a program in QEMU's place: no VM, so they are made and gone within a second."""
LAYERS_HANDLER = "pykata-layers"
"""Its images are those of the EROFS snapshotter, where containerd leaves their layers to the shim."""
RUNC_HANDLER = "runc"
NRI_SOCKET = GROUND / "nri" / "nri.sock"
STAND_IN_CONFIG = GROUND / "stubs" / "configuration.toml"
SANDBOX_API_VM_CONFIG = GROUND / "sandbox-api" / "configuration.toml"
LAYERS_CONFIG = GROUND / "layers" / "configuration.toml"
REMOTE_CONFIG = GROUND / "remote" / "configuration.toml"
"""Written by the tests that use the handler."""
SUBNET, SUBNET6 = "10.233.7.0/24", "fd00:233:7::/64"
GATEWAY, GATEWAY6 = "10.233.7.1", "fd00:233:7::1"
MTU = 1400
NEIGHBOURS = {"10.233.7.250": "02:00:5e:00:07:fa", "fd00:233:7::fa": "02:00:5e:00:07:fb"}
"""Permanent entries that every pod's namespace gets from CNI."""
_PLUGINS = Path("/usr/lib/cni")
# Without a word this program of ours holds its container open and reaps, and it is static.
_PAUSE_PROGRAM = PROJECT / ".build" / "guest" / "relay"
_NEIGHBOURS_PLUGIN = Path(__file__).with_name("cni_neighbours.py")
# libcni keeps results there whatever its configuration says: made private for the session.
_VAR_LIB = Path("/var/lib")
# Directories that containerd makes with its first pod and keeps.
_FURNITURE = (
    "io.containerd.grpc.v1.cri/sandboxes",
    "io.containerd.grpc.v1.cri/containers",
    "io.containerd.runtime.v2.task/k8s.io",
    "io.containerd.sandbox.controller.v1.shim/k8s.io",
)

# The same of runc's shim, whatever the state directory of its containerd.
_RUNC_STATE = Path("/run/containerd/runc/k8s.io")


def _network() -> str:
    return json.dumps(
        {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": BRIDGE,
                    "isGateway": True,
                    "ipMasq": False,
                    "mtu": MTU,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": str(GROUND / "cni" / "leases"),
                        "ranges": [[{"subnet": SUBNET}], [{"subnet": SUBNET6}]],
                        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
                    },
                },
                {"type": _NEIGHBOURS_PLUGIN.name, "neighbours": NEIGHBOURS},
            ],
        }
    )


def _cri_config(pause: str, settings: str, default: str) -> str:
    """The shipped drop-in, with what a test host sets beside it."""
    release = releases.chosen()
    shipped = release.drop_in.read_text().replace('"podsandbox"', f'"{releases.sandboxer()}"')
    table = release.cri_table
    body = "\n".join(line for line in shipped.splitlines() if not line.startswith("version"))
    return f"""{body}

{release.cri_config(sandbox_image=pause, cni=GROUND / "cni", nri=NRI_SOCKET.parent, more=settings)}
[{table}.containerd]
  default_runtime_name = "{default}"
[{table}.containerd.runtimes.{REMOTE_HANDLER}]
  runtime_type = "io.containerd.pykata.v2"
  privileged_without_host_devices = true
  pod_annotations = ["io.katacontainers.*"]
  [{table}.containerd.runtimes.{REMOTE_HANDLER}.options]
    ConfigPath = "{REMOTE_CONFIG}"
[{table}.containerd.runtimes.{SANDBOX_API_HANDLER}]
  runtime_type = "io.containerd.pykata.v2"
  pod_annotations = ["io.katacontainers.*"]
  {'sandboxer = "shim"' if release.has_sandbox_api else ""}
  [{table}.containerd.runtimes.{SANDBOX_API_HANDLER}.options]
    ConfigPath = "{stubs.config(GROUND)}"
[{table}.containerd.runtimes.{SANDBOX_API_VM_HANDLER}]
  runtime_type = "io.containerd.pykata.v2"
  {'sandboxer = "shim"' if release.has_sandbox_api else ""}
  [{table}.containerd.runtimes.{SANDBOX_API_VM_HANDLER}.options]
    ConfigPath = "{SANDBOX_API_VM_CONFIG}"
{_layers_handler(table) if release.leaves_mounts_to_shims else ""}\
{_runc_handler(shipped, table)}[{table}.containerd.runtimes.{STAND_IN_HANDLER}]
  runtime_type = "io.containerd.pykata.v2"
  {f'sandboxer = "{releases.sandboxer()}"' if release.has_sandbox_api else ""}
  [{table}.containerd.runtimes.{STAND_IN_HANDLER}.options]
    ConfigPath = "{STAND_IN_CONFIG}"
"""


def _runc_handler(shipped: str, table: str) -> str:
    """The table of runc's handler, where the shipped file has none."""
    head = f"[{table}.containerd.runtimes.{RUNC_HANDLER}]"
    return "" if head in shipped else f'{head}\n  runtime_type = "io.containerd.runc.v2"\n'


def _layers_handler(table: str) -> str:
    head = f"[{table}.containerd.runtimes.{LAYERS_HANDLER}"
    return f"""{head}]
  runtime_type = "io.containerd.pykata.v2"
  snapshotter = "{erofs.SNAPSHOTTER}"
  sandboxer = "{releases.sandboxer()}"
  {head}.options]
    ConfigPath = "{LAYERS_CONFIG}"
"""


@contextlib.contextmanager
def pod_network() -> Iterator[None]:
    """The network's configuration and its bridge, which the plugin would make with the first pod and keep."""
    (GROUND / "cni" / "net.d").mkdir(parents=True)
    (GROUND / "cni" / "net.d" / "10-pods.conflist").write_text(_network())
    (GROUND / "cni" / "bin").mkdir()
    for plugin in (*_PLUGINS.iterdir(), _NEIGHBOURS_PLUGIN):
        (GROUND / "cni" / "bin" / plugin.name).symlink_to(plugin)
    with private_var_lib(GROUND / "cni" / "state"):
        subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], check=True)
        try:
            yield
        finally:
            subprocess.run(["ip", "link", "delete", BRIDGE], check=True)


@contextlib.contextmanager
def private_var_lib(layers: Path) -> Iterator[None]:
    """What CNI's plugins write below their fixed path /var/lib goes into `layers`.

    An overlay shows it here only: a directory made on the host's own disk, and removed from it at the end, would take a
    second test run's mount on it along.
    """
    for name in ("upper", "work"):
        (layers / name).mkdir(parents=True)
    options = f"lowerdir={_VAR_LIB},upperdir={layers}/upper,workdir={layers}/work"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "cni", str(_VAR_LIB)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(_VAR_LIB)], check=True)


@contextlib.contextmanager
def crio_daemon(binaries: Path, registries: Mapping[str, str] | None = None) -> Iterator[Cri]:
    """A CRI-O with images and network, until the end of the block; `registries` as in `crio.image_source`."""
    where = crio.CrioDirectories(root=GROUND / "crio", state=Path("/run/crio"))
    where.root.mkdir(parents=True)
    # CRI-O leaves out a runtime whose configuration is not there when it starts.
    REMOTE_CONFIG.parent.mkdir()
    REMOTE_CONFIG.touch()
    with pod_network():
        daemon = crio.Crio(
            where,
            handlers=(
                Handler(name=HANDLER, source="", config_path=str(PROJECT / "configs/configuration-qemu.toml")),
                Handler(name=STAND_IN_HANDLER, source="", config_path=str(stubs.config(GROUND))),
                Handler(name=REMOTE_HANDLER, source="", config_path=str(REMOTE_CONFIG)),
            ),
            shim=binaries / "containerd-shim-pykata-v2",
            cni=GROUND / "cni",
            nri=NRI_SOCKET.parent,
            pause=PAUSE_IMAGE,
        )
        cri: Cri | None = None
        try:
            # SIGTERM ends it, for whose end CRI-O waits in StopPodSandbox. Not `sleep`, which critest looks for.
            wanted = {CRI_IMAGE: (), PAUSE_IMAGE: ("sh", "-c", "trap exit TERM; tail -f /dev/null & wait")}
            with crio.image_source(where.root, wanted, registries or {}):
                daemon.start()
                cri = Cri(daemon, logs=GROUND / "pods")
                for name in wanted:
                    cri.pull(name)
            # What CRI-O and a shim make with their first pod, and keep, is there before a leak check looks.
            with cri.pod(handler=STAND_IN_HANDLER) as first:
                first.start()
            os.truncate(where.log, 0)  # the shim of that pod is no test's
            yield cri
        finally:
            if cri is not None:
                cri.close()
            daemon.stop()
            crio.remove_daemon_files(where)


@contextlib.contextmanager
def cri_daemon(
    binaries: Path,
    more_config: str = "",
    *,
    settings: str = "",
    pause: str = PAUSE_IMAGE,
    default: str = HANDLER,
    log_level: str = "debug",
) -> Iterator[Cri]:
    """A containerd with CRI, images and network, until the end of the block; `pause` is its sandbox image, `default`
    the handler of pods that name none, and `settings` are lines for CRI's own table.
    """
    with pod_network():
        daemon = Containerd(
            Directories(root=GROUND / "containerd", state=STATE),
            binaries=binaries,
            cri=True,
            extra_config=_cri_config(pause, settings, default) + more_config,
            log_level=log_level,
        )
        daemon.start()
        try:
            make_furniture(STATE)
            import_images(daemon, pause)
            cri = Cri(daemon, logs=GROUND / "pods")
            try:
                yield cri
            finally:
                cri.close()
        finally:
            daemon.stop()
            remove_daemon_files(daemon.directories)
            for directory in (_RUNC_STATE, _RUNC_STATE.parent):
                with contextlib.suppress(OSError):  # never made, or not empty
                    directory.rmdir()


def make_furniture(state: Path) -> None:
    """The directories that containerd and runc's shim make with their first pod, and keep, are there."""
    for name in _FURNITURE:
        (state / name).mkdir(parents=True, exist_ok=True)
    _RUNC_STATE.mkdir(parents=True, exist_ok=True)


def import_images(daemon: Containerd, pause: str = PAUSE_IMAGE) -> None:
    """The test image and the pause image, for CRI. As on a node, the latter's program is `/pause`."""
    program = images.layer({"pause": _PAUSE_PROGRAM.read_bytes()}, mode=0o755)
    for name, entrypoint, more in ((CRI_IMAGE, (), ()), (pause, ("/pause",), (program,))):
        archive = GROUND / "image.tar"
        images.write_archive(archive, name, entrypoint, layers=(*images.payload_layers(), *more))
        daemon.ctr("--namespace", "k8s.io", "images", "import", archive)
        archive.unlink()


@pytest.fixture(scope="session")
def cri() -> Iterator[Cri]:
    """The session's containerd with CRI. It is set up before any leak check looks, and checked by each of them."""
    daemon = crio_daemon if crio.is_chosen() else cri_daemon
    with daemon(PROJECT / "bin") as client:
        yield client


@pytest.fixture(scope="module")
def shared_pod(cri: Cri, module_leaves_nothing: None) -> Iterator[Pod]:
    """One pod for a whole file: tests share its VM."""
    with cri.pod() as shared:
        yield settled(shared)


def settled(pod: Pod) -> Pod:
    """The pod of ours, once its state has the pause container that containerd makes: a moment after the answer.

    A file's pod is to be so before the first look at the host.
    """
    if releases.sandboxer() == "podsandbox" and not crio.is_chosen():
        eventually((STATES / pod.id / pod.id / "persist.json").exists, what="the pod's state is written")
    return pod


@pytest.fixture
def pod(shared_pod: Pod, leaves_nothing: None) -> Iterator[Pod]:
    """The file's pod, without any container before and after the test."""
    yield shared_pod
    shared_pod.remove_containers()
