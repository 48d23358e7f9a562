"""The plugin's connections to its runtime.

Theory of operation. One connection after the other, each like the first:

    connect --> RegisterPlugin --> Configure, Synchronize (the runtime asks) --> events and UpdateContainers
       ^                                                                             |
       +------------------------ pause <---------- the connection ends --------------+

A runtime disconnects a plugin that exceeds its time-out, and pods go on without it. So every call is answered at once,
from the state in `Pods`. Updates of other containers are separate requests: the runtime answers them only after the
call under way, so a plugin that waited for them inside that call would wait for itself.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import signal
import socket
from collections.abc import Callable

from pyshim.concurrency.tasks import TaskOwner, cancel_all
from pyshim.host.fds import listening_socket
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.host_facts import Machine, MachineError
from pyshim.model.places import REGISTER
from pyshim.node.nri import translate
from pyshim.node.nri.mux import PLUGIN_SERVICE, RUNTIME_SERVICE, Mux, MuxError
from pyshim.node.nri.pods import CpuSet, NriContainer, NriPod, Pods
from pyshim.node.nri.shims import Shims
from pyshim.state.store import StateStore
from pyshim.ttrpc import CallContext, Client, ImmediateHandler, RemoteError, Server, TtrpcError, connected_unix_socket

log = logging.getLogger(__name__)

_PLUGIN, _RUNTIME = "nri.pkg.api.v1alpha1.Plugin", "nri.pkg.api.v1alpha1.Runtime"
REGISTRATION_S = 30.0
"""Seconds until the runtime has taken, configured and synchronized the plugin. It takes plugins one at a time, and
gives each 5 s by default."""
UPDATE_S = 60.0
"""Seconds for one UpdateContainers: the runtime, and a shim for each container, do it one container at a time."""
UPDATES_PER_CALL = 64
"""The peer disconnects when 256 frames of 4 KiB are unread; a call with this many updates is two frames."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
"""Seconds before the next attempt to connect; doubled until a runtime has synchronized the plugin."""
_CLOSING_S = 1.0
"""Seconds for calls under way when a connection ends."""
_NAME = re.compile(r"[A-Za-z0-9_.+-]+", re.ASCII)
_INDEX = re.compile(r"[0-9]{2}", re.ASCII)
_BACKLOG = 64
"""Connections of shims that the kernel queues: as many pods may start at once when a node boots."""


class RegistrationRefused(FailedPrecondition):
    """The runtime refuses this plugin; another attempt would fail as well."""


