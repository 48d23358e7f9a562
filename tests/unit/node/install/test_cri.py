"""`verify` over a CRI socket: which handlers a runtime lists, and a test pod."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from protos.cri import v1_pb2 as pb
from protos.cri import v1_pb2_grpc
from pyshim.model.errors import FailedPrecondition
from pyshim.node.install.cri import verify

BEFORE_2 = pb.StatusResponse(info={"config": '{"containerd": {"runtimes": {"runc": {}, "pykata": {}}}}'})
LISTING = pb.StatusResponse(runtime_handlers=[pb.RuntimeHandler(name=name) for name in ("", "crun", "pykata")])


class Runtime(v1_pb2_grpc.RuntimeServiceServicer):
    """A container runtime that answers Status with `status` and runs pods in no time."""

    def __init__(self, status: pb.StatusResponse) -> None:
        self.status = status
        self.pods: list[str] = []
        self.handler = ""

    def Version(self, request: pb.VersionRequest, context: grpc.ServicerContext) -> pb.VersionResponse:
        return pb.VersionResponse(runtime_name="a runtime", runtime_version="1.0")

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        return self.status

    def RunPodSandbox(
        self, request: pb.RunPodSandboxRequest, context: grpc.ServicerContext
    ) -> pb.RunPodSandboxResponse:
        self.handler = request.runtime_handler
        self.pods.append("p1")
        return pb.RunPodSandboxResponse(pod_sandbox_id="p1")

    def PodSandboxStatus(
        self, request: pb.PodSandboxStatusRequest, context: grpc.ServicerContext
    ) -> pb.PodSandboxStatusResponse:
        status = pb.PodSandboxStatus(state=pb.SANDBOX_READY, runtime_handler=self.handler)
        return pb.PodSandboxStatusResponse(status=status)

    def StopPodSandbox(
        self, request: pb.StopPodSandboxRequest, context: grpc.ServicerContext
    ) -> pb.StopPodSandboxResponse:
        return pb.StopPodSandboxResponse()

    def RemovePodSandbox(
        self, request: pb.RemovePodSandboxRequest, context: grpc.ServicerContext
    ) -> pb.RemovePodSandboxResponse:
        self.pods.remove(request.pod_sandbox_id)
        return pb.RemovePodSandboxResponse()


@contextmanager
def serving(socket: str, runtime: Runtime) -> Iterator[Runtime]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    v1_pb2_grpc.add_RuntimeServiceServicer_to_server(runtime, server)
    server.add_insecure_port(f"unix://{socket}")
    server.start()
    yield runtime
    server.stop(None).wait()


@pytest.fixture(params=[BEFORE_2, LISTING], ids=["as containerd 1.x", "as containerd 2.x and CRI-O"])
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runtime]:
    with serving(f"{tmp_path}/cri.sock", Runtime(request.param)) as found:
        yield found


def test_a_runtime_that_lists_the_handlers_runs_a_pod(runtime: Runtime, tmp_path: Path) -> None:
    assert verify(f"{tmp_path}/cri.sock", frozenset({"pykata"}), pod="pykata") == "a runtime 1.0"

    assert (runtime.handler, runtime.pods) == ("pykata", [])


def test_a_handler_that_is_not_listed_is_named_and_no_pod_runs(runtime: Runtime, tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="no handler pykata-tdx "):
        verify(f"{tmp_path}/cri.sock", frozenset({"pykata", "pykata-tdx"}), pod="pykata")

    assert runtime.handler == ""
