"""Verbs that call the API server: their options, and how they run."""

import os
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from pyshim.node.cli.service import run_service

if TYPE_CHECKING:
    from pyshim.node.kubernetes.api import Access, Api


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