class NriPlugin:
    """`run` for the process's life, or `serve` for one connection."""

    def __init__(self, pods: Pods, *, name: str, index: str, read_machine: Callable[[], Machine]) -> None:
        """`read_machine` reads the machine anew. Raises InvalidArgument for a name or index that runtimes refuse."""
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"name plugin {name[:100]!r}: only letters, digits and -_.+ are allowed")
        if not _INDEX.fullmatch(index):
            raise InvalidArgument(f"index plugin {index[:100]!r}: not two digits")
        self._pods = pods
        self._read_machine = read_machine
        self._name, self._index = name, index
        self._changed = asyncio.Event()
        self._synchronized = asyncio.Event()
        self._synced_pods: list[NriPod] = []
        self._synced_containers: list[NriContainer] = []

    def send_updates(self) -> None:
        """Due updates will be sent soon."""
        self._changed.set()

    async def run(self, path: str) -> None:
        """Serves the runtime that listens at `path`, and every later one, until cancelled.

        Raises RegistrationRefused.
        """
        pause_s, logged = _FIRST_PAUSE_S, ""
        while True:
            self._synchronized.clear()
            problem = await self._attempt(path)
            if self._synchronized.is_set():
                pause_s, logged = _FIRST_PAUSE_S, ""
            if problem != logged:
                log.warning("no connection to the runtime", extra={"socket": path, "error": problem})
                logged = problem
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _attempt(self, path: str) -> str:
        """One connection, from its start to its end. Returns the reason of its end."""
        try:
            async with asyncio.timeout(REGISTRATION_S):
                sock = await connected_unix_socket(path)
        except OSError as error:
            return f"connect: {error.strerror or 'no answer'}"
        return await self.serve(sock)

    async def serve(self, sock: socket.socket) -> str:
        """Serves one runtime; returns why the connection ended. Owns the socket. Raises RegistrationRefused."""
        mux = Mux(sock)
        server = Server(services={_PLUGIN: self._methods()}, log=log)
        tasks = TaskOwner()
        # Serve before registering: the runtime may configure the plugin before it answers the registration.
        serving = tasks.spawn("nri/serve", server.serve_connection(mux.open(PLUGIN_SERVICE)))
        client = Client(mux.open(RUNTIME_SERVICE))
        carrying = tasks.spawn("nri/mux", mux.run())
        talking = tasks.spawn("nri/talk", self._talk(client))
        try:
            await asyncio.wait([serving, carrying, talking], return_when=asyncio.FIRST_COMPLETED)
            if not talking.done() or not isinstance(talking.exception(), RegistrationRefused):
                await asyncio.wait([carrying], timeout=_CLOSING_S)  # its exception is the cause
            if carrying.done():
                carrying.result()
                return "the runtime closed the connection"
            if talking.done():
                talking.result()
            return "the plugin's service ended"
        except TimeoutError:
            return f"the runtime has not synchronized the plugin within {REGISTRATION_S:g} s"
        except (MuxError, TtrpcError) as error:
            return str(error)
        finally:
            await server.shutdown(grace_s=_CLOSING_S)
            client.close()
            await asyncio.wait([carrying], timeout=_CLOSING_S)  # to send the last answers
            await tasks.close()

    async def _talk(self, client: Client) -> None:
        """Registers, then sends due updates until cancelled."""
        async with asyncio.timeout(REGISTRATION_S):
            await self._register(client)
            await self._synchronized.wait()
        while True:
            self._changed.clear()
            while due := dict(itertools.islice(self._pods.due().items(), UPDATES_PER_CALL)):
                # Recorded before the call: a change during the call is due again.
                self._pods.sent(due)
                await self._update(client, due)
            await self._changed.wait()

    async def _register(self, client: Client) -> None:
        request = translate.registration(self._name, self._index)
        try:
            await client.call(_RUNTIME, "RegisterPlugin", request, timeout_s=REGISTRATION_S)
        except RemoteError as error:
            text = f"register plugin '{self._index}-{self._name}': the runtime refuses it: {error}"
            raise RegistrationRefused(text) from error

    async def _update(self, client: Client, due: dict[str, CpuSet]) -> None:
        try:
            reply = await client.call(_RUNTIME, "UpdateContainers", translate.updates(due), timeout_s=UPDATE_S)
            failed = translate.failed(reply)
        except TtrpcError as error:
            if client.is_closed:
                raise
            log.warning("containers not updated", extra={"containers": ",".join(due), "error": str(error)})
            return
        log.info("containers updated", extra={"count": len(due) - len(failed)})
        if failed:
            log.warning("containers not updated", extra={"containers": ",".join(failed)})

    # ---- calls of the runtime

    def _methods(self) -> dict[str, ImmediateHandler]:
        self._synced_pods, self._synced_containers = [], []
        advisory: dict[str, Callable[[bytes], bytes | None]] = {
            "RunPodSandbox": lambda payload: self._pods.pod_started(translate.pod_of(payload)),
            "StopPodSandbox": lambda payload: self._pods.pod_ended(translate.pod_of(payload).id),
            "RemovePodSandbox": lambda payload: self._pods.pod_ended(translate.pod_of(payload).id),
            "CreateContainer": self._create_container,
            "PostCreateContainer": lambda payload: self._pods.container_created(translate.container_of(payload)[1].id),
            "UpdateContainer": self._update_container,
            "StopContainer": lambda payload: self._pods.container_ended(translate.container_of(payload)[1].id),
            "RemoveContainer": lambda payload: self._pods.container_ended(translate.container_of(payload)[1].id),
        }
        events = {name: ImmediateHandler(self._event(name, act)) for name, act in advisory.items()}

        def state_change(payload: bytes, call: CallContext) -> bytes:
            name, request = translate.state_change(payload)
            return events[name].function(request, call) if name in events else b""

        return {
            **events,
            "StateChange": ImmediateHandler(state_change),
            "Configure": ImmediateHandler(self._configure),
            "Synchronize": ImmediateHandler(self._synchronize),
            "Shutdown": ImmediateHandler(lambda _payload, _call: b""),
        }

    def _event(self, name: str, act: Callable[[bytes], bytes | None]) -> Callable[[bytes, CallContext], bytes]:
        """A handler that logs a failure and replies with nothing, so that the pod runs, though unplaced."""

        def handle(payload: bytes, _call: CallContext) -> bytes:
            try:
                reply = act(payload)
            except Exception:
                log.exception("event not followed", extra={"event": name})
                return b""
            self._changed.set()
            return reply or b""

        return handle

    def _configure(self, payload: bytes, _call: CallContext) -> bytes:
        log.info("registered", extra=translate.runtime(payload))
        return translate.configured()

    def _synchronize(self, payload: bytes, _call: CallContext) -> bytes:
        pods, containers, more = translate.inventory(payload)
        self._synced_pods += pods
        self._synced_containers += containers
        if not more:
            self._reread_machine()
            self._pods.synchronize(self._synced_pods, self._synced_containers)
            log.info("synchronized", extra={"pods": len(self._synced_pods), "containers": len(self._synced_containers)})
            self._synced_pods, self._synced_containers = [], []
            self._synchronized.set()
            self._changed.set()
        return translate.synchronized(more)

    def _reread_machine(self) -> None:
        """Reads the machine again: CPUs may have gone on- or offline since the last runtime."""
        try:
            self._pods.set_machine(self._read_machine())
        except MachineError as error:
            log.warning("machine not read again", extra={"error": str(error)})

    def _create_container(self, payload: bytes) -> bytes:
        pod, container = translate.container_of(payload)
        wanted = self._pods.create_container(pod, container)
        mark, rdt_class = self._pods.shares_cpus(container.id), self._pods.rdt_class(pod, container)
        return translate.adjusted(wanted, mark=mark, rdt_class=rdt_class)

    def _update_container(self, payload: bytes) -> bytes:
        container_id, requested = translate.wanted_update(payload)
        return translate.updated(container_id, self._pods.update_container(container_id, requested))


