"""The plugin's service for shims: the socket for requests before a VM boots, and the placements in their states.

The one ttrpc call has JSON messages: a `PlacementRequest` in, a `Placement` out. A placement ends with the process that
requested it, so there is no call for its end. The sandbox's state has the placement as well, where a restarted plugin
reads it.
"""

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from pyshim.host.processes.identity import Ends, ProcessRef, is_alive, start_ticks
from pyshim.model.decoding import damaged, decoded, from_json
from pyshim.model.errors import ShimError
from pyshim.model.sizing import PLACEMENT_METHOD, PLACEMENT_SERVICE, PlacementRequest, SavedPlacement
from pyshim.node.nri.pods import Pods
from pyshim.state.schema import NotOurState
from pyshim.state.store import StateStore
from pyshim.ttrpc import CallContext, ImmediateHandler, PeerCredentials, Server

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 << 10
"""A need is a few hundred bytes."""
_IN_FLIGHT = 16


class Shims:
    """Made in a running loop. Call `find`, then `serve`, and `close` at the end."""

    def __init__(self, pods: Pods, *, on_change: Callable[[], None]) -> None:
        self._pods = pods
        self._on_change = on_change
        self._ends = Ends()
        self._askers: dict[str, ProcessRef] = {}
        """By sandbox. A sandbox's id may be used again before its former shim has ended."""
        self._server = Server(
            services={PLACEMENT_SERVICE: {PLACEMENT_METHOD: ImmediateHandler(self._place)}},
            log=log,
            authorize=_only_our_user,
            max_message_bytes=MAX_REQUEST_BYTES,
            max_in_flight=_IN_FLIGHT,
        )

    def find(self, store: StateStore) -> None:
        """The placements of running sandboxes are restored."""
        for shim, placed in placed_sandboxes(store, store.entered_ids()):
            self._pods.restore(placed.request, placed.placement)
            self._watch(shim, placed.request.sandbox_id)

    async def serve(self, listener: socket.socket) -> None:
        """Answers shims until cancelled."""
        await self._server.serve(listener)

    async def close(self) -> None:
        await self._server.shutdown(grace_s=0)
        self._ends.close()

    def _place(self, payload: bytes, call: CallContext) -> bytes:
        """Raises PlacementError, with which the VM boots unplaced, and InvalidArgument."""
        need = from_json(payload, PlacementRequest, damaged("need of a sandbox"))
        placement = self._pods.place_for_shim(need)
        pid = call.peer.pid if call.peer is not None else 0
        ticks = start_ticks(pid) if pid else None
        if ticks is not None:
            self._watch(ProcessRef(pid, ticks), need.sandbox_id)
        self._on_change()
        return msgspec.json.encode(placement)

    def _watch(self, shim: ProcessRef, sandbox_id: str) -> None:
        self._askers[sandbox_id] = shim
        self._ends.watch(shim, lambda: self._gone(shim, sandbox_id))

    def _gone(self, shim: ProcessRef, sandbox_id: str) -> None:
        if self._askers.get(sandbox_id) == shim:
            del self._askers[sandbox_id]
            self._pods.shim_ended(sandbox_id)
            self._on_change()


def placed_sandboxes(store: StateStore, sandbox_ids: Iterable[str]) -> Iterator[tuple[ProcessRef, SavedPlacement]]:
    """The sandboxes that have a placement and a running shim. A state that cannot be read is logged."""
    for sandbox_id in sandbox_ids:
        try:
            state = store.load(sandbox_id)
            placed = _placed(state.snapshot.cgroups if state.snapshot is not None else {})
        except NotOurState:
            continue
        except ShimError as error:
            log.warning("state not read", extra={"sandbox": sandbox_id, "error": str(error)})
            continue
        shim = ProcessRef(state.shim.pid, state.shim.start_ticks)
        if placed is not None and is_alive(shim):
            yield shim, placed


def _placed(cgroups: Mapping[str, object]) -> SavedPlacement | None:
    value = cgroups.get("Placed")
    return None if value is None else decoded(value, SavedPlacement, damaged("placement"))


def _only_our_user(sock: socket.socket) -> None:
    peer = PeerCredentials.of(sock)
    if peer is None or peer.uid != os.geteuid():
        raise PermissionError(f"a process of user {peer.uid if peer else '?'} is not served")
