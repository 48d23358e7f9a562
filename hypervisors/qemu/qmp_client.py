"""The client of the `qemu.qmp` library as the driver wants it: quiet, and with its wait for QEMU in the trace."""

import logging
from typing import Any

from qemu.qmp import Message, QMPClient
from qemu.qmp.models import Greeting

from pyshim.model.trace import span


class Client(QMPClient):
    """Keeps no event; what it logs, at any level, goes to debug."""

    def __init__(self, name: str, log: logging.Logger) -> None:
        super().__init__(name)
        self.logger = _AtDebugLevel(log, {})  # type: ignore[assignment]
        self.events.event_filter = lambda _event: False

    async def _get_greeting(self) -> Greeting:
        # QEMU comes up meanwhile, which is none of the shim's work.
        with span("wait for vmm"):
            return await super()._get_greeting()

    # The library spells every message out, whether anybody reads it or not.

    def _cb_outbound(self, msg: Message) -> Message:
        return super()._cb_outbound(msg) if self.logger.isEnabledFor(logging.DEBUG) else msg

    def _cb_inbound(self, msg: Message) -> Message:
        return super()._cb_inbound(msg) if self.logger.isEnabledFor(logging.DEBUG) else msg


class _AtDebugLevel(logging.LoggerAdapter[logging.Logger]):
    """Every failure the library logs also reaches us as an exception."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        super().log(logging.DEBUG, msg, *args, **kwargs)
