"""The kubelet's part: pods and containers through containerd's CRI socket, with the names the kubelet would use.

`Cri` is one containerd with its CRI plugin on; `Pod` and `Container` are what it made. A refused call raises
`grpc.RpcError`; `refusal` gives the text of one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from protos.cri import v1_pb2 as pb
from protos.cri import v1_pb2_grpc

from . import processes
from .containerd import Containerd
from .crio import Crio
from .images import IMAGE
from .waiting import PATIENCE_S, eventually

HANDLER = "pykata"
CRI_IMAGE = f"docker.io/{IMAGE}"
CALL_S = 60.0
# Longer than any call of a test may take under emulation; the kubelet's own is 2 minutes (4 for RunPodSandbox).
_serial = itertools.count(1)
Security = pb.LinuxContainerSecurityContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What ExecSync gave."""

    code: int
    out: str
    err: str


def refusal(call: Callable[[], object]) -> str:
    """The error text of a call that must be refused."""
    try:
        result = call()
    except grpc.RpcError as exc:
        return str(exc.details())
    raise AssertionError(f"was not refused: {result!r}")


class Cri:
    """A client of one containerd. The channel is opened anew after a restart."""

    def __init__(self, daemon: Containerd | Crio, *, logs: Path) -> None:
        self.daemon = daemon
        self.logs = logs
        self._channel: grpc.Channel | None = None
        self.connect()

    def connect(self, within_s: float = PATIENCE_S) -> None:
        """CRI answers through a new channel."""
        self.close()
        self._channel = grpc.insecure_channel(f"unix://{self.daemon.directories.socket}")
        self._runtime = v1_pb2_grpc.RuntimeServiceStub(self._channel)
        self._images = v1_pb2_grpc.ImageServiceStub(self._channel)
        eventually(self._is_ready, what="the CRI plugin answers", within_s=within_s)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _is_ready(self) -> bool:
        try:
            status = self.call("Status", within_s=5).status
        except grpc.RpcError:
            return False
        # Releases since 1.7 have a third condition, that nothing deprecated is in use: cgroup v1 is, for some.
        return {"RuntimeReady", "NetworkReady"} <= {each.type for each in status.conditions if each.status}

    def call(self, name: str, within_s: float = CALL_S, **fields: Any) -> Any:
        """One call of the RuntimeService: `call("ContainerStats", container_id=...)`."""
        method = getattr(self._runtime, name)
        request = getattr(pb, f"{name}Request", None) or pb.UpdateContainerResourcesRequest
        return method(request(**fields), timeout=within_s)

    def pull(self, image: str) -> None:
        """PullImage."""
        self._images.PullImage(pb.PullImageRequest(image=pb.ImageSpec(image=image)), timeout=CALL_S)

    def run_pod(self, name: str, *, handler: str = HANDLER, **options: Any) -> Pod:
        """RunPodSandbox; see `pod_config` for the options."""
        return Pod.run(self, pod_config(name, self.logs, **options), handler)

    @contextlib.contextmanager
    def pod(self, name: str = "", **options: Any) -> Iterator[Pod]:
        """A pod that is stopped and removed at the end of the block, whatever happened in it."""
        pod = self.run_pod(name or f"pod{next(_serial)}", **options)
        try:
            yield pod
        finally:
            pod.remove()

    def sandboxes(self) -> list[str]:
        return sorted(item.id for item in self.call("ListPodSandbox").items)

    def containers(self) -> list[str]:
        return sorted(item.id for item in self.call("ListContainers").containers)


def pod_config(
    name: str,
    logs: Path,
    *,
    attempt: int = 0,
    hostname: str | None = None,
    host_network: bool = False,
    share_processes: bool = False,
    privileged: bool = False,
    sysctls: Mapping[str, str] | None = None,
    dns: Sequence[str] = (),
    annotations: Mapping[str, str] | None = None,
    cgroup_parent: str = "",
    resources: pb.LinuxContainerResources | None = None,
) -> pb.PodSandboxConfig:
    """A pod as the kubelet describes it; `hostname` None means the pod's name."""
    uid = f"uid-{next(_serial)}"
    namespaces = pb.NamespaceOption(
        network=pb.NODE if host_network else pb.POD, pid=pb.POD if share_processes else pb.CONTAINER
    )
    security = pb.LinuxSandboxSecurityContext(namespace_options=namespaces, privileged=privileged)
    return pb.PodSandboxConfig(
        metadata=pb.PodSandboxMetadata(name=name, uid=uid, namespace="default", attempt=attempt),
        hostname=name if hostname is None else hostname,
        log_directory=str(logs / uid),
        dns_config=pb.DNSConfig(servers=dns) if dns else None,
        annotations=dict(annotations or {}),
        linux=pb.LinuxPodSandboxConfig(
            cgroup_parent=cgroup_parent,
            security_context=security,
            sysctls=dict(sysctls or {}),
            resources=resources,
        ),
    )


