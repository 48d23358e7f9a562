"""Verbs that serve until a signal ends them: how they run, where they listen, how they reach the API server."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from pyshim import log

if TYPE_CHECKING:
    from pyshim.node.kubernetes.api import Access, Api


_M_MMAP_THRESHOLD = -3
"""Source: malloc.h of glibc and musl."""
MAPPED_BYTES = 64 << 10


def return_freed_memory() -> None:
    """From now on a freed block of MAPPED_BYTES or more goes back to the kernel.

    By default glibc keeps all that are smaller than the largest one ever freed. After some large requests those of a
    MiB lie in its heap, between objects that stay, and a service grows with each wave of them. Source: mallopt(3).
    """
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


def run_service(work: Coroutine[Any, Any, None]) -> int:
    """0 once the work is done, or SIGTERM or SIGINT has cancelled it."""
    log.set_up(debug=False)
    return_freed_memory()

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


def with_api(command: Callable[..., int]) -> Any:
    """`command` gets `access`: what the options name, else that of the pod's cluster."""

    @click.option("--server", metavar="URL", help="The API server; default: that of the pod's cluster.")
    @click.option("--token", metavar="FILE", help="With --server.")
    @click.option("--authority", metavar="FILE", help="With --server.")
    @wraps(command)
    def with_access(server: str | None, token: str | None, authority: str | None, **options: Any) -> int:
        return command(access=_access(server, token, authority), **options)

    return with_access


def _access(server: str | None, token: str | None, authority: str | None) -> "Access":
    """Raises UsageError, FailedPrecondition."""
    from pyshim.node.kubernetes.api import Access, in_cluster

    if server is None:
        return in_cluster(os.environ)
    if token is None or authority is None:
        raise click.UsageError("--server needs --token and --authority")
    return Access(server=server, token=token, authority=authority)


def run_with_api(access: "Access", work: Callable[["Api"], Awaitable[None]]) -> int:
    """0 once the work is done, or a signal has ended it."""
    from pyshim.node.kubernetes.api import Api

    async def run() -> None:
        async with Api(access) as api:
            await work(api)

    return run_service(run())
