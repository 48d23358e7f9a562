"""A network of devices that a plugin prepared for the VM: no link of a namespace is connected."""

from typing import TYPE_CHECKING, NoReturn

from pyshim.model.errors import Unavailable
from pyshim.resources.network.host.functions import NetworkFunctions
from pyshim.resources.network.host.loopback_listener import LoopbackListener
from pyshim.resources.network.host.pod_network import forward_listener_in
from pyshim.resources.network.host.session import NetworkSession

if TYPE_CHECKING:
    from pyshim.model.network import DirectNetwork
    from pyshim.model.vm import NicDevice, VfioDevice


class HostDirectNetwork:
    """Implements the seam `Network` with the devices of the file, which stay as they are."""

    def __init__(self, direct: "DirectNetwork", functions: NetworkFunctions) -> None:
        self.nics: tuple[NicDevice, ...] = ()
        self.vhost_user_nics = direct.vhost_user
        self.functions: dict[str, VfioDevice] = {}
        self.interfaces = direct.interfaces
        self.routes = direct.routes
        self.neighbours = direct.neighbours
        self.forward_listener: LoopbackListener | None = None
        self._wanted = direct.functions
        self._functions = functions

    async def bind_functions(self) -> None:
        """Every function is VFIO's. After an error, `disconnect` gives back those that were bound."""
        for mac, address in self._wanted.items():
            self.functions[mac] = await self._functions.bind(address)

    async def open_forward_listener(self, session: NetworkSession, netns_path: str) -> None:
        """`forward_listener` takes connections to the namespace's loopback; None on a host that cannot steer them."""
        self.forward_listener = await forward_listener_in(session, netns_path)

    async def changed(self) -> NoReturn:
        """Raises Unavailable: a file's devices do not change."""
        raise Unavailable("watch network: its devices were named by a file")

    async def follow(self) -> tuple[tuple["NicDevice", ...], tuple[str, ...]]:
        return (), ()

    async def detach(self, nic_id: str) -> None: ...

    def unwatch(self) -> None: ...

    def close_taps(self) -> None: ...

    async def disconnect(self) -> None:
        """Functions have the drivers they had. Idempotent; raises the first ShimError after having tried everything."""
        if self.forward_listener is not None:
            await self.forward_listener.close()
        await self._functions.unbind()
