"""A pod of two containers with a network on the real stack, driven as containerd drives it, one fault in its shim."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.any_pb2 import Any as PbAny

from pyshim.ttrpc import TtrpcError
from tests.failpoints.shim import write_launcher

from . import oci, processes
from .direct import DirectShim, StartFailed, direct_shim
from .leaks import cgroup_roots
from .networks import PodNetwork, pod_network
from .runtime import Runtime
from .waiting import eventually

_KINDS = {
    "containerd": ("io.kubernetes.cri.container-type", "io.kubernetes.cri.sandbox-id"),
    "cri-o": ("io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri-o.SandboxID"),
}
"""The annotations that say what a container is and whose, by who writes them."""
_OURS = ("/run/vc", "/run/kata-containers", "/run/pyshim")
_EXIT_S = 20.0


@dataclass(slots=True)
class FaultyPod:
    """`error` is the error that the driver got last, empty when all went well."""

    name: str
    shim: DirectShim
    app_shim: DirectShim
    network: PodNetwork
    options: PbAny | None = None
    """Of `start` and Create."""
    error: str = ""
    calls: list[str] = field(default_factory=list)
    refused: list[TtrpcError] = field(default_factory=list)
    """The errors of all calls."""

    @property
    def app(self) -> str:
        return self.app_shim.container

    def live(self) -> None:
        """Both containers and an exec run, the exec to its end; the first call that fails ends it."""
        try:
            self.boot()
            self.one_round(upto="Delete e1")
        except (TtrpcError, StartFailed, OSError) as error:
            self.error = str(error)

    def start_shim(self) -> None:
        """The shim serves. Raises StartFailed."""
        self.shim.start(self.options)

    def boot(self) -> None:
        """The sandbox runs. Raises StartFailed, TtrpcError."""
        if not self.shim.address:
            self.start_shim()
        self._call("Create", self.name, bundle=str(self.shim.bundle), options=self.options)
        self._call("Start", self.name)

    def start_app(self) -> None:
        """The app container runs. Raises TtrpcError."""
        self._call("Create", self.app, bundle=str(self.app_shim.bundle), options=self.options)
        self._call("Start", self.app)

    def end_app(self) -> None:
        """It is deleted. Raises TtrpcError."""
        self._call("Kill", self.app, signal=9, all=True)
        self._call("Wait", self.app)
        self._call("Delete", self.app)

    def one_round(self, *, upto: str = "Delete") -> None:
        """The app container runs, and an exec in it; both end. Raises TtrpcError."""
        self.start_app()
        self._call("Exec", self.app, exec_id="e1", spec=oci.process("true"))
        self._call("Start", self.app, exec_id="e1")
        self._call("Wait", self.app, exec_id="e1")
        self._call("Delete", self.app, exec_id="e1")
        if upto == "Delete":
            self.end_app()

    def end(self) -> None:
        """containerd's calls of the shim at the end of a pod, whatever has become of it."""
        for container in (self.app, self.name):
            with contextlib.suppress(TtrpcError, OSError):
                self._call("Kill", container, 10, signal=9, all=True)
                self._call("Wait", container, _EXIT_S)
        for container in (self.app, self.name):
            with contextlib.suppress(TtrpcError, OSError):
                self._call("Delete", container, 15)
        with contextlib.suppress(TtrpcError, OSError):
            self._call("Shutdown", self.name, 15)

    def clean_up(self) -> None:
        """All that containerd does with a pod that is to go: the shim's calls, then `delete` for each container."""
        self.end()
        self.app_shim.delete()
        self.shim.delete()

    def _call(self, method: str, container: str, within_s: float = 120.0, **fields: Any) -> None:
        self.calls.append(f"{method} {container}")
        try:
            self.shim.call(method, None, within_s, id=container, **fields)
        except TtrpcError as error:
            self.refused.append(error)
            raise

    def left(self) -> list[str]:
        """The remains of the pod on the host."""
        found = [f"process {process}" for process in processes.find(self.name) if "shim" in str(process)]
        found += [f"process {p}" for p in processes.find(self.name) if "qemu" in str(p) or "virtiofsd" in str(p)]
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            target = line.split()[4]
            if self.name in line and not target.startswith("/run/netns"):
                found.append(f"mount {target}")
        for top in _OURS:
            for directory, names, files in os.walk(top):
                found += [f"file {directory}/{name}" for name in (*names, *files) if self.name in name]
        for hierarchy, root in cgroup_roots():
            found += [f"cgroup {hierarchy}:{path}" for path, _, _ in os.walk(root) if self.name in path]
        found += [f"link {link}" for link in self._links() if link not in ("lo", self.network.interface)]
        found += [f"qdisc {line}" for line in self._tc("qdisc", "show") if "ingress" in line]
        if self.shim.address and os.path.lexists(self.shim.socket_path):
            found.append(f"socket {self.shim.socket_path}")
        return found

    def _links(self) -> list[str]:
        command = ("ip", "-n", self.network.namespace.name, "-json", "link", "show")
        shown = subprocess.run(command, check=True, capture_output=True).stdout
        return [link["ifname"] for link in json.loads(shown)]

    def _tc(self, *words: str) -> list[str]:
        command = ("tc", "-n", self.network.namespace.name, *words)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

    def assert_nothing_left(self) -> None:
        left: list[str] = []

        def look() -> bool:
            left[:] = self.left()
            return not left

        eventually(look, what=lambda: f"{self.name} is gone; left: {left}", every_s=0.1)


def _faulty_binaries(binaries: Path, runtime: Runtime, directory: Path) -> Path:
    """A directory with the launcher of a shim that meets faults."""
    directory.mkdir(parents=True)
    write_launcher(str(binaries / runtime.binary), str(directory / runtime.binary))
    return directory


@contextlib.contextmanager
def faulty_pod(
    runtime: Runtime,
    binaries: Path,
    ground: Path,
    rootfs: Path,
    *,
    name: str,
    subnet: int,
    faults: str = "",
    command: list[str] | None = None,
    written_by: str = "containerd",
    config: PbAny | None = None,
) -> Iterator[FaultyPod]:
    """A pod called `name` whose shim will meet `faults`; its app runs `command`, which may crash the guest's kernel.

    `config`: the options that name another configuration.

    Nothing is started yet, and nothing is left afterwards.
    """
    app = f"{name}-app"
    with pod_network(name, subnet=subnet) as network, contextlib.ExitStack() as stack:
        specs = {}
        for container, kind, args in ((name, "sandbox", None), (app, "container", command)):
            spec = oci.spec(*(args or ["sleep", "1000"]), name=container, rootfs=rootfs)
            spec["annotations"] = dict(zip(_KINDS[written_by], (kind, name), strict=True))
            for namespace in spec["linux"]["namespaces"]:
                if namespace["type"] == "network":
                    namespace["path"] = str(network.namespace)
            if args:
                spec["linux"]["readonlyPaths"].remove("/proc/sysrq-trigger")
            specs[container] = spec
        shim = stack.enter_context(direct_shim(runtime, binaries, name, ground / name, specs[name]))
        if faults:
            shim.environment["PYSHIM_FAILPOINTS"] = faults
            shim.environment["PATH"] = (
                f"{_faulty_binaries(binaries, runtime, ground / name / 'bin')}:{os.environ['PATH']}"
            )
        other = stack.enter_context(direct_shim(runtime, binaries, app, ground / app, specs[app]))
        yield FaultyPod(name=name, shim=shim, app_shim=other, network=network, options=config)
