"""The kubelet's PodResources, asked over its real protocol, by the client and through the daemon's child."""

import asyncio
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from pyshim.cdi import Cache
from pyshim.host.processes.children import Children
from pyshim.model.devices import (
    DeviceQuestion,
    DeviceRequest,
    FoundDevice,
    HostFunction,
    PodDevices,
    PodResources,
    VfioNode,
)
from pyshim.model.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from pyshim.resources.devices.host.find import find_devices
from pyshim.resources.devices.host.finder import DeviceFinder
from pyshim.resources.devices.host.kubelet import pod_resources
from tests.fakes.kubelet import FakeKubelet, container, pod, serving


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket's path has room for 107 bytes only."""
    with tempfile.TemporaryDirectory(prefix="kubelet", dir="/tmp") as directory:
        yield Path(directory) / "kubelet.sock"


def full_pod() -> Any:
    return pod(
        "pod",
        "ns",
        container(
            "a",
            devices={"v.com/gpu": ["0", "1"]},
            claims={"gpus": ["v.com/gpu=1", "dra.com/gpu=pool-0"], "nics": ["dra.com/nic=x"]},
            cpus=(3, 1),
            memory=((1 << 30, (1,)), (2 << 30, (1,)), (1 << 20, (1, 0))),
        ),
        container("b", devices={"v.com/gpu": ["2"]}),
    )


def test_devices_claims_cpus_and_memory_of_a_pod(path: Path) -> None:
    with serving(FakeKubelet(pod("other", "ns"), full_pod()), path) as kubelet:
        found = pod_resources(str(path), "pod", "ns")

    assert kubelet.calls == ["Get"]
    assert [(each.container, each.name, each.origin) for each in found.requests] == [
        ("a", "v.com/gpu=0", "device plugin"),
        ("a", "v.com/gpu=1", "device plugin"),
        ("a", "dra.com/gpu=pool-0", "claim ns/gpus"),
        ("a", "dra.com/nic=x", "claim ns/nics"),
        ("b", "v.com/gpu=2", "device plugin"),
    ]
    assert found.cpu_ids == {"a": (1, 3)}
    assert found.memory == {"a": {"1": 3 << 30, "0,1": 1 << 20}}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "unknown method Get"),
        (grpc.StatusCode.UNKNOWN, "PodResources API Get method disabled"),
    ],
)
def test_an_older_kubelet_lists_its_pods(code: Any, text: str, path: Path) -> None:
    def refuse(context: Any) -> None:
        context.abort(code, text)

    with serving(FakeKubelet(pod("other", "ns"), full_pod(), get=refuse), path) as kubelet:
        found = pod_resources(str(path), "pod", "ns")
        with pytest.raises(NotFound, match="for pod 'ns/third': it lists 2 pods, and not this one"):
            pod_resources(str(path), "third", "ns")

    assert kubelet.calls == ["Get", "List"] * 2
    assert len(found.requests) == 5


def test_a_pod_the_kubelet_does_not_know_is_named(path: Path) -> None:
    with serving(FakeKubelet(), path), pytest.raises(NotFound, match=r"pod 'ns/pod': .*not found"):
        pod_resources(str(path), "pod", "ns")


def test_an_answer_for_another_pod_is_refused(path: Path) -> None:
    class Confused(FakeKubelet):
        def Get(self, request: Any, context: Any) -> Any:
            request.pod_name = "other"
            return super().Get(request, context)

    with (
        serving(Confused(pod("other", "ns")), path),
        pytest.raises(Internal, match="for pod 'ns/pod': it answers for 'ns/other'"),
    ):
        pod_resources(str(path), "pod", "ns")


def test_an_answer_of_20_mib_is_refused_and_one_of_15_taken(path: Path) -> None:
    def of_size(mib: int) -> Any:
        return pod("pod", "ns", container("a", devices={"v.com/gpu": ["x" * (1 << 20)] * mib}))

    with serving(FakeKubelet(of_size(20)), path), pytest.raises(ResourceExhausted, match="larger than max"):
        pod_resources(str(path), "pod", "ns", timeout_s=60)
    with serving(FakeKubelet(of_size(15)), path):
        assert len(pod_resources(str(path), "pod", "ns", timeout_s=60).requests) == 1


