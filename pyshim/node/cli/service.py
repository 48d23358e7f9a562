"""Runs verbs that serve until a signal ends them, and has the option for the address at which they listen."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import click

from pyshim import log


def run_service(work: Coroutine[Any, Any, None]) -> int:
    """0 once the work is done, or SIGTERM or SIGINT has cancelled it."""
    log.set_up(debug=False)

    async def main() -> int:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
        return 0

    return asyncio.run(main())


def _address(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is not HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)


def address_option(name: str, default: str) -> Callable[[Any], Any]:
    """The verb gets the pair of host and port as `address`."""
    return click.option(
        name,
        "address",
        default=default,
        show_default=True,
        callback=_address,
        metavar="HOST:PORT",
        help="Where to answer. Without HOST: at all IPv4 addresses.",
    )
