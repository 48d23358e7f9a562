"""The peer of the remote hypervisor without a VM: its refusals, its memory, its faults when asked for."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from integration.framework.waiting import eventually
from integration.remote import disks, edits, faults, machine, peer
from integration.remote.client import RemoteClient, agent_health
from integration.remote.machine import Machine
from integration.remote.service import SERVICE, Service
from protos import hypervisor_pb2 as pb
from protos.agent import agent_pb2
from pyshim.ttrpc import CallTimedOut, Client, ConnectionClosed, RemoteError
from pyshim.ttrpc.framing import HEADER, REQUEST, FrameReader
from pyshim.ttrpc.messages import decode_request, encode_request

T = TypeVar("T")
POD = {peer.NAME: "web", peer.NAMESPACE: "shop"}
NETNS = "/proc/self/ns/net"


def settings(directory: Path) -> peer.Settings:
    return peer.Settings(
        directory=directory, pods=directory / "pods", guest=Path("/guest"), images=None, accelerator="tcg"
    )


def served(directory: Path, act: Callable[[RemoteClient, peer.Peer], Awaitable[T]]) -> T:
    """What `act` gives, done with a peer of its own on `directory`."""

    async def run() -> T:
        one = peer.Peer(settings(directory))
        await one.open()
        path = directory / "hypervisor.sock"
        service = asyncio.create_task(Service(one).serve(path))
        await asyncio.to_thread(eventually, path.exists, what="the peer's socket")
        try:
            return await act(RemoteClient(path), one)
        finally:
            service.cancel()
            await asyncio.gather(service, return_exceptions=True)
            await one.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("id", "annotations", "netns", "words"),
    [
        ("", POD, NETNS, "empty sandbox id"),
        ("../up", POD, NETNS, "is no name of a directory"),
        ("a", {peer.NAMESPACE: "shop"}, NETNS, f"annotation {peer.NAME} is missing"),
        ("a", {peer.NAME: "web", peer.NAMESPACE: ""}, NETNS, f"annotation {peer.NAMESPACE} is missing"),
        ("a", POD, "", "failed to inspect netns"),
        ("a", POD, "/nowhere", "failed to inspect netns /nowhere"),
    ],
)
def test_what_the_adaptor_refuses_is_refused_and_leaves_nothing(
    tmp_path: Path, id: str, annotations: dict[str, str], netns: str, words: str
) -> None:
    async def act(client: RemoteClient, _: peer.Peer) -> str:
        with pytest.raises(RemoteError) as refused:
            await client.create(id, annotations, netns)
        assert refused.value.code == 2
        return str(refused.value)

    assert words in served(tmp_path, act)
    assert not list((tmp_path / "vms").iterdir())
    assert not list((tmp_path / "pods").iterdir())


def test_a_vm_is_known_once_until_it_is_stopped(tmp_path: Path) -> None:
    async def act(client: RemoteClient, one: peer.Peer) -> None:
        assert await client.version() == "0.0.0"
        path = await client.create("a", POD, NETNS)
        assert path == f"{tmp_path}/pods/a/agent.ttrpc"
        with pytest.raises(FileNotFoundError):  # nothing answers before StartVM
            await agent_health(Path(path))
        with pytest.raises(RemoteError, match="sandbox a already exists"):
            await client.create("a", POD, NETNS)
        await client.stop("a")
        with pytest.raises(RemoteError, match="stopping VM: sandbox a does not exist"):
            await client.stop("a")
        with pytest.raises(RemoteError, match="getting sandbox: sandbox a does not exist"):
            await client.start("a")
        assert one.list() == ()

    served(tmp_path, act)
    assert not list((tmp_path / "vms").iterdir())
    assert not list((tmp_path / "pods").iterdir())


def test_the_next_peer_knows_what_the_last_one_made(tmp_path: Path) -> None:
    annotations = {
        **POD,
        "io.katacontainers.config.hypervisor.default_vcpus": "3",
        "io.katacontainers.config.hypervisor.default_memory": "1.5",
    }
    served(tmp_path, lambda client, _: client.create("a", annotations, NETNS))

    async def act(client: RemoteClient, one: peer.Peer) -> peer.Record:
        ((record, runs),) = one.list()
        assert not runs
        await client.stop("a")
        return record

    record = served(tmp_path, act)
    assert (record.pod, record.namespace, record.netns, record.vcpus) == ("web", "shop", NETNS, 3)
    assert record.memory_mib == 512, "what is no integer counts as not said"
    assert not list((tmp_path / "vms").iterdir())


def test_a_vm_that_does_not_boot_is_reported_and_can_be_stopped(tmp_path: Path) -> None:
    async def act(client: RemoteClient, one: peer.Peer) -> str:
        await client.create("a", POD, NETNS)
        with pytest.raises(RemoteError) as failed:
            await client.start("a")
        assert one.list()[0][1] is False
        await client.stop("a")
        return str(failed.value)

    words = served(tmp_path, act)

    assert "creating an instance" in words
    assert "QEMU exited 1" in words
    assert "/guest/" in words, "QEMU's own words are told"


async def _raw_call(path: Path, method: str, request: bytes, within_s: float) -> bytes:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    sock.setblocking(False)
    client = await Client.connect_socket(sock)
    try:
        return await client.call(SERVICE, method, request, timeout_s=within_s)
    finally:
        client.close()


def test_faults_strike_where_they_are_told_to(tmp_path: Path) -> None:
    request = pb.CreateVMRequest(id="a", annotations=POD, networkNamespacePath=NETNS).SerializeToString()
    path = tmp_path / "hypervisor.sock"

    async def act(client: RemoteClient, one: peer.Peer) -> None:
        one.faults.write("CreateVM:before=error(no quota)")
        with pytest.raises(RemoteError, match="no quota"):
            await client.create("a", POD, NETNS)
        assert one.list() == ()

        one.faults.write("CreateVM:before=drop")
        with pytest.raises(ConnectionClosed):
            await client.create("a", POD, NETNS)
        assert one.list() == ()

        one.faults.write("CreateVM:before=hang")
        with pytest.raises((CallTimedOut, RemoteError)):
            await _raw_call(path, "CreateVM", request, 0.3)
        assert one.list() == ()

        one.faults.write("CreateVM:after=empty")
        assert await client.create("a", POD, NETNS) == ""
        assert len(one.list()) == 1

        one.faults.write("StopVM:after=drop")
        with pytest.raises(ConnectionClosed):
            await client.stop("a")
        assert one.list() == ()

        one.faults.write("Version:before=delay(0.2),Version:after=twice")
        started = asyncio.get_running_loop().time()
        assert await client.version() == "0.0.0"
        assert asyncio.get_running_loop().time() - started >= 0.2
        one.faults.write("")
        assert await client.create("a", POD, NETNS)
        await client.stop("a")

    served(tmp_path, act)


def test_an_answer_can_come_twice(tmp_path: Path) -> None:
    """Read off the wire: a client that keeps to the protocol does not show it."""

    async def act(_: RemoteClient, one: peer.Peer) -> bytes:
        one.faults.write("Version:after=twice")
        reader, writer = await asyncio.open_unix_connection(tmp_path / "hypervisor.sock")
        body = b"\x0a\x15hypervisor.Hypervisor\x12\x07Version"
        writer.write(len(body).to_bytes(4, "big") + (1).to_bytes(4, "big") + b"\x01\x00" + body)
        frames = b""
        async with asyncio.timeout(30):
            while frames.count(b"0.0.0") < 2:
                frames += await reader.read(1000)
        writer.close()
        return frames

    frames = served(tmp_path, act)
    assert frames == frames[: len(frames) // 2] * 2


@pytest.mark.parametrize(
    "text", ["StopVM=hang", "Stop:before=hang", "StopVM:later=hang", "StopVM:before=explode", "StopVM:before=delay(x)"]
)
def test_a_fault_that_is_none_is_refused_and_the_file_kept(tmp_path: Path, text: str) -> None:
    held = faults.Faults(tmp_path / "faults")
    held.write("StopVM:before=hang")

    with pytest.raises(ValueError, match=r"fault|float"):
        held.write(text)

    assert held.at("StopVM", "before") == (faults.Fault(method="StopVM", moment="before", action=faults.Action.HANG),)


def test_the_vms_only_way_out_is_the_forwarders_port() -> None:
    argv = machine.qemu_argv(
        Machine(
            name="podvm-x",
            directory=Path("/d"),
            guest=Path("/g"),
            images=Path("/i.img"),
            vcpus=2,
            memory_mib=256,
            accelerator="tcg",
        )
    )

    networks = [word for word in argv if word.startswith(("user,", "tap,", "socket,", "bridge,"))]
    assert networks == ["user,id=net,restrict=on,ipv6=off,hostfwd=tcp:127.0.0.1:0-10.0.2.15:15150"]
    assert argv.count("-netdev") == 1
    assert "vhost-vsock" not in " ".join(argv)
    assert [word for word in argv if "serial=" in word] == [
        "virtio-blk-pci,drive=disk0,serial=root",
        "virtio-blk-pci,drive=disk1,serial=peerpod-config",
        "virtio-blk-pci,drive=disk2,serial=peerpod-images",
    ]


def test_an_archive_cannot_write_outside_its_disk(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("../outside", "/absolute", "inside"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    (tmp_path / "d").mkdir()

    disks.write_images_disk(tmp_path / "d" / "images.img", tmp_path / "a.tar")

    assert [path.name for path in (tmp_path / "d").iterdir()] == ["images.img"]
    assert not (tmp_path / "outside").exists()


def test_records_are_json_that_an_operator_can_read(tmp_path: Path) -> None:
    served(tmp_path, lambda client, _: client.create("a", POD, NETNS))

    record = json.loads((tmp_path / "vms/a/vm.json").read_text())

    assert (record["id"], record["pod"], record["running"]) == ("a", "web", None)


@pytest.mark.parametrize(("count", "is_told"), [(None, False), ("", False), ("0", True), ("2", True)])
def test_the_proxy_makes_the_adaptors_edit(count: str | None, is_told: bool) -> None:
    annotations = {} if count is None else {"io.katacontainers.config.hypervisor.default_gpus": count}
    body = agent_pb2.CreateContainerRequest(container_id="a")
    body.OCI.Annotations.update(annotations)
    message = encode_request("grpc.AgentService", "CreateContainer", body.SerializeToString(), 7, [("k", "v")])
    (frame,) = FrameReader().feed(framed(b"".join(message)))

    (sent,) = FrameReader().feed(edits.edited_frame(frame))

    request = decode_request(sent.payload)
    told = agent_pb2.CreateContainerRequest.FromString(request.payload).OCI.Annotations
    assert dict(told) == {**annotations, **({"cdi.k8s.io/peer-pods": "nvidia.com/gpu=all"} if is_told else {})}
    metadata = [(pair.key, pair.value) for pair in request.metadata]
    assert (request.timeout_nano, metadata, sent.stream_id) == (7, [("k", "v")], 3)


def test_the_proxy_passes_other_calls_as_they_are() -> None:
    data = framed(b"".join(encode_request("grpc.AgentService", "StartContainer", b"")))

    assert [edits.edited_frame(frame) for frame in FrameReader().feed(data)] == [data]


def framed(payload: bytes) -> bytes:
    return HEADER.pack(len(payload), 3, REQUEST, 0) + payload