def test_a_kubelet_that_hangs_is_given_up(path: Path) -> None:
    release = threading.Event()

    def hang(_context: Any) -> None:
        release.wait(30)

    with serving(FakeKubelet(full_pod(), get=hang), path):
        with pytest.raises(DeadlineExceeded, match=r"ask kubelet at '.*kubelet.sock' for pod 'ns/pod'"):
            pod_resources(str(path), "pod", "ns", timeout_s=0.3)
        release.set()


@pytest.fixture
def mute(path: Path) -> Iterator[Path]:
    """A socket that takes connections and says nothing."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield path


def test_a_socket_that_says_nothing_is_given_up(mute: Path) -> None:
    with pytest.raises((DeadlineExceeded, Unavailable), match="for pod 'ns/pod'"):
        pod_resources(str(mute), "pod", "ns", timeout_s=0.3)


def test_what_is_no_socket(path: Path) -> None:
    with pytest.raises(Unavailable, match="no such file"):
        pod_resources(str(path), "pod", "ns")
    path.write_text("")
    with pytest.raises(FailedPrecondition, match="it is not a socket"):
        pod_resources(str(path), "pod", "ns")


# Merging and resolving


def put_spec(directory: Path, kind: str, devices: dict[str, dict[str, Any]]) -> None:
    document = {
        "cdiVersion": "0.7.0",
        "kind": kind,
        "devices": [{"name": name, "containerEdits": edits} for name, edits in devices.items()],
    }
    (directory / f"{kind.replace('/', '-')}.json").write_text(json.dumps(document))


def node(path: str) -> VfioNode:
    function = HostFunction(address=f"0000:0{path[-1]}:00.0", vendor="0x10de", device="0x1", class_code="0x030200")
    return VfioNode(path=path, functions=(function,))


def kubelet(*requests: DeviceRequest) -> Callable[[str, str, str], PodResources]:
    """A kubelet that gave a pod these devices."""
    return lambda _socket, _name, _namespace: PodResources(requests=requests, cpu_ids={}, memory={})


def test_each_device_comes_once_with_its_first_origin(tmp_path: Path) -> None:
    def vfio(number: int) -> dict[str, Any]:
        return {"deviceNodes": [{"path": "/dev/vfio/vfio"}, {"path": f"/dev/vfio/{number}"}], "env": [f"GPU={number}"]}

    put_spec(tmp_path, "v.com/gpu", {"0": vfio(1), "1": vfio(2), "2": {"env": ["NONE=1"]}})
    asked = (
        DeviceRequest(name="v.com/gpu=0", origin="device plugin", container="a"),
        DeviceRequest(name="v.com/gpu=0", origin="claim ns/x", container="a"),
        DeviceRequest(name="v.com/gpu=0", origin="annotation"),
        DeviceRequest(name="v.com/gpu=1", origin="annotation"),
        DeviceRequest(name="v.com/gpu=2", origin="annotation"),
    )

    found = find_devices(
        DeviceQuestion(kubelet_socket="/s", nodes=("/dev/vfio/2", "/dev/vfio/7")),
        cache=Cache([str(tmp_path)]),
        look_at=node,
        ask=kubelet(*asked),
    )

    assert found.devices == (
        FoundDevice(request=asked[0], nodes=(node("/dev/vfio/1"),), env=("GPU=1",)),
        FoundDevice(request=asked[3], nodes=(node("/dev/vfio/2"),), env=("GPU=2",)),
        FoundDevice(request=asked[4], nodes=(), env=("NONE=1",)),
        FoundDevice(request=DeviceRequest(name="", origin="spec"), nodes=(node("/dev/vfio/7"),)),
    )


def test_what_a_devices_spec_does_beside_is_reported(tmp_path: Path) -> None:
    edits = {
        "deviceNodes": [{"path": "/dev/vfio/vfio"}, {"path": "/dev/vfio/1"}, {"path": "/dev/a", "hostPath": "/dev/b"}],
        "mounts": [{"hostPath": "/lib/x", "containerPath": "/usr/lib/x"}],
        "hooks": [{"hookName": "createContainer", "path": "/bin/hook"}],
        "additionalGids": [44],
        "intelRdt": {"closID": "c"},
    }
    put_spec(tmp_path, "v.com/gpu", {"0": edits})
    question = DeviceQuestion(annotations={"cdi.k8s.io/a": "v.com/gpu=0"})

    (found,) = find_devices(question, cache=Cache([str(tmp_path)]), look_at=node, ask=pod_resources).devices

    assert found.nodes == (node("/dev/vfio/1"),)
    assert found.left_out == (
        *("node /dev/b", "mount /usr/lib/x", "hook createContainer /bin/hook", "group 44"),
        "intelRdt",
    )


def test_devices_of_another_machine_are_not_looked_for_on_this_one(tmp_path: Path) -> None:
    request = DeviceRequest(name="v.com/gpu=0", origin="claim ns/x", container="a")

    found = find_devices(
        DeviceQuestion(kubelet_socket="/s", annotations={"cdi.k8s.io/a": "w.com/x=1"}, names_only=True),
        cache=Cache([str(tmp_path)]),
        ask=kubelet(request),
    )

    assert found.devices == (
        FoundDevice(request=request, nodes=()),
        FoundDevice(request=DeviceRequest(name="w.com/x=1", origin="annotation"), nodes=()),
    )


def test_all_names_without_a_spec_are_listed_with_who_asked(tmp_path: Path) -> None:
    asked = tuple(DeviceRequest(name=f"v.com/gpu={n}", origin=f"claim ns/c{n}") for n in range(2))

    with pytest.raises(NotFound, match=r"'v\.com/gpu=0' by claim ns/c0, 'v\.com/gpu=1' by claim ns/c1"):
        find_devices(DeviceQuestion(kubelet_socket="/s"), cache=Cache([str(tmp_path)]), ask=kubelet(*asked))


def test_the_nouns_travel_as_json() -> None:
    question = DeviceQuestion(
        pod_name="p", kubelet_socket="/s", nodes=("/dev/vfio/1",), annotations={"cdi.k8s.io/a": "v/c=d"}
    )
    found = PodDevices(
        devices=(FoundDevice(request=DeviceRequest(name="a", origin="b"), nodes=(node("/dev/vfio/1"),), env=("A=b",)),),
        cpu_ids={"c": (1, 2)},
        memory={"c": {"0": 5}},
    )

    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(question))), DeviceQuestion) == question
    assert msgspec.convert(json.loads(json.dumps(msgspec.to_builtins(found))), PodDevices) == found


# The daemon's child


def ask_child(question: DeviceQuestion, timeout_s: float = 30.0) -> PodDevices:
    async def body() -> PodDevices:
        children = Children()
        try:
            return await DeviceFinder(children, timeout_s=timeout_s).find(question)
        finally:
            assert children.alive == ()

    return asyncio.run(body())


def test_the_child_asks_the_kubelet_for_the_daemon(path: Path) -> None:
    with serving(FakeKubelet(pod("pod", "ns", container("a", cpus=(2,)))), path):
        found = ask_child(DeviceQuestion(pod_name="pod", pod_namespace="ns", kubelet_socket=str(path)))

    assert found == PodDevices(cpu_ids={"a": (2,)})


def test_errors_of_the_child_keep_their_kind(path: Path) -> None:
    with pytest.raises(Unavailable, match=r"ask kubelet at .* for pod 'ns/pod': ENOENT"):
        ask_child(DeviceQuestion(pod_name="pod", pod_namespace="ns", kubelet_socket=str(path)))
    with pytest.raises(InvalidArgument, match="use '/dev/vfio/x'"):
        ask_child(DeviceQuestion(nodes=("/dev/vfio/x",)))


def test_a_child_that_takes_too_long_is_ended(mute: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"find devices: no answer within 0\.1 s"):
        ask_child(DeviceQuestion(pod_name="p", pod_namespace="n", kubelet_socket=str(mute)), timeout_s=0.1)


def test_nothing_is_started_for_nothing() -> None:
    class NoChildren:
        pass

    assert asyncio.run(DeviceFinder(NoChildren()).find(DeviceQuestion())) == PodDevices()  # type: ignore[arg-type]
