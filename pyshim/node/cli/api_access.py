"""The options of verbs that call the API server."""

import os
from typing import Any

import click

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
    """The `Access` that the options name, else that of the pod's cluster. Raises UsageError, FailedPrecondition."""
    from pyshim.node.kubernetes.api import Access, in_cluster

    if server is None:
        return in_cluster(os.environ)
    if token is None or authority is None:
        raise click.UsageError("--server needs --token and --authority")
    return Access(server=server, token=token, authority=authority)
