"""Port-forward: the guest's loopback answers connections to the loopback of the pod's namespace on the host.

containerd enters the pod's network namespace and dials `localhost:<port>` there, but the pod's programs listen in the
VM. So one listener (`host/loopback_listener.py`) takes the namespace's loopback connections, and a program in the
guest carries each of them over the streams that every agent offers. It is made with the first connection.
"""

import asyncio
import itertools
import logging
from contextlib import suppress
from functools import partial

from pyshim.concurrency.deadlines import within
from pyshim.concurrency.stdio import Progress, pump_input
from pyshim.concurrency.tasks import cancel_all
from pyshim.model.errors import AgentGone, ShimError, Unavailable
from pyshim.model.seams import ContainerAgent, ForwardConnection, ForwardListener
from pyshim.resources.network.plan.relay import connection_process
from pyshim.resources.network.relay import GuestRelay
from pyshim.resources.services import SandboxServices

log = logging.getLogger(__name__)

_READ_BYTES = 256 * 1024

MAX_CONNECTIONS = 64
"""Each is a process in the guest; more are reset."""
LINGER_S = 10.0
"""Seconds of a listener's silence, after the client's last byte, that end the connection; containerd waits 1 s."""
END_TIMEOUT_S = 3.0
"""Seconds for the guest to end a connection's program; the pod's own end waits for it."""
_KILL = 9


class PortForward:
    """Serves one pod's listener from `start` to `close`. Owns the connections, not the listener."""

    def __init__(
        self, services: SandboxServices, *, listener: ForwardListener, relay: GuestRelay, agent: ContainerAgent
    ) -> None:
        self.has_listeners = False
        """True once a container may listen. Until then connections are reset: the guest's first container must be one
        of the pod's, since the pod's containers share the pid namespace of kata-agent's first container."""
        self._plan = services.plan
        self._tasks = services.tasks
        self._listener = listener
        self._agent = agent
        self._name = f"forward/{services.plan.sandbox_id}"
        self._serving: asyncio.Task[None] | None = None
        self._carrying: set[asyncio.Task[None]] = set()
        self._relay = relay
        self._serial = itertools.count(1)

    def start(self) -> None:
        self._serving = self._tasks.supervise(self._name, self._serve())

    async def close(self) -> None:
        """Every connection has ended, and no further one is accepted. Idempotent."""
        await cancel_all(*self._carrying, *([self._serving] if self._serving else []))
        await self._listener.close()

    async def _serve(self) -> None:
        while True:
            try:
                connection = await self._listener.accept()
            except Unavailable as exc:
                log.debug("ports are no longer forwarded", extra={"sandbox": self._plan.sandbox_id, "error": str(exc)})
                return
            if not self.has_listeners or len(self._carrying) >= MAX_CONNECTIONS:
                connection.reset()
                continue
            number = next(self._serial)
            task = self._tasks.supervise(f"{self._name}/{number}", self._carry(connection, f"forward-{number}"))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _carry(self, connection: ForwardConnection, exec_id: str) -> None:
        """The connection has ended: after the answer, or by a reset, as from a port without a listener."""
        try:
            status = await self._relayed(connection, exec_id)
            if status == 0:
                connection.close()
            else:
                extra = {"sandbox": self._plan.sandbox_id, "port": connection.port, "errno": status}
                log.info("no listener in the guest", extra=extra)
        except Unavailable as exc:
            log.debug("forwarded connection ended", extra={"port": connection.port, "error": str(exc)})
        except ShimError as exc:
            log.warning("forward port", extra={"port": connection.port, "error": str(exc)})
        finally:
            connection.reset()

    async def _relayed(self, connection: ForwardConnection, exec_id: str) -> int:
        """The exit status of the program that carried it."""
        container_id = await self._relay.container()
        await self._agent.exec_process(container_id, exec_id, connection_process(connection.port))
        progress = Progress()
        send = self._send(connection, container_id, exec_id, progress)
        sending = self._tasks.spawn(f"{self._name}/{exec_id}/in", send)
        try:
            while data := await self._read(container_id, exec_id):
                await connection.write(data)
                progress.moves += 1
            return await self._agent.wait_process(container_id, exec_id)
        except BaseException:
            with suppress(ShimError):
                async with within(END_TIMEOUT_S, f"end '{exec_id}' in guest"):
                    await self._end(container_id, exec_id)
            raise
        finally:
            await cancel_all(sending)

    async def _read(self, container_id: str, exec_id: str) -> bytes:
        """The next bytes of the listener; empty at its end, which kata-agent reports as an error."""
        try:
            return bytes(await self._agent.read_stdout(container_id, exec_id, _READ_BYTES))
        except AgentGone:
            raise
        except ShimError as exc:
            log.debug("forwarded output ended", extra={"exec": exec_id, "error": str(exc)})
            return b""

    async def _send(self, connection: ForwardConnection, container_id: str, exec_id: str, progress: Progress) -> None:
        """The listener has every byte of the client, then their end. If it is silent for LINGER_S, it is killed."""
        try:
            await pump_input(connection.read, partial(self._agent.write_stdin, container_id, exec_id))
            await self._agent.close_stdin(container_id, exec_id)
            seen = -1
            while seen != progress.moves:
                seen = progress.moves
                await asyncio.sleep(LINGER_S)
        except Unavailable as exc:
            log.debug("client of a forwarded port is gone", extra={"exec": exec_id, "error": str(exc)})
        await self._agent.signal_process(container_id, exec_id, _KILL)

    async def _end(self, container_id: str, exec_id: str) -> None:
        """The guest's process has ended and kata-agent has forgotten it, which its WaitProcess does."""
        await self._agent.signal_process(container_id, exec_id, _KILL)
        await self._agent.wait_process(container_id, exec_id)
