"""`pyshim verify`: runs a test pod through the container runtime."""

import click

from pyshim.model.errors import NotFound
from pyshim.node.cli.installation import (
    handlers_installed,
    kind_option,
    prefix_option,
    socket_option,
    undone_at_sigterm,
)
from pyshim.node.cli.output import examples
from pyshim.node.install import runtime
from pyshim.node.install.disk import Disk
from pyshim.node.install.manifest import read_manifest


@click.command(epilog=examples("pyshim verify", "pyshim verify --handler pykata-remote"))
@prefix_option
@kind_option
@socket_option
@click.option("--handler", "name", metavar="NAME", help="Of the test pod; default: the first that is installed.")
def command(prefix: str, kind: str | None, socket: str, name: str | None) -> int:
    """Run a test pod through the container runtime, with an installed handler.

    First it checks that the runtime runs, serves CRI, and has the handlers.
    """
    from pyshim.node.install.cri import verify as verify_cri

    manifest = read_manifest(Disk(), prefix)
    if manifest is None:
        raise NotFound(f"verify the installation in '{prefix}': there is none")
    names = handlers_installed(manifest)
    caller = runtime.container_runtime(socket, kind=kind)
    runtime.require_answer(caller)
    with undone_at_sigterm():
        answer = verify_cri(caller.socket, frozenset(names), pod=name or names[0])
    print(f"ok: {answer} ran a pod with {name or names[0]}; it has {', '.join(names)}")
    return 0
