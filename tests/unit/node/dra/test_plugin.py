"""The kubelet's calls to the driver, over its sockets: claims prepared, answered again, and removed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.kubelet import dra_v1_pb2 as pb
from protos.kubelet import pluginregistration_v1_pb2 as registration_pb
from protos.kubelet.dra_v1_pb2_grpc import DRAPluginStub
from protos.kubelet.pluginregistration_v1_pb2_grpc import RegistrationStub
from pyshim.cdi import Cache
from pyshim.node.dra.claims import Claims
from pyshim.node.dra.plugin import DraPlugin, registered
from pyshim.node.kubernetes.api import Api
from tests.fakes.api_server import FakeApiServer

DRIVER = "cloud.pyshim.io"


def result(request: str, device: str, *, driver: str = DRIVER, pool: str = "instances") -> dict[str, str]:
    return {"request": request, "driver": driver, "pool": pool, "device": device}


def claim(uid: str, *results: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"metadata": {"namespace": "ns", "name": "c", "uid": uid}}
    return {**found, "status": {"allocation": {"devices": {"results": list(results)}}}} if results else found


class Node:
    """A node's directories and the kubelet's client of the driver."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cdi = root / "cdi"
        self.server = FakeApiServer()

    @asynccontextmanager
    async def driver(self) -> AsyncIterator[Any]:
        """A driver that the kubelet has found; the block is its life."""
        pki = self.root / "pki"
        pki.mkdir(exist_ok=True)
        claims = Claims(specs=self.cdi, records=self.root / "claims")
        async with (
            self.server.serving(pki) as access,
            Api(access) as api,
            registered(DraPlugin(api, claims), self.root),
            grpc.aio.insecure_channel(f"unix:{self.root}/plugins_registry/{DRIVER}-reg.sock") as found,
        ):
            info = await RegistrationStub(found).GetInfo(registration_pb.InfoRequest())
            assert (info.type, info.name, list(info.supported_versions)) == ("DRAPlugin", DRIVER, ["v1.DRAPlugin"])
            status = registration_pb.RegistrationStatus(plugin_registered=True)
            await RegistrationStub(found).NotifyRegistrationStatus(status)
            async with grpc.aio.insecure_channel(f"unix:{info.endpoint}") as channel:
                yield DRAPluginStub(channel)

    def names(self) -> list[str]:
        """The device names that containerd would find, none of its specs being wrong."""
        if not self.cdi.exists():
            return []
        cache = Cache((str(self.cdi),))
        assert not cache.errors()
        return sorted(each.name for each in cache.devices())


@pytest.fixture
def node() -> Iterator[Node]:
    """In a directory whose sockets have names that are short enough."""
    with tempfile.TemporaryDirectory(prefix="dra") as directory:
        yield Node(Path(directory))


async def prepared(stub: Any, uid: str = "u1", name: str = "c") -> Any:
    request = pb.NodePrepareResourcesRequest(claims=[pb.Claim(namespace="ns", uid=uid, name=name)])
    return (await stub.NodePrepareResources(request)).claims[uid]


async def unprepared(stub: Any, uid: str = "u1") -> str:
    request = pb.NodeUnprepareResourcesRequest(claims=[pb.Claim(namespace="ns", uid=uid, name="c")])
    return str((await stub.NodeUnprepareResources(request)).claims[uid].error)


