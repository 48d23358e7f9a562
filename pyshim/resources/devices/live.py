"""The devices passed through to one sandbox, and their containers.

Cold plugged devices are in the VM from the start. Further devices of a container are plugged when it is created and
unplugged when it is deleted.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Protocol

from pyshim.concurrency.tasks import TaskOwner, to_the_end
from pyshim.model.config import Config
from pyshim.model.devices import DeviceQuestion, FoundDevice, PodDevices
from pyshim.model.errors import FailedPrecondition
from pyshim.model.guest import GuestContainer
from pyshim.model.ids import ContainerId
from pyshim.model.oci import ContainerKind, OciSpec, container_name, membership
from pyshim.model.plans import SandboxPlan
from pyshim.model.vm import VfioDevice
from pyshim.resources.devices.plan.devices import (
    GUEST_KERNEL,
    container_question,
    inner_names,
    kata_vfio_device,
    passed_nodes,
    remote_question,
    vfio_devices,
    with_passed,
)
from pyshim.resources.devices.plan.env import guest_env
from pyshim.resources.devices.plan.remote import own_names, remote_devices, with_names, without_gpu_count
from pyshim.resources.devices.vm_devices import PluggedDevices, VmDevices

log = logging.getLogger(__name__)

FindDevices = Callable[[DeviceQuestion], Awaitable[PodDevices]]


def log_found(found: PodDevices, sandbox_id: str) -> None:
    """Logs every device with its origin, and the CPUs and memory that the kubelet chose."""
    for device in found.devices:
        request = device.request
        name = request.name or device.nodes[0].path
        fields = {"device": name, "origin": request.origin, "container": request.container}
        log.info("device found", extra={"sandbox": sandbox_id, **fields})
        if device.left_out:
            what = {"device": name, "left_out": ", ".join(device.left_out)}
            log.warning("of a device's spec only VFIO nodes and variables count", extra={"sandbox": sandbox_id, **what})
    for container, cpus in found.cpu_ids.items():
        log.info("exclusive cpus", extra={"sandbox": sandbox_id, "container": container, "cpus": str(cpus)})
    for container, sizes in found.memory.items():
        log.info("memory kept on nodes", extra={"sandbox": sandbox_id, "container": container, "bytes": str(sizes)})


class ContainerDevices(Protocol):
    async def attach(self, guest: GuestContainer, spec: OciSpec) -> GuestContainer:
        """`guest` with its devices. Undone by `detach`, also when this raises."""

    def saved(self) -> tuple[Mapping[str, object], ...]:
        """The devices passed through from this host, as Kata's state spells them."""

    async def detach(self, container_id: str) -> None:
        """Devices that only this container used have left the VM, or leave it in the background."""