@dataclass(slots=True, kw_only=True)
class Pod:
    cri: Cri
    config: pb.PodSandboxConfig
    id: str
    containers: list[Container] = field(default_factory=list)

    @classmethod
    def run(cls, cri: Cri, config: pb.PodSandboxConfig, handler: str = HANDLER) -> Pod:
        Path(config.log_directory).mkdir(parents=True, exist_ok=True)
        reply = cri.call("RunPodSandbox", within_s=2 * CALL_S, config=config, runtime_handler=handler)
        return cls(cri=cri, config=config, id=reply.pod_sandbox_id)

    @property
    def status(self) -> Any:
        return self.cri.call("PodSandboxStatus", pod_sandbox_id=self.id).status

    @property
    def is_ready(self) -> bool:
        return bool(self.status.state == pb.SANDBOX_READY)

    @property
    def namespace(self) -> Path:
        """The network namespace on the host, from the state that the shim keeps."""
        state = json.loads(Path("/run/vc/sbs", self.id, "persist.json").read_text())
        return Path(state["Config"]["NetworkConfig"]["NetworkID"])

    @property
    def addresses(self) -> list[str]:
        network = self.status.network
        return [network.ip, *(item.ip for item in network.additional_ips)]

    def create(
        self,
        *command: str,
        name: str = "",
        attempt: int = 0,
        security: Security | None = None,
        mounts: Sequence[pb.Mount] = (),
        resources: pb.LinuxContainerResources | None = None,
        image: str = CRI_IMAGE,
        annotations: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Container:
        """CreateContainer. Its log is `<name>_<attempt>.log` in the pod's directory, as the kubelet has it."""
        name = name or f"c{next(_serial)}"
        security = Security() if security is None else security
        if not security.HasField("namespace_options"):
            security.namespace_options.CopyFrom(self.config.linux.security_context.namespace_options)
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=name, attempt=attempt),
            image=pb.ImageSpec(image=image, user_specified_image=image),
            command=list(command) or ["sleep", "100000"],
            log_path=f"{name}_{attempt}.log",
            mounts=mounts,
            annotations=dict(annotations or {}),
            linux=pb.LinuxContainerConfig(security_context=security, resources=resources),
            **more,
        )
        reply = self.cri.call("CreateContainer", pod_sandbox_id=self.id, config=config, sandbox_config=self.config)
        container = Container(cri=self.cri, id=reply.container_id, log_path=self.log_directory / config.log_path)
        self.containers.append(container)
        return container

    def start(self, *command: str, **options: Any) -> Container:
        """CreateContainer and StartContainer."""
        container = self.create(*command, **options)
        container.start()
        return container

    @property
    def log_directory(self) -> Path:
        return Path(self.config.log_directory)

    def stop(self) -> None:
        self.cri.call("StopPodSandbox", pod_sandbox_id=self.id)

    def remove_containers(self) -> None:
        """The pod has none, and no log of any; the pod itself runs on."""
        for container in self.containers:
            container.remove()
            container.log_path.unlink(missing_ok=True)
        self.containers.clear()

    def remove(self) -> None:
        """Nothing of the pod is left. As the kubelet does: stop, then remove, which takes the containers along.

        Raises AssertionError where that took a SIGKILL for VMM and shim, when all is removed.
        """
        try:
            self._stop_and_remove()
        except grpc.RpcError as error:
            killed = processes.kill_sandbox(self.id)
            eventually(self._is_removed, what=f"pod {self.id} is removed", every_s=1)
            raise AssertionError(f"remove pod {self.id!r}: {error}; killed {[str(each) for each in killed]}") from error
        finally:
            shutil.rmtree(self.log_directory, ignore_errors=True)

    def _stop_and_remove(self) -> None:
        with contextlib.suppress(grpc.RpcError):  # not found: it is gone already; whatever else remove will tell
            self.stop()
        self.cri.call("RemovePodSandbox", pod_sandbox_id=self.id)

    def _is_removed(self) -> bool:
        try:
            self._stop_and_remove()
        except grpc.RpcError:
            return False  # containerd has not seen its shim's end yet
        return True


@dataclass(slots=True, kw_only=True)
class Container:
    cri: Cri
    id: str
    log_path: Path

    def start(self) -> None:
        self.cri.call("StartContainer", container_id=self.id)

    @property
    def status(self) -> Any:
        return self.cri.call("ContainerStatus", container_id=self.id).status

    @property
    def is_running(self) -> bool:
        return bool(self.status.state == pb.CONTAINER_RUNNING)

    def exit_code(self) -> int:
        """The exit code, once the container has exited."""
        eventually(lambda: self.status.state == pb.CONTAINER_EXITED, what=f"container {self.id[:12]} exits")
        return int(self.status.exit_code)

    def exec(self, *command: str, timeout: int = 30) -> Output:
        reply = self.cri.call("ExecSync", container_id=self.id, cmd=list(command), timeout=timeout)
        return Output(code=reply.exit_code, out=reply.stdout.decode(), err=reply.stderr.decode())

    def sh(self, script: str) -> str:
        """Standard output of a shell script that must succeed."""
        done = self.exec("sh", "-c", script)
        assert done.code == 0, f"{script}: {done}"
        return done.out

    def stop(self, timeout: int = 10) -> None:
        self.cri.call("StopContainer", container_id=self.id, timeout=timeout, within_s=timeout + CALL_S)

    def remove(self) -> None:
        self.cri.call("RemoveContainer", container_id=self.id)

    def log(self, stream: str = "stdout") -> str:
        """The container's output on `stream`, out of the CRI log format: time, stream, P or F, text."""
        text = ""
        for line in self.log_path.read_text(errors="replace").splitlines():
            _, of, kind, content = line.split(" ", 3)
            text += (content + ("\n" if kind == "F" else "")) if of == stream else ""
        return text

    def run_to_end(self) -> str:
        """The container's standard output, after it has exited 0."""
        code = self.exit_code()
        assert code == 0, f"exit code {code}: {self.log()}{self.log('stderr')}"
        return self.log()
