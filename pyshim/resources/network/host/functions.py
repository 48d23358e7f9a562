"""Network cards of the host that are passed to a VM: VFIO drives them while the sandbox lives."""

import asyncio
import logging

from pyshim.concurrency.undo import AcquiredEntries
from pyshim.host.threads import in_own_thread
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.vm import VfioDevice
from pyshim.resources.devices.host import vfio

log = logging.getLogger(__name__)

BINDING_WAIT_S = 8.0
"""Seconds that an undo waits for a driver to release a card; less than the undo itself has."""


class NetworkFunctions:
    """PCI functions of one sandbox. Owns the bindings made here until `unbind`."""

    def __init__(
        self, ledger: Ledger, *, iommufd: bool, sys: str = "/sys", write: vfio.Write = vfio.write_file
    ) -> None:
        """With `iommufd` each is opened through its own node, else through that of its IOMMU group."""
        self._iommufd = iommufd
        self._sys = sys
        self._write = write
        self._bound = AcquiredEntries(ledger)
        self._binding: asyncio.Future[str] | None = None

    async def bind(self, address: str) -> VfioDevice:
        """VFIO drives the function; `unbind` gives it back to its former driver.

        Raises NotFound or FailedPrecondition naming the function and its driver, or the sandbox that has it; then
        nothing stays bound.
        """
        if not self._iommufd:
            vfio.check_beside(address, sys=self._sys)
        # The entry precedes the look at the driver, because another sandbox may be giving the function back. This entry
        # needs no undo.
        self._bound.acquire(_entry(address, vfio.DRIVER))
        if not vfio.is_vfio(former := vfio.driver_of(address, sys=self._sys)):
            await self._bind(address, former)
        path = vfio.node_of(address, iommufd=self._iommufd, sys=self._sys)
        (function,) = (each for each in vfio.vfio_node(path, sys=self._sys).functions if each.address == address)
        return VfioDevice(
            id=address,
            host_address=address,
            iommufd=self._iommufd,
            vendor_id=function.vendor,
            device_id=function.device,
        )

    async def _bind(self, address: str, former: str) -> None:
        vfio.check_network_function(address, sys=self._sys)
        self._bound.acquire(_entry(address, former, vfio.override_of(address, sys=self._sys)))
        # A driver may be slow to release a card; the thread continues after its caller was cancelled.
        self._binding = asyncio.ensure_future(in_own_thread(vfio.bind, address, sys=self._sys, write=self._write))
        await asyncio.shield(self._binding)
        log.info("network function bound", extra={"function": address, "driver": former or "none"})

    async def unbind(self) -> None:
        """Each function has its former driver. Idempotent; raises the first ShimError after having tried everything.

        Raises FailedPrecondition, and nothing is touched, while one is still being bound.
        """
        if self._binding is not None:  # its thread could bind the function after the undo
            done, _ = await asyncio.wait([self._binding], timeout=BINDING_WAIT_S)
            if not done:
                raise FailedPrecondition(f"give back {self._bound.entries[-1].key}: its driver has not released it yet")
            self._binding.exception()  # the caller of `bind` had it, or was cancelled
            self._binding = None
        await self._bound.release(self._bound.entries)


def _entry(address: str, former: str, override: str = "") -> LedgerEntry:
    detail = {"driver": former}
    if override not in ("", vfio.DRIVER):
        detail["override"] = override
    return LedgerEntry(kind=ResourceKind.VFIO, key=address, detail=detail)
