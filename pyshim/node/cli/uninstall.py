"""`pyshim uninstall`: removes what `pyshim install` wrote."""

import signal

import click

from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.node.cli.installation import (
    failure,
    keep_edited_option,
    kind_option,
    prefix_option,
    print_changes,
    require_root,
    root_option,
    socket_option,
    undone_at_sigterm,
)
from pyshim.node.cli.output import examples
from pyshim.node.install import running, runtime
from pyshim.node.install.apply import remove
from pyshim.node.install.disk import Disk
from pyshim.node.install.manifest import read_manifest


@click.command(epilog=examples("pyshim uninstall --restart"))
@prefix_option
@root_option
@kind_option
@socket_option
@keep_edited_option
@click.option("--restart", is_flag=True, help="Restart the container runtime.")
def command(prefix: str, root: str, kind: str | None, socket: str, keep_edited: bool, restart: bool) -> int:
    """Remove what `pyshim install` wrote, and nothing else.

    Refused while pods run in virtual machines, and when a file was edited.
    """
    require_root(root)
    disk = Disk(root)
    caller = runtime.container_runtime(socket, root=disk.root, kind=kind)
    with running.lock(root):
        if read_manifest(disk, prefix) is None:
            print("nothing is installed")
            return 0
        zygotes: tuple[int, ...] = ()
        if root == "/":
            zygotes = _zygotes_alone(prefix)
            running.stop_units()
        try:
            with undone_at_sigterm():
                done = remove(disk, prefix, keep_edited=keep_edited)
        except (OSError, ShimError) as error:
            raise failure("uninstall pyshim", error) from error
    for pid in zygotes:
        running.end(pid, signal.SIGTERM)
    if root == "/":
        running.reload_units()
    print_changes(done)
    if restart:
        runtime.restart(caller)
    elif root == "/":
        print(f"next: systemctl restart {caller.unit}")
    return 0


def _zygotes_alone(prefix: str) -> tuple[int, ...]:
    """The zygotes of the installation. Raises FailedPrecondition if other processes of it run."""
    pids = running.processes_of(f"{prefix}/releases")
    zygotes = tuple(pid for pid in pids if running.is_zygote(pid))
    verbs = {pid: words for pid in pids if (words := running.operators_command(pid))}
    pods = [pid for pid in pids if pid not in zygotes and pid not in verbs]
    if pods:
        raise FailedPrecondition(
            f"uninstall pyshim: pods run with it, as processes {', '.join(map(str, pods[:20]))}"
            " (hint: remove them first)"
        )
    if verbs:
        found = "; ".join(f"'{words[:60]}' as process {pid}" for pid, words in verbs.items())
        raise FailedPrecondition(
            f"uninstall pyshim: commands of it run: {found} (hint: end them first, units by 'systemctl disable --now')"
        )
    return zygotes
