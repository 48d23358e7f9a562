"""The shipped file for containerd's CRI plugin, unchanged, on Debian's configuration."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos.cri import v1_pb2 as pb
from protos.cri import v1_pb2_grpc

from .framework.containerd import DEBIAN
from .framework.waiting import eventually

SHIPPED = Path(__file__).resolve().parents[1] / "configs" / "containerd" / "containerd-1.x-pykata.toml"
OPT = """\
  [plugins."io.containerd.internal.v1.opt"]
    path = "/run/node/opt"
"""


@pytest.fixture
def node() -> Iterator[grpc.Channel]:
    """A channel to a containerd that runs as on a Debian node, in directories of its own."""
    ground = Path("/run/node")
    ground.mkdir()
    config = ground / "config.toml"
    config.write_text(DEBIAN + OPT + SHIPPED.read_text())
    socket = ground / "containerd.sock"
    places = [f"--root={ground}/root", f"--state={ground}/state", f"--address={socket}"]
    with (ground / "log").open("wb") as log:
        daemon = subprocess.Popen(["containerd", f"--config={config}", *places], stdout=log, stderr=log)
    try:
        with grpc.insecure_channel(f"unix://{socket}") as channel:
            eventually(
                lambda: _answers(channel, daemon),
                what=lambda: f"the CRI plugin answers: {(ground / 'log').read_text()[-2000:]}",
            )
            yield channel
    finally:
        daemon.terminate()
        daemon.wait()
        subprocess.run(["rm", "-rf", str(ground)], check=True)


def _answers(channel: grpc.Channel, daemon: subprocess.Popen[bytes]) -> bool:
    assert daemon.poll() is None, f"containerd exited {daemon.returncode}"
    try:
        v1_pb2_grpc.RuntimeServiceStub(channel).Version(pb.VersionRequest(), timeout=5)
    except grpc.RpcError as exc:
        if exc.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise AssertionError("containerd runs without its CRI plugin") from exc
        return False
    return True


def test_the_cri_plugin_loads_with_runc_as_default(node: grpc.Channel) -> None:
    reply = v1_pb2_grpc.RuntimeServiceStub(node).Status(pb.StatusRequest(verbose=True), timeout=10)

    config = json.loads(reply.info["config"])
    assert config["containerd"]["defaultRuntimeName"] == "runc"
    assert set(config["containerd"]["runtimes"]) >= {"runc", "pykata"}
    assert config["cni"]["binDir"] == "/usr/lib/cni"
