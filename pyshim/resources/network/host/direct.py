"""A network of devices that a plugin prepared for the VM: nothing of a namespace is connected."""

from typing import TYPE_CHECKING, NoReturn

from pyshim.model.errors import Unavailable
from pyshim.resources.network.host.functions import NetworkFunctions
from pyshim.resources.network.host.loopback_door import LoopbackDoor
from pyshim.resources.network.host.pod_network import opened_door
from pyshim.resources.network.host.session import NetworkSession

if TYPE_CHECKING:
    from pyshim.model.network import DirectNetwork
    from pyshim.model.vm import NicDevice, VfioDevice


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

    async def bind_functions(self) -> None:
        """What was taken until an error is given back by `disconnect`."""
        for mac, address in self._wanted.items():
            self.functions[mac] = await self._functions.bind(address)

    async def open_door(self, session: NetworkSession, netns_path: str) -> None:
        """Connections to the namespace's loopback come to `door`; on a host that cannot steer them it stays None."""
        self.door = await opened_door(session, netns_path)

    async def changed(self) -> NoReturn:
        """What a file said does not change."""
        raise Unavailable("watch network: its devices were named by a file")

    async def follow(self) -> tuple[tuple["NicDevice", ...], tuple[str, ...]]:
        return (), ()

    async def detach(self, nic_id: str) -> None: ...

    def unwatch(self) -> None: ...

    def close_taps(self) -> None: ...

    async def disconnect(self) -> None:
        """Functions have the drivers they had. Idempotent; raises the first ShimError after having tried everything."""
        if self.door is not None:
            await self.door.close()
        await self._functions.unbind()
