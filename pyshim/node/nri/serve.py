"""Runs the plugin: serves its runtime and the shims until a signal."""

import asyncio
import contextlib
import logging
import os
import signal
import socket

from pyshim.concurrency.tasks import cancel_all
from pyshim.host.fds import listening_socket
from pyshim.model.places import REGISTER
from pyshim.node.nri.plugin import NriPlugin
from pyshim.node.nri.pods import Pods
from pyshim.node.nri.shims import Shims
from pyshim.state.store import StateStore

log = logging.getLogger(__name__)

_BACKLOG = 64
"""Connections of shims that the kernel queues: as many pods may start at once when a node boots."""


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
