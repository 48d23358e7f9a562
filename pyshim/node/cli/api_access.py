"""The options of verbs that call the API server, and how such a verb runs."""

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

import click

from pyshim import log

_api_options = (
    click.option("--server", metavar="URL", help="The API server; default: that of the pod's cluster."),
    click.option("--token", metavar="FILE", help="With --server."),
    click.option("--authority", metavar="FILE", help="With --server."),
)


def with_api(command: Any) -> Any:
    """`command` takes server, token and authority, for `access_of`."""
    for option in _api_options:
        command = option(command)
    return command


def access_of(server: str | None, token: str | None, authority: str | None) -> Any:
    """An `Access`: the named one, else that of the pod's cluster. Raises UsageError, FailedPrecondition."""
    from pyshim.node.kubernetes.api import Access, in_cluster

    if server is None:
        return in_cluster(os.environ)
    if token is None or authority is None:
        raise click.UsageError("--server needs --token and --authority")
    return Access(server=server, token=token, authority=authority)


def until_sigterm(work: Coroutine[Any, Any, None]) -> int:
    """0 once the work is done or SIGTERM has ended it."""
    log.set_up(debug=False)

    async def main() -> int:
        task = asyncio.ensure_future(work)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
        return 0

    return asyncio.run(main())
