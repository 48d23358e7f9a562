"""Interfaces that come and go while the pod runs: VM and guest follow the pod's network namespace.

A plugin may add an interface to a running pod, and a runtime may set up the network after it has created the sandbox
(Docker, `ctr run --cni`). The kernel reports the change; nothing here polls.
"""

import asyncio
import logging

from msgspec.structs import replace

from pyshim.concurrency.tasks import cancel_all
from pyshim.model.errors import FailedPrecondition, NotFound, ShimError
from pyshim.model.guest import NetworkInterface, NetworkRoute
from pyshim.model.seams import Agent, Network
from pyshim.model.vm import NicDevice
from pyshim.resources.network.resolver import Resolver
from pyshim.resources.services import VmServices

log = logging.getLogger(__name__)

SETTLE_S = 0.3
"""Seconds from a change to the look at the namespace: a plugin makes a link, then addresses, then routes."""
RETRIES_S = (2.0, 10.0)
"""Seconds before further looks, after a failed one or while the guest has not released an interface without a link."""


class NetworkChanges:
    """Updates VM and guest from `start` to `close`."""

    def __init__(self, services: VmServices, *, network: Network, resolver: Resolver | None, agent: Agent) -> None:
        """The guest has been configured with the present attributes of `network`. `resolver` follows the namespace."""
        self._services = services
        self._sandbox_id = services.plan.sandbox_id
        self._network = network
        self._resolver = resolver
        self._agent = agent
        self._task: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()
        self._is_behind = False
        """A change was reported, and the look at the namespace that it makes necessary has not succeeded yet."""
        self._configured: dict[str, NetworkInterface] = {interface.mac: interface for interface in network.interfaces}
        self._configured_routes: tuple[NetworkRoute, ...] = network.routes
        self._configured_neighbours = set(network.neighbours)
        self._paths: dict[str, str] = {}
        """The PCI path in the guest of each device plugged later, by MAC."""
        self._leaving: dict[str, None] = {}
        """Devices that the guest was asked to release and has not, in the order of asking."""

    def start(self) -> None:
        self._task = self._services.tasks.supervise(f"network/{self._sandbox_id}", self._follow())

    async def close(self) -> None:
        """No further change is made, and none is left half made. Idempotent."""
        if self._task is not None:
            await cancel_all(self._task)

    async def catch_up(self) -> None:
        """VM and guest have every change that the kernel has reported until now.

        Raises the first ShimError of a change that could not be made; it is tried again at the next change.
        """
        self._is_behind = self._network.is_changed() or self._is_behind
        if self._is_behind and (failure := await self._look()):
            raise failure

    async def _follow(self) -> None:
        while True:
            try:
                await self._network.changed()
            except ShimError as exc:
                log.debug("network is no longer followed", extra={"sandbox": self._sandbox_id, "error": str(exc)})
                return
            self._is_behind = True
            for pause_s in (SETTLE_S, *RETRIES_S):
                await asyncio.sleep(pause_s)
                if self._is_behind or self._leaving:
                    await self._look()
                if not (self._is_behind or self._leaving):
                    break
            # After the last try, what is left is retried at the next change.

    async def _look(self) -> ShimError | None:
        """VM and guest are as the namespace is now, but for what failed: the first failure, which is logged."""
        async with self._looking:
            self._is_behind = False
            try:
                return await self._apply()
            except ShimError as exc:
                self._is_behind = True
                self._log_failure("follow network", "", exc)
                return exc

    async def _apply(self) -> ShimError | None:
        failures: list[ShimError] = []
        try:
            found = await self._network.follow()
            earlier = tuple(nic_id for nic_id in self._leaving if nic_id not in found.gone)
            for nic_id in found.gone:
                await self._remove(nic_id)
            failures += [FailedPrecondition(reason) for reason in found.refused]
            macs = {nic.mac: nic for nic in found.added if await self._add(nic, failures)}
        finally:
            self._network.close_taps()
        await self._configure_interfaces(macs, failures)
        await self._configure_routes()
        if self._resolver is not None:
            await self._resolver.follow()
        self._services.on_change()
        for nic_id in earlier:  # last: a slow guest answers late
            await self._remove(nic_id)
        if earlier:
            self._services.on_change()
        return failures[0] if failures else None

    async def _add(self, nic: NicDevice, failures: list[ShimError]) -> bool:
        try:
            location = await self._services.vm_devices.plug(nic)
        except ShimError as exc:
            self._log_failure("plug interface", nic.id, exc)
            failures.append(exc)
            await self._drop(nic.id)
            return False
        self._paths[nic.mac] = location.pci_path
        extra = {"sandbox": self._sandbox_id, "device": nic.id, "mac": nic.mac, "at": location.pci_path}
        log.info("interface plugged", extra=extra)
        return True

    async def _remove(self, nic_id: str) -> None:
        """The interface has left the VM, or the guest will be asked again to release it.

        An interface with which the VM booted stays, without a link.
        """
        try:
            await self._services.vm_devices.unplug(nic_id)
        except NotFound:
            self._leaving.pop(nic_id, None)
            log.warning("interface without a link", extra={"sandbox": self._sandbox_id, "device": nic_id})
            return
        except ShimError as exc:
            self._log_failure("unplug interface", nic_id, exc)
            self._leaving[nic_id] = None
            return
        self._leaving.pop(nic_id, None)
        log.info("interface unplugged", extra={"sandbox": self._sandbox_id, "device": nic_id})
        await self._drop(nic_id)

    async def _drop(self, nic_id: str) -> None:
        """The host drops the interface's tap and wiring. A failure is logged; the sandbox's end releases the rest."""
        try:
            await self._network.detach(nic_id)
        except ShimError as exc:
            self._log_failure("drop interface", nic_id, exc)

    async def _configure_interfaces(self, added: dict[str, NicDevice], failures: list[ShimError]) -> None:
        now = {item.mac: replace(item, device_path=self._paths.get(item.mac, "")) for item in self._network.interfaces}
        for mac in self._configured.keys() - now.keys():
            del self._configured[mac]
            self._paths.pop(mac, None)
        for mac, interface in now.items():
            if self._configured.get(mac) == interface:
                continue
            try:
                await self._agent.update_interface(interface)
            except ShimError as exc:
                self._log_failure("set up interface", interface.name, exc)
                failures.append(exc)
                if mac in added:
                    await self._remove(added[mac].id)
                continue
            self._configured[mac] = interface

    async def _configure_routes(self) -> None:
        """One call with every route: kata-agent removes routes that the call leaves out."""
        routes = self._network.routes
        if routes and routes != self._configured_routes:
            await self._agent.update_routes(routes)
            self._configured_routes = routes
        self._configured_neighbours &= set(self._network.neighbours)
        new = tuple(item for item in self._network.neighbours if item not in self._configured_neighbours)
        if new:
            await self._agent.add_neighbours(new)
            self._configured_neighbours.update(new)

    def _log_failure(self, what: str, about: str, exc: ShimError) -> None:
        log.error(what, extra={"sandbox": self._sandbox_id, "device": about, "error": str(exc)})
