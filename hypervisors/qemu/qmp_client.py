"""The client of the `qemu.qmp` library as the driver wants it: quiet, and with its wait for QEMU in the trace."""

import asyncio
import logging
from typing import Any

from qemu.qmp import Message, QMPClient
from qemu.qmp.models import Greeting

from pyshim.model.trace import span

MAX_LINE_BYTES = 256 * 1024
"""Bytes of the largest message of QEMU that is read: its list of 1,000 vCPUs has fewer. A message is decoded on the
event loop; one of this size takes up to 10 ms, one of the library's default of 10 MiB up to 1,400 ms and 500 MiB."""

BURST, PAUSE_S = 256, 0.1
"""Messages that are read one after the other, and the seconds that the next one then waits for: a QEMU that says
something all the time costs a tenth of a CPU. A pod's QEMU says some tens of messages in its life."""


class QmpClient(QMPClient):
    """Keeps no event; what it logs, at any level, goes to debug."""

    def __init__(self, name: str, log: logging.Logger) -> None:
        super().__init__(name, readbuflen=MAX_LINE_BYTES)
        self.logger = _AtDebugLevel(log, {})  # type: ignore[assignment]
        self._received = 0
        self.events.event_filter = lambda _event: False

    async def _get_greeting(self) -> Greeting:
        # QEMU comes up meanwhile: time that the shim does not spend itself.
        with span("wait for vmm"):
            return await super()._get_greeting()

    async def _bh_recv_message(self) -> None:
        await super()._bh_recv_message()
        # The library reads on as long as there are bytes: thousands of events would hold up everything else.
        self._received += 1
        await asyncio.sleep(0 if self._received % BURST else PAUSE_S)

    # The library spells every message out, also when the log does not take it.

    def _cb_outbound(self, msg: Message) -> Message:
        return super()._cb_outbound(msg) if self.logger.isEnabledFor(logging.DEBUG) else msg

    def _cb_inbound(self, msg: Message) -> Message:
        return super()._cb_inbound(msg) if self.logger.isEnabledFor(logging.DEBUG) else msg


class _AtDebugLevel(logging.LoggerAdapter[logging.Logger]):
    """Every failure the library logs also reaches us as an exception."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        super().log(logging.DEBUG, msg, *args, **kwargs)
