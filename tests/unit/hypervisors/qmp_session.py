"""A monitor of a scripted QEMU."""

from hypervisors.qemu.qmp import Monitor, QmpEvent
from tests.fakes.qmp_peer import Answer, QmpPeer


class Session:
    """A monitor on a scripted peer."""

    def __init__(self, answers: dict[str, Answer] | None = None, *, greeting: bytes | None = None) -> None:
        self.events: list[QmpEvent] = []
        self.peer = QmpPeer(answers, greeting=greeting)
        self.monitor = Monitor(name="vm1", on_event=self.events.append)

    async def __aenter__(self) -> "Session":
        await self.monitor.connect(self.peer.client, 5)
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.monitor.close()
        await self.peer.close()
