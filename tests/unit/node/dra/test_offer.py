"""The offer of devices: its slices, and what becomes of them at an API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.model.errors import FailedPrecondition, Unavailable
from pyshim.node.dra import offer, slices
from pyshim.node.dra.offer import keep_offered, publish, withdraw
from pyshim.node.kubernetes.api import Api
from tests.fakes.api_server import FakeApiServer
from tests.unit.resources.devices.test_instances import TABLE, table

WITHOUT_QUOTA = (
    TABLE[: TABLE.index('[[type]]\nname = "nv6"')]
    + TABLE[TABLE.index("[device.h100]") : TABLE.index("[device.a10-sixth]")]
)


def devices_of(server: FakeApiServer) -> dict[int, list[str]]:
    """Device names by generation."""
    found: dict[int, list[str]] = {}
    for each in server.slices.values():
        names = [device["name"] for device in each["spec"].get("devices", ())]
        found.setdefault(each["spec"]["pool"]["generation"], []).extend(names)
    return found


def test_each_device_has_its_product_and_each_quota_its_units() -> None:
    first, counters = slices.objects(slices.slice_specs(table()), 4)
    assert counters["spec"] == {
        "driver": "cloud.pyshim.io",
        "pool": {"name": "instances", "resourceSliceCount": 2, "generation": 4},
        "allNodes": True,
        "sharedCounters": [{"name": "a10", "counters": {"units": {"value": "20"}}}],
    }
    by_name = {each["name"]: each for each in first["spec"]["devices"]}
    assert by_name["a10-sixth-2"] == {
        "name": "a10-sixth-2",
        "attributes": {"product": {"string": "a10-sixth"}, "kind": {"string": "nvidia.com/gpu"}},
        "capacity": {"memory": {"value": str(4 << 30)}},
        "consumesCounters": [{"counterSet": "a10", "counters": {"units": {"value": "6"}}}],
    }
    assert by_name["h100-0"]["attributes"] == {
        "product": {"string": "h100"},
        "kind": {"string": "nvidia.com/gpu"},
        "model": {"string": "H100"},
        "architecture": {"string": "Hopper"},
        "mig": {"bool": True},
        "slices": {"int": 7},
    }
    assert len(by_name) == 12
    assert {slices.product_of(name) for name in by_name} == {"h100", "a10-sixth"}


def test_more_devices_than_a_slice_holds_are_in_several_and_nodes_are_named_by_labels() -> None:
    specs = slices.slice_specs(table(WITHOUT_QUOTA.replace("count = 9", "count = 130") + '[nodes]\n"peer" = "yes"\n'))
    assert [len(each["devices"]) for each in specs] == [64, 64, 2]
    assert {each["pool"]["resourceSliceCount"] for each in specs} == {3}
    terms = [{"matchExpressions": [{"key": "peer", "operator": "In", "values": ["yes"]}]}]
    assert all(each["nodeSelector"] == {"nodeSelectorTerms": terms} and "allNodes" not in each for each in specs)


async def test_a_changed_table_is_a_new_generation_and_an_equal_one_is_not(tmp_path: Path) -> None:
    server = FakeApiServer()
    async with server.serving(tmp_path) as access, Api(access) as api:
        await publish(api, table(WITHOUT_QUOTA))
        first = dict(server.slices)
        first_devices = [f"h100-{number}" for number in range(9)]
        assert devices_of(server) == {1: first_devices}
        for each in server.slices.values():
            each["spec"]["perDeviceNodeSelection"] = None  # a default that the server adds
        await publish(api, table(WITHOUT_QUOTA))
        assert server.slices.keys() == first.keys()
        await publish(api, table(WITHOUT_QUOTA.replace("count = 9", "count = 2")))
        assert devices_of(server) == {2: ["h100-0", "h100-1"]}
        await withdraw(api)
        assert not server.slices


async def test_drivers_of_other_nodes_may_be_quicker(tmp_path: Path) -> None:
    """The same table of another node is the same offer; one that always differs is given up with its reason."""
    server = FakeApiServer()
    wanted = slices.slice_specs(table(WITHOUT_QUOTA))

    def same() -> None:
        (other,) = slices.objects(wanted, 1)
        server.slices.setdefault(other["metadata"]["name"], other)

    def another() -> None:
        generation = slices.newest(list(server.slices.values())) + 1
        (other,) = slices.objects(slices.slice_specs(table(WITHOUT_QUOTA.replace("9", "3"))), generation)
        server.slices = {other["metadata"]["name"]: other}

    async with server.serving(tmp_path) as access, Api(access) as api:
        server.before_create = same
        await publish(api, table(WITHOUT_QUOTA))
        assert len(server.slices) == 1
        server.slices.clear()
        server.before_create = another
        with pytest.raises(Unavailable, match="drivers of other nodes offer others, 5 times"):
            await publish(api, table(WITHOUT_QUOTA))


async def test_a_server_that_drops_counters_is_offered_nothing(tmp_path: Path) -> None:
    """Devices without their counters would be given away more often than the quota allows."""
    server = FakeApiServer()
    server.dropped_fields = ("sharedCounters",)
    async with server.serving(tmp_path) as access, Api(access) as api:
        with pytest.raises(FailedPrecondition, match=r"drops 'sharedCounters' of a slice \(hint: a quota needs"):
            await publish(api, table())
    assert not server.slices


async def test_a_broken_table_and_an_absent_server_leave_the_offer_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(offer, "LOOK_S", 0.01)
    server = FakeApiServer()
    path = tmp_path / "instances.toml"
    path.write_text(WITHOUT_QUOTA)

    async def until(holds: Callable[[], bool]) -> None:
        for _ in range(3000):
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{devices_of(server)}, {caplog.text}")

    def says(text: str) -> bool:
        return any(text in str(vars(record)) for record in caplog.records)

    async with server.serving(tmp_path) as access, Api(access) as api:
        server.faults = [503, 500]
        keeping = asyncio.ensure_future(keep_offered(api, path, tmp_path / "run" / "copy.toml"))
        await until(lambda: devices_of(server).keys() == {1})
        assert says("GET /apis/resource.k8s.io/v1/resourceslices: Fault")
        path.write_text("[[type]")
        await until(lambda: says("read instance types"))
        path.unlink()
        await until(lambda: says("No such file"))
        assert devices_of(server).keys() == {1}
        assert (tmp_path / "run" / "copy.toml").read_text() == WITHOUT_QUOTA
        path.write_text(WITHOUT_QUOTA.replace("count = 9", "count = 1"))
        await until(lambda: devices_of(server) == {2: ["h100-0"]})
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