async def test_a_claim_is_prepared_once_and_removed_once(node: Node) -> None:
    """A second call, one after a restart without an API server, and one for what is gone, are answered alike."""
    node.server.claims["ns/c"] = claim(
        "u1", result("a", "h100-3"), result("b", "a10-sixth-0"), result("x", "gpu-0", driver="gpu.nvidia.com", pool="n")
    )
    names = ["pyshim.io/a10-sixth=a10-sixth-0", "pyshim.io/h100=h100-3"]
    async with node.driver() as stub:
        answer = await prepared(stub)
        assert [
            (list(each.request_names), each.pool_name, each.device_name, list(each.cdi_device_ids))
            for each in answer.devices
        ] == [
            (["a"], "instances", "h100-3", ["pyshim.io/h100=h100-3"]),
            (["b"], "instances", "a10-sixth-0", ["pyshim.io/a10-sixth=a10-sixth-0"]),
        ]
        assert node.names() == names
        spec = json.loads((node.cdi / "pyshim.io-h100_u1.json").read_text())
        assert spec["devices"] == [{"name": "h100-3", "containerEdits": {"env": ["PYSHIM_CLAIM=c"]}}]
        assert await prepared(stub) == answer
    assert not list((node.root / "plugins_registry").iterdir())
    node.server.claims.clear()
    (node.cdi / "pyshim.io-h100_u1.json").unlink()  # as a reboot does with /run
    async with node.driver() as stub:
        node.server.faults = [503]
        assert await prepared(stub) == answer
        assert node.names() == names
        for _ in range(2):
            assert not await unprepared(stub)
            assert node.names() == []
    assert not list((node.root / "claims").iterdir())


@pytest.mark.parametrize(
    ("found", "faults", "cause"),
    [
        (None, [], "GET /apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/c: NotFound"),
        (None, [503], "resourceclaims/c: Fault"),
        (claim("u1"), [], "prepare claim 'ns/c': it is not allocated"),
        (claim("u2", result("a", "h100-0")), [], "another claim has this name by now"),
        (claim("u1", result("a", "g0", driver="gpu.nvidia.com")), [], "it has no device of cloud.pyshim.io"),
        (claim("u1", result("a", "../h100-0")), [], "device '../h100-0' of pool 'instances' is unknown"),
        (claim("u1", result("a", "h100-0", pool="other")), [], "device 'h100-0' of pool 'other' is unknown"),
        (
            {"metadata": {"namespace": "ns", "name": "c", "uid": "u1"}, "status": {"allocation": {"devices": []}}},
            [],
            "prepare claim u1: status.allocation.devices is not an object",
        ),
    ],
)
async def test_a_claim_that_cannot_be_prepared_is_named_and_leaves_nothing(
    node: Node, found: Any, faults: list[int], cause: str
) -> None:
    if found is not None:
        node.server.claims["ns/c"] = found
    async with node.driver() as stub:
        node.server.faults = faults
        answer = await prepared(stub)
        assert cause in answer.error
        assert node.names() == []
        assert "not a uid" in (await prepared(stub, uid="../../etc")).error
        assert "not a uid" in await unprepared(stub, uid="../../etc")


async def test_a_directory_that_takes_no_file_is_named_and_leaves_nothing(node: Node) -> None:
    node.server.claims["ns/c"] = claim("u1", result("a", "h100-0"))
    node.cdi.write_text("not a directory")
    async with node.driver() as stub:
        assert "prepare claim 'c': File exists" in (await prepared(stub)).error
        node.cdi.unlink()
        os.mkdir(node.cdi)
        assert not (await prepared(stub)).error


@pytest.mark.parametrize(("old", "new"), [(b'"requests"', b'"'), (b"h100-0", b"h100-1"), (b"\n", b" ")])
async def test_a_damaged_record_is_made_again(node: Node, old: bytes, new: bytes) -> None:
    node.server.claims["ns/c"] = claim("u1", result("a", "h100-0"))
    async with node.driver() as stub:
        answer = await prepared(stub)
        record = node.root / "claims" / "u1.json"
        record.write_bytes(record.read_bytes().replace(old, new))
        assert await prepared(stub) == answer


async def test_the_socket_of_a_driver_that_was_killed_is_taken_over(node: Node) -> None:
    for path in (node.root / "plugins" / DRIVER / "dra.sock", node.root / "plugins_registry" / f"{DRIVER}-reg.sock"):
        path.parent.mkdir(parents=True)
        path.touch()
    async with node.driver() as stub:
        assert not await unprepared(stub)
