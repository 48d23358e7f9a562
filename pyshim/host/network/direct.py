"""A network of devices that somebody else prepared for the VM: nothing of a namespace is connected."""

from typing import TYPE_CHECKING, NoReturn

from pyshim.host.network.functions import NetworkFunctions
from pyshim.host.network.loopback_door import LoopbackDoor
from pyshim.host.network.pod_network import opened_door
from pyshim.host.network.session import NetworkSession
from pyshim.model.errors import Unavailable

if TYPE_CHECKING:
    from hypervisors.base import NicDevice, VfioDevice
    from pyshim.plan.direct_network import DirectNetwork


class HostDirectNetwork:
    """Implements the seam `Network`: what the file said, for as long as the sandbox lives."""

    def __init__(self, direct: "DirectNetwork", functions: NetworkFunctions) -> None:
        self.nics: tuple[NicDevice, ...] = ()
        self.vhost_user_nics = direct.vhost_user
        self.functions: dict[str, VfioDevice] = {}
        self.interfaces = direct.interfaces
        self.routes = direct.routes
        self.neighbours = direct.neighbours
        self.door: LoopbackDoor | None = None
        self._wanted = direct.functions
        self._functions = functions

    async def take_functions(self) -> None:
        """What was taken until an error is given back by `disconnect`."""
        for mac, address in self._wanted.items():
            self.functions[mac] = await self._functions.take(address)

    async def open_door(self, session: NetworkSession, netns_path: str) -> None:
        """Connections to the namespace's loopback come to `door`; on a host that cannot steer them it stays None."""
        self.door = await opened_door(session, netns_path)

    async def changed(self) -> NoReturn:
        """What a file said does not change."""
        raise Unavailable("watch network: its devices were named by a file")

    async def follow(self) -> tuple[tuple["NicDevice", ...], tuple[str, ...]]:
        return (), ()

    async def drop(self, nic_id: str) -> None: ...

    def unwatch(self) -> None: ...

    def close_taps(self) -> None: ...

    async def disconnect(self) -> None:
        """Functions have the drivers they had. Idempotent; raises the first ShimError after having tried everything."""
        if self.door is not None:
            self.door.close()
        await self._functions.give_back()
