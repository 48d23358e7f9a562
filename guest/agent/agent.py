"""The agent's state: what every call gets."""

from __future__ import annotations

from guest.agent.runtime.children import Children
from guest.agent.runtime.loop import Loop, Promise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.container.container import Container
    from guest.agent.container.crun import Crun
    from guest.agent.settings import Settings
    from guest.agent.storage.table import StorageTable
    from guest.agent.wire.codec import Message

VERSION = "0.1.0"
API_VERSION = "0.0.1"
_MAX_OOM_EVENTS = 100


class Sandbox:
    """What CreateSandbox made. `pid_namespace` is the path of the one that all containers share, "" for none."""

    def __init__(self) -> None:
        self.id = ""
        self.hostname = ""
        self.is_created = False
        self.pid_namespace = ""
        self.pidns_pid: int | None = None
        self.hooks: dict[str, list[Message]] = {}
        self.containers: dict[str, Container] = {}
        self.in_creation: set[str] = set()


class OomEvents:
    """Ids of containers that lost a process to the OOM killer, oldest dropped when nobody asks."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._events: list[str] = []
        self._arrival = Promise(loop)

    def add(self, container_id: str) -> None:
        self._events.append(container_id)
        del self._events[:-_MAX_OOM_EVENTS]
        arrival, self._arrival = self._arrival, Promise(self._loop)
        arrival.resolve()

    async def next(self) -> str:
        """The oldest event nobody has taken yet."""
        while not self._events:
            await self._arrival
        return self._events.pop(0)


class Agent:
    """One per process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.loop = Loop()
        self.children = Children(self.loop)
        self.sandbox = Sandbox()
        self.oom_events = OomEvents(self.loop)
        self._crun: Crun | None = None
        self._storages: StorageTable | None = None
        self.wants_shutdown = False

    @property
    def crun(self) -> Crun:
        if self._crun is None:
            from guest.agent.container.crun import Crun

            self._crun = Crun(self.children, fixed_addresses=self.settings.crun_fixed_addresses)
        return self._crun

    @property
    def storages(self) -> StorageTable:
        if self._storages is None:
            from guest.agent.storage.table import StorageTable

            self._storages = StorageTable(self)
        return self._storages