class PassedDevices:
    def __init__(self, *, plan: SandboxPlan, vm_devices: VmDevices, tasks: TaskOwner, find: FindDevices) -> None:
        self._config: Config = plan.config
        self._sandbox_id = plan.sandbox_id
        self._vm_devices = vm_devices
        self._find = find
        self._found: list[FoundDevice] = list(plan.devices.devices)
        self._known = plan.devices
        self._paths = {placed.device.id: placed.pci_path for placed in plan.local_vm.pci.placed}
        self._hot = PluggedDevices(vm_devices, tasks, forget=self._forget)
        # A device's name in the guest depends on all devices in the VM.
        self._lock = asyncio.Lock()

    async def attach(self, guest: GuestContainer, spec: OciSpec) -> GuestContainer:
        """`guest` with its devices, hot plugged if need be. Undone by `detach`, also when this raises."""
        if membership(spec.annotations, ContainerId(guest.container_id)).kind is ContainerKind.POD_SANDBOX:
            return guest  # the pause container uses no device
        question = container_question(spec, self._config, self._known)
        name = container_name(spec.annotations)
        mine = [device for device in self._known.devices if name and device.request.container == name]
        nodes = {device.path for device in spec.devices}
        if question.is_empty and not mine and not any(node.path in nodes for node in self._known.nodes()):
            return guest
        new = await self._find(question)
        log_found(new, self._sandbox_id)
        devices = vfio_devices(new.nodes())
        async with AsyncExitStack() as locks:
            for device_id in sorted(device.id for device in devices):  # every caller in the same order
                await locks.enter_async_context(self._hot.locked(device_id))
            await locks.enter_async_context(self._lock)
            await self._plug(guest.container_id, devices)
            self._found += new.devices
            wanted = {node.path for device in (*mine, *new.devices) for node in device.nodes} | nodes
            everything = passed_nodes(self._found, self._paths)
            own = [passed for passed in everything if passed.node.path in wanted]
            names = inner_names(everything, self._config.runtime.vfio_device_kinds)
        mode = self._config.runtime.vfio_mode
        for passed in own:
            inner = names[passed.node.path] if mode == GUEST_KERNEL else ()
            fields = {"container": guest.container_id, "device": passed.node.path, "inner": ",".join(inner)}
            log.info("device given", extra={"sandbox": self._sandbox_id, **fields})
        given = [text for device in (*mine, *new.devices) for text in device.env]
        env, left_out = guest_env(given, own, names if mode == GUEST_KERNEL else {})
        if left_out:
            fields = {"container": guest.container_id, "variables": ",".join(left_out)}
            log.info("variables name devices of the host, left out", extra={"sandbox": self._sandbox_id, **fields})
        return with_passed(guest, own, names, env, mode)

    async def _plug(self, container_id: str, devices: tuple[VfioDevice, ...]) -> None:
        """Each of `devices` is in the VM. Of those not cold plugged, the container is a user."""
        for device in devices:
            if device.id in self._paths:
                if device.id in self._hot:
                    self._hot.add(device.id, container_id)
                continue
            if not self._vm_devices.capabilities().pci_hotplug:
                raise FailedPrecondition(
                    f"pass {device.host_address} through: it is not among the devices the vm was made with, and"
                    f" hot_plug_vfio in '{self._config.source}' is \"no-port\""
                )
            # To the end: the undo of a cancelled Create must see whether the device is plugged.
            await to_the_end(self._plug_one(container_id, device))

    async def _plug_one(self, container_id: str, device: VfioDevice) -> None:
        location = await self._vm_devices.plug(device)
        self._paths[device.id] = location.pci_path
        self._hot.add(device.id, container_id)

    def saved(self) -> tuple[Mapping[str, object], ...]:
        """Every node whose functions are all in the VM, as Kata's state spells it."""
        there = [device for device in self._found if self._is_in_vm(device)]
        return tuple(
            kata_vfio_device(passed, cold=not any(each.address in self._hot for each in passed.node.functions))
            for passed in passed_nodes(there, self._paths)
        )

    def _is_in_vm(self, device: FoundDevice) -> bool:
        return all(each.address in self._paths for node in device.nodes for each in node.functions)

    async def detach(self, container_id: str) -> None:
        await self._hot.detach(container_id)

    def _forget(self, device_id: str) -> None:
        self._paths.pop(device_id, None)
        self._found = [device for device in self._found if self._is_in_vm(device)]


class RemoteVmDevices:
    """The devices of a remote VM, which was chosen by them. Each container gets its devices by name."""

    def __init__(self, *, plan: SandboxPlan, find: FindDevices) -> None:
        self._sandbox_id = plan.sandbox_id
        self._known = plan.devices
        self._names = remote_devices(plan.devices, plan.config.runtime.vfio_device_kinds).names
        self._find = find

    async def attach(self, guest: GuestContainer, spec: OciSpec) -> GuestContainer:
        guest = without_gpu_count(guest, self._known)
        if membership(spec.annotations, ContainerId(guest.container_id)).kind is ContainerKind.POD_SANDBOX:
            return guest  # the pause container uses no device
        asked = await self._find(remote_question(spec))
        inner = own_names(self._known, self._names, container_name(spec.annotations), asked)
        if inner:
            fields = {"container": guest.container_id, "inner": ",".join(inner)}
            log.info("devices given", extra={"sandbox": self._sandbox_id, **fields})
        return with_names(guest, inner)

    def saved(self) -> tuple[Mapping[str, object], ...]:
        return ()

    async def detach(self, container_id: str) -> None:
        """No effect: devices stay with the VM."""


def container_devices(
    *, plan: SandboxPlan, vm_devices: VmDevices, tasks: TaskOwner, find: FindDevices
) -> ContainerDevices:
    """The devices of the sandbox's VM."""
    if plan.config.is_remote:
        return RemoteVmDevices(plan=plan, find=find)
    return PassedDevices(plan=plan, vm_devices=vm_devices, tasks=tasks, find=find)
