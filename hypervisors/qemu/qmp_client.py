"""The `qemu.qmp` library's client with limits on what is read, logs at debug, and a span for the wait for QEMU."""

import asyncio
import logging
from typing import Any

from qemu.qmp import Message, QMPClient
from qemu.qmp.models import Greeting

from pyshim.model.observation import span

MAX_LINE_BYTES = 256 * 1024
"""Bytes of the largest message that is read; a list of 1,000 vCPUs has fewer. A message is decoded on the event loop:
one of this size takes up to 10 ms, one of the library's default of 10 MiB up to 1,400 ms and 500 MiB."""

BURST, PAUSE_S = 256, 0.1
"""Messages that are read in a row, and the seconds of pause after them: a QEMU that sends messages all the time costs a
tenth of a CPU. A pod's QEMU sends some tens of messages in its life."""


class QmpClient(QMPClient):
    """Stores no events; logs everything at debug."""

    def __init__(self, name: str, log: logging.Logger) -> None:
        super().__init__(name, readbuflen=MAX_LINE_BYTES)
        self.logger = _AtDebugLevel(log, {})  # type: ignore[assignment]
        self._received = 0
        self.events.event_filter = lambda _event: False

    async def _get_greeting(self) -> Greeting:
        # The time in which QEMU starts is not the shim's own.
        with span("wait for vmm"):
            return await super()._get_greeting()

    async def _bh_recv_message(self) -> None:
        await super()._bh_recv_message()
        # The library reads as long as there are bytes: thousands of events would block the loop.
        self._received += 1
        await asyncio.sleep(0 if self._received % BURST else PAUSE_S)

    # The library formats every message, even if the log drops it.

    def _cb_outbound(self, msg: Message) -> Message:
        return super()._cb_outbound(msg) if self.logger.isEnabledFor(logging.DEBUG) else msg

    def _cb_inbound(self, msg: Message) -> Message:
        return super()._cb_inbound(msg) if self.logger.isEnabledFor(logging.DEBUG) else msg


class _AtDebugLevel(logging.LoggerAdapter[logging.Logger]):
    """Logs at debug: each failure that the library logs is also raised."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        super().log(logging.DEBUG, msg, *args, **kwargs)