async def serve(pods: Pods, plugin: NriPlugin, runtime: str | socket.socket, *, placement_socket: str) -> None:
    """Serves until SIGTERM or SIGINT. `runtime` is a connection that the runtime gave, and then until its end; else its
    socket's path.

    Shims are answered at `placement_socket`, unless it is empty. Raises RegistrationRefused, ShimError, OSError.
    """
    with contextlib.ExitStack() as end:
        shims = Shims(pods, on_change=plugin.send_updates)
        shims.find(StateStore(register=REGISTER))
        work = []
        if placement_socket:
            os.makedirs(os.path.dirname(placement_socket), mode=0o700, exist_ok=True)
            listener = listening_socket(placement_socket, backlog=_BACKLOG)
            end.callback(_unlink_ours, placement_socket, os.stat(placement_socket))
            work.append(asyncio.ensure_future(shims.serve(listener)))
        serving = asyncio.ensure_future(plugin.run(runtime) if isinstance(runtime, str) else plugin.serve(runtime))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, serving.cancel)
        try:
            await asyncio.wait([serving, *work], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all(serving, *work)
            await shims.close()
        for task in work:
            if not task.cancelled():
                task.result()
        log.info("plugin ended", extra={"reason": "signal" if serving.cancelled() else serving.result()})


def _unlink_ours(path: str, ours: os.stat_result) -> None:
    """Removes the socket unless a later plugin owns it: a restarted runtime starts the next plugin before the former
    one has ended."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.stat(path), ours):
            os.unlink(path)
