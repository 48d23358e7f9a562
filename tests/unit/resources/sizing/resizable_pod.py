"""Pods whose VM follows their containers, or does not, and what their record says."""

from collections.abc import Mapping
from typing import Any

from pyshim.model.ids import ContainerId
from pyshim.model.units import MIB
from tests.unit.pod.conftest import DOCUMENT, MEMBER, SANDBOX, Stack, until


def document(*, static: bool = False, **hypervisor: object) -> Mapping[str, Any]:
    qemu = {**DOCUMENT["hypervisor"]["qemu"], "default_memory": 512, **hypervisor}
    return {"hypervisor": {"qemu": qemu}, "runtime": {"static_sandbox_resource_mgmt": static}}


def resources(*, cpus: float = 0, mib: int = 0, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict(more)
    if cpus:
        found["cpu"] = {"quota": int(cpus * 100_000), "period": 100_000}
    if mib:
        found["memory"] = {"limit": mib * MIB}
    return found


async def start_pod(stack: Stack, **keys: Any) -> None:
    stack.document = document(**keys)
    await stack.run("c1", ["sleep"], annotations=SANDBOX)


async def add(stack: Stack, name: str, asked: Mapping[str, Any]) -> ContainerId:
    spec = {"annotations": MEMBER, "linux": {"resources": asked}}
    return await stack.run(name, ["sleep"], **spec)


def sizing(stack: Stack) -> Mapping[str, Any]:
    found: Mapping[str, Any] = stack.records[0].snapshots[-1].sizing
    return found


def granted(stack: Stack) -> tuple[int, int]:
    """The persisted record."""
    return sizing(stack)["vcpus"]["granted"], sizing(stack)["memory_mib"]["granted"]


async def settled(stack: Stack, vcpus: int, memory_mib: int) -> None:
    await until(lambda: granted(stack) == (vcpus, memory_mib))
