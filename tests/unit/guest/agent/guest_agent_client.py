"""A blocking client of a guest agent that runs on this host, in namespaces of its own, with real crun."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message as PbMessage

from protos.agent import agent_pb2, health_pb2, oci_pb2
from pyshim.ttrpc.connection import ClientConnection, ResponseReceived

REPOSITORY = Path(__file__).resolve().parents[4]
PATIENCE_S = 100.0
"""For whatever is expected to happen, on a machine however busy; less than pytest gives a test."""
APPLETS = "sh cat echo sleep id hostname ps tty stty env kill head wc true mkdir ls".split()

_names = (f"c{number}" for number in itertools.count())

# Private mounts: an empty /run and a cgroup v2 hierarchy where a guest has it, whatever the host's layout is.
_ENTER = 'echo $$ > "$0/cgroup.procs"; exec "$@"'
_PREPARE = """
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount -t sysfs sysfs /sys
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo 0 > /sys/fs/cgroup/agent/cgroup.procs
ip link set lo up
exec "$@"
"""


class CallError(Exception):
    """A call was answered with a status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@contextlib.contextmanager
def refused(code: int, match: str | None = None) -> Iterator[None]:
    """The call in the block is answered with this status, and a text that has `match`."""
    with pytest.raises(CallError, match=match) as caught:
        yield
    assert caught.value.code == code


