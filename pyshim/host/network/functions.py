"""Network cards of the host that a VM is given whole: taken from their drivers for as long as the sandbox lives."""

import logging

from hypervisors.base import VfioDevice
from pyshim.host import vfio
from pyshim.host.processes.own_thread import in_own_thread
from pyshim.model.errors import ShimError
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind

log = logging.getLogger("pyshim.host.network")


class NetworkFunctions:
    """PCI functions of one sandbox. Owns the bindings made here until `give_back`."""

    def __init__(
        self, ledger: Ledger, *, iommufd: bool, sys: str = "/sys", write: vfio.Write = vfio.write_file
    ) -> None:
        """`iommufd`: they are opened through nodes of their own rather than their IOMMU groups'."""
        self._ledger = ledger
        self._iommufd = iommufd
        self._sys = sys
        self._write = write
        self._bound: list[LedgerEntry] = []

    async def take(self, address: str) -> VfioDevice:
        """The function is VFIO's; if another driver had it, it goes back there in the end.

        Raises NotFound or FailedPrecondition, naming function and driver, and then nothing is bound for good.
        """
        if not self._iommufd:
            vfio.check_beside(address, sys=self._sys)
        former = vfio.driver_of(address, sys=self._sys)
        if "vfio" not in former:
            entry = LedgerEntry(kind=ResourceKind.VFIO, key=address, detail={"driver": former})
            self._ledger.acquire(entry)
            self._bound.append(entry)
            # A driver lets go of a card in its own time.
            await in_own_thread(vfio.bind, address, sys=self._sys, write=self._write)
            log.info("network function bound", extra={"function": address, "driver": former or "none"})
        path = vfio.node_of(address, iommufd=self._iommufd, sys=self._sys)
        (function,) = (each for each in vfio.vfio_node(path, sys=self._sys).functions if each.address == address)
        return VfioDevice(
            id=address,
            host_address=address,
            iommufd=self._iommufd,
            vendor_id=function.vendor,
            device_id=function.device,
        )

    async def give_back(self) -> None:
        """Each has the driver it had. Idempotent; raises the first ShimError after having tried everything."""
        failure: ShimError | None = None
        for entry in reversed(tuple(self._bound)):
            try:
                await self._ledger.release(entry)
            except ShimError as error:
                failure = failure or error
            else:
                self._bound.remove(entry)
        if failure is not None:
            raise failure
