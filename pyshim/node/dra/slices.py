"""The ResourceSlices that offer the devices of a table of instance types. Pure.

Source: Kubernetes, resource.k8s.io/v1. A pool consists of its slices of the highest generation. A slice has at
most 128 devices, 64 where they consume counters; counters are in a slice without devices (since 1.35).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pyshim.model.units import MIB
from pyshim.resources.devices.plan.instances import InstanceTable, Product

DRIVER = "cloud.pyshim.io"
POOL = "instances"
_MOST_DEVICES = 64
Object = Mapping[str, Any]


def device_name(product: str, number: int) -> str:
    return f"{product}-{number}"


def product_of(device: str) -> str:
    return device.rpartition("-")[0]


def slice_specs(table: InstanceTable) -> list[dict[str, Any]]:
    """The specs of the pool's slices, without generation. The same table gives the same specs."""
    devices = [
        _device(name, number, product)
        for name, product in sorted(table.device.items())
        for number in range(table.offered(name))
    ]
    contents: list[dict[str, Any]] = [
        {"devices": devices[first : first + _MOST_DEVICES]} for first in range(0, len(devices), _MOST_DEVICES)
    ]
    if table.quota:
        counters = [
            {"name": name, "counters": {"units": {"value": str(quota.units)}}}
            for name, quota in sorted(table.quota.items())
        ]
        contents.append({"sharedCounters": counters})
    where = _where(table.nodes)
    return [
        {"driver": DRIVER, "pool": {"name": POOL, "resourceSliceCount": len(contents)}, **where, **content}
        for content in contents
    ]


def _device(name: str, number: int, product: Product) -> dict[str, Any]:
    words = {"product": name, "kind": product.kind, "model": product.model, **product.attributes}
    device: dict[str, Any] = {
        "name": device_name(name, number),
        "attributes": {key: _attribute(value) for key, value in words.items() if value != ""},
    }
    if product.memory_mib:
        device["capacity"] = {"memory": {"value": str(product.memory_mib * MIB)}}
    if product.quota:
        units = {"units": {"value": str(product.units)}}
        device["consumesCounters"] = [{"counterSet": product.quota, "counters": units}]
    return device


def _attribute(value: str | int | bool) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"bool": value}
    return {"int": value} if isinstance(value, int) else {"string": value}


def _where(nodes: Mapping[str, str]) -> dict[str, Any]:
    if not nodes:
        return {"allNodes": True}
    terms = [{"key": key, "operator": "In", "values": [value]} for key, value in sorted(nodes.items())]
    return {"nodeSelector": {"nodeSelectorTerms": [{"matchExpressions": terms}]}}


def objects(specs: Sequence[Object], generation: int) -> list[dict[str, Any]]:
    """The objects of a generation of the pool. Every node's driver gives them the same names."""
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"{POOL}-{generation}-{index}.{DRIVER}"},
            "spec": {**spec, "pool": {**spec["pool"], "generation": generation}},
        }
        for index, spec in enumerate(specs)
    ]


def newest(found: Sequence[Object]) -> int:
    """The highest generation of the pool among the driver's slices; 0 without any."""
    return max((_generation(each) for each in found if _is_of_pool(each)), default=0)


def outdated(found: Sequence[Object], generation: int) -> list[str]:
    """The names of the pool's slices of earlier generations."""
    return [each["metadata"]["name"] for each in found if _is_of_pool(each) and _generation(each) < generation]


def offers(found: Sequence[Object], specs: Sequence[Object]) -> bool:
    """True if the newest generation at the API server is made of `specs` and no others."""
    generation = newest(found)
    there = [each["spec"] for each in found if _is_of_pool(each) and _generation(each) == generation]
    wanted = [each["spec"] for each in objects(specs, generation)]
    return len(there) == len(wanted) and all(any(_has_all(one, spec) for one in there) for spec in wanted)


def _has_all(kept: Any, wanted: Any) -> bool:
    """True if `kept` has all of `wanted`. The API server adds defaults."""
    match kept, wanted:
        case Mapping(), Mapping():
            return all(key in kept and _has_all(kept[key], each) for key, each in wanted.items())
        case list(), list():
            return len(kept) == len(wanted) and all(map(_has_all, kept, wanted))
    return bool(kept == wanted)


def lost_field(kept: Object, sent: Object) -> str:
    """The field of the spec that the API server has dropped, because a feature is off there; "" if none."""
    for key, value in sent["spec"].items():
        if not _has_all(kept.get("spec", {}).get(key), value):
            return str(key)
    return ""


def _generation(found: Object) -> int:
    return int(found["spec"]["pool"].get("generation", 0))


def _is_of_pool(found: Object) -> bool:
    return bool(found["spec"]["pool"].get("name") == POOL)