class AgentClient:
    """One connection. `call` sends and waits; `send` and `wait` are its halves."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.settimeout(PATIENCE_S)
        self._core = ClientConnection()
        self._answers: dict[int, ResponseReceived] = {}

    def send_raw(self, service: str, method: str, payload: bytes, timeout_ns: int = 0) -> int:
        stream_id, frame = self._core.request(service, method, payload, timeout_ns=timeout_ns)
        self._socket.sendall(frame)
        return stream_id

    def send(self, method: str, request: PbMessage | None = None, *, timeout_ns: int = 0) -> int:
        service = "grpc.Health" if method in ("Check", "Version") else "grpc.AgentService"
        payload = b"" if request is None else request.SerializeToString()
        return self.send_raw(service, method, payload, timeout_ns)

    def wait(self, stream_id: int) -> bytes:
        while stream_id not in self._answers:
            data = self._socket.recv(1 << 16)
            if not data:
                raise EOFError("the agent closed the connection")
            for event in self._core.receive_data(data):
                assert isinstance(event, ResponseReceived)
                self._answers[event.stream_id] = event
        answer = self._answers.pop(stream_id)
        if answer.code:
            raise CallError(answer.code, answer.message)
        return answer.payload

    def is_answered(self, stream_id: int) -> bool:
        """True if the answer is there already, or comes within a moment."""
        self._socket.settimeout(0.2)
        try:
            data = self._socket.recv(1 << 16)
            for event in self._core.receive_data(data):
                assert isinstance(event, ResponseReceived)
                self._answers[event.stream_id] = event
        except TimeoutError:
            pass
        finally:
            self._socket.settimeout(PATIENCE_S)
        return stream_id in self._answers

    def call(self, method: str, request: PbMessage | None = None) -> Any:
        reply_type: Any = _REPLIES.get(method, Empty)
        return reply_type.FromString(self.wait(self.send(method, request)))

    def close(self) -> None:
        self._socket.close()

    # -- shorthands ------------------------------------------------------------------------------------------------

    def create(self, spec: oci_pb2.Spec, cid: str, **fields: Any) -> None:
        self.call("CreateContainer", agent_pb2.CreateContainerRequest(container_id=cid, OCI=spec, **fields))

    def start(self, cid: str) -> None:
        self.call("StartContainer", agent_pb2.StartContainerRequest(container_id=cid))

    def run(self, spec: oci_pb2.Spec, cid: str, **fields: Any) -> None:
        self.create(spec, cid, **fields)
        self.start(cid)

    def execute(self, cid: str, exec_id: str, args: list[str], **fields: Any) -> None:
        process = oci_pb2.Process(Args=args, Env=["PATH=/bin"], Cwd="/", **fields)
        self.call("ExecProcess", agent_pb2.ExecProcessRequest(container_id=cid, exec_id=exec_id, process=process))

    def exit_code(self, cid: str, exec_id: str = "") -> int:
        reply = self.call("WaitProcess", agent_pb2.WaitProcessRequest(container_id=cid, exec_id=exec_id))
        return int(reply.status)

    def read(self, cid: str, exec_id: str = "", *, method: str = "ReadStdout", size: int = 32768) -> bytes:
        request = agent_pb2.ReadStreamRequest(container_id=cid, exec_id=exec_id, len=size)
        return bytes(self.call(method, request).data)

    def read_all(self, cid: str, exec_id: str = "", *, method: str = "ReadStdout") -> bytes:
        chunks = []
        while chunk := self.read(cid, exec_id, method=method):
            chunks.append(chunk)
        return b"".join(chunks)

    def write(self, cid: str, data: bytes, exec_id: str = "") -> int:
        request = agent_pb2.WriteStreamRequest(container_id=cid, exec_id=exec_id, data=data)
        return int(self.call("WriteStdin", request).len)

    def close_stdin(self, cid: str, exec_id: str = "") -> None:
        self.call("CloseStdin", agent_pb2.CloseStdinRequest(container_id=cid, exec_id=exec_id))

    def signal(self, cid: str, number: int, exec_id: str = "") -> None:
        self.call("SignalProcess", agent_pb2.SignalProcessRequest(container_id=cid, exec_id=exec_id, signal=number))

    def remove(self, cid: str) -> None:
        self.call("RemoveContainer", agent_pb2.RemoveContainerRequest(container_id=cid))


_REPLIES: dict[str, Any] = {
    "Check": health_pb2.HealthCheckResponse,
    "Version": health_pb2.VersionCheckResponse,
    "WaitProcess": agent_pb2.WaitProcessResponse,
    "WriteStdin": agent_pb2.WriteStreamResponse,
    "ReadStdout": agent_pb2.ReadStreamResponse,
    "ReadStderr": agent_pb2.ReadStreamResponse,
    "StatsContainer": agent_pb2.StatsContainerResponse,
    "StatsContainers": agent_pb2.StatsContainersResponse,
    "GetGuestDetails": agent_pb2.GuestDetailsResponse,
    "GetMetrics": agent_pb2.Metrics,
    "ListInterfaces": agent_pb2.Interfaces,
    "ListRoutes": agent_pb2.Routes,
    "UpdateRoutes": agent_pb2.Routes,
    "GetOOMEvent": agent_pb2.OOMEvent,
    "GetDiagnosticData": agent_pb2.GetDiagnosticDataResponse,
}


class HostedAgent:
    """A guest agent as PID 1 of its own pid, mount, network, UTS, IPC and cgroup namespaces.

    `root` is a busybox root file system, `cgroup` the agent's own cgroup, which it sees as the root one.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        """`words` are further ones of its command line."""
        self.folder = folder
        self.root = folder / "rootfs"
        make_rootfs(self.root)
        self._address = folder / "agent.sock"
        self.cgroup = cgroup2_root() / f"guest-agent-test-{os.getpid()}-{folder.name}"
        (self.cgroup / "agent").mkdir(parents=True)
        self._log = (folder / "agent.log").open("wb")
        unshare = ["unshare", *(f"--{kind}" for kind in ("cgroup", "mount", "pid", "net", "uts", "ipc", "fork"))]
        unshare += ["--mount-proc", "--kill-child"]
        program = ["env", f"PYTHONPATH={REPOSITORY}", sys.executable, "-P", "-m", "guest.agent"]
        settings = [f"agent.server_addr=unix://{self._address}", "agent.log=debug"]
        argv = ["sh", "-ec", _ENTER, str(self.cgroup), *unshare, "sh", "-ec", _PREPARE, "sh", *program, *settings]
        argv += ["agent.hotplug_timeout=1", *words]
        self.process = subprocess.Popen(argv, stderr=self._log, stdin=subprocess.DEVNULL)
        self._clients: list[AgentClient] = []

    def connect(self) -> AgentClient:
        """A new connection, as soon as the agent listens."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._address))
            except OSError:
                connection.close()
                if self.process.poll() is not None:
                    break
                time.sleep(0.05)
                continue
            # A cgroup with processes of its own cannot hand controllers down: unshare's follows its child.
            (self.cgroup / "agent/cgroup.procs").write_text(str(self.process.pid))
            client = AgentClient(connection)
            self._clients.append(client)
            return client
        raise AssertionError(f"the agent does not listen:\n{self.log()}")

    def log(self) -> str:
        return (self.folder / "agent.log").read_text("utf-8", "replace")

    def pid(self) -> int:
        """The agent's pid on this host."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def disconnect(self) -> None:
        """Every connection is closed; the agent notices a moment later."""
        for client in self._clients:
            client.close()
        self._clients.clear()

    def settled_fds(self) -> set[tuple[str, str]]:
        """`open_fds` once they change no more: what ended before is closed, or at least it seems so."""
        found: set[tuple[str, str]] = set()
        while found != (found := self.open_fds()):
            time.sleep(0.1)
        return found

    def open_fds(self) -> set[tuple[str, str]]:
        """Number and file of every descriptor the agent has."""
        found = set()
        for entry in os.scandir(f"/proc/{self.pid()}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add((entry.name, os.readlink(entry)))
        return found

    def spec(self, args: list[str], *, terminal: bool = False, **process: Any) -> oci_pb2.Spec:
        """A small container on the busybox root file system."""
        mounts = [
            oci_pb2.Mount(destination="/proc", type="proc", source="proc"),
            oci_pb2.Mount(destination="/dev", type="tmpfs", source="tmpfs", options=["nosuid", "mode=755"]),
            oci_pb2.Mount(
                destination="/dev/pts",
                type="devpts",
                source="devpts",
                options=["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"],
            ),
        ]
        process.setdefault("Cwd", "/")
        process.setdefault("Env", ["PATH=/bin"])
        return oci_pb2.Spec(
            Version="1.0.2",
            Process=oci_pb2.Process(Terminal=terminal, Args=args, **process),
            Root=oci_pb2.Root(Path=str(self.root)),
            Mounts=mounts,
            Linux=oci_pb2.Linux(Namespaces=[oci_pb2.LinuxNamespace(Type=kind) for kind in ("mount", "ipc", "uts")]),
        )

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
        remove_cgroup(self.cgroup)


def unused_id() -> str:
    """The id of a container that no other test has."""
    return next(_names)


def run(agent: HostedAgent, client: AgentClient, script: str, **process: object) -> tuple[int, bytes, bytes]:
    """Exit code, stdout and stderr of a shell script that was a container's init; the container is gone."""
    name = unused_id()
    client.run(agent.spec(["sh", "-c", script], **process), name)
    result = client.exit_code(name), client.read_all(name), client.read_all(name, method="ReadStderr")
    client.remove(name)
    return result


def inside(agent: HostedAgent, path: str) -> Path:
    """A path of the agent's mount namespace, seen from here."""
    return Path(f"/proc/{agent.pid()}/root{path}")


def cgroup2_root() -> Path:
    """The mount point of this host's cgroup v2 hierarchy: alone, or beside version 1."""
    for line in Path("/proc/mounts").read_text().splitlines():
        fields = line.split(" ")
        if fields[2] == "cgroup2":
            return Path(fields[1])
    raise AssertionError("this host has no cgroup v2 hierarchy mounted")


def remove_cgroup(root: Path) -> None:
    """The cgroup and those below it are gone, once the kernel has buried their last processes."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for folder, _folders, _files in os.walk(root, topdown=False):
                Path(folder).rmdir()
            return
        time.sleep(0.05)
    raise AssertionError(f"cgroup {root} is still in use")


def until(holds: Callable[[], bool], what: str) -> None:
    """`holds` is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def make_rootfs(root: Path) -> None:
    """A root file system with a static busybox under its usual names."""
    for folder in ("bin", "dev", "etc", "proc", "sys", "tmp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(shutil.which("busybox") or "/bin/busybox", root / "bin/busybox")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\napp:x:1234:4321:App:/:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nappgroup:x:4321:\nextra:x:555:\n")
