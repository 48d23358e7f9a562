"""`pyshim status`: what is installed on this node, and which pods run with it."""

from collections.abc import Iterable

import click

from pyshim.model.errors import NotFound
from pyshim.node.cli.installation import handlers_installed, prefix_option, root_option
from pyshim.node.cli.output import examples, json_option, print_json, print_table
from pyshim.node.cli.sandbox import state_dir_option
from pyshim.node.cli.sandboxes import sandboxes
from pyshim.node.install import running, runtime
from pyshim.node.install.disk import Disk
from pyshim.node.install.manifest import read_manifest, states


@click.command(epilog=examples("pyshim status"))
@prefix_option
@root_option
@state_dir_option
@json_option
def command(prefix: str, root: str, state_dir: str, as_json: bool) -> int:
    """Show what is installed on this node, and which pods run with which release.

    Exit code 1 when nothing is, or something is not as `pyshim install` wrote it.
    """
    disk = Disk(root)
    manifest = read_manifest(disk, prefix)
    if manifest is None:
        raise NotFound(f"show the installation in '{prefix}': there is none")
    files = states(manifest, disk)
    caller = runtime.container_runtime(root=disk.root)
    names = disk.names(f"{prefix}/releases")
    releases = {name: len(running.processes_of(f"{prefix}/releases/{name}")) for name in names}
    pods = _pods_of(names, state_dir) if root == "/" else {}
    bad = [path for path, state in files if state != "ok"]
    if as_json:
        document = {"release": manifest.release, "is_complete": manifest.is_complete, "releases": releases}
        document |= {"pods": pods, "runtime": {"name": caller.name, "unit": caller.unit, "socket": caller.socket}}
        print_json({**document, "files": dict(files), "handlers": handlers_installed(manifest)})
    else:
        unfinished = "" if manifest.is_complete else " (an installation was interrupted; run 'pyshim install' again)"
        print(f"release {manifest.release or '-'}{unfinished}")
        print(f"handlers {', '.join(handlers_installed(manifest))}")
        print(f"container runtime {caller.name}, unit {caller.unit}, socket {caller.socket}")
        for name, count in releases.items():
            print(f"processes of {name}: {count}" + (f", of pods {', '.join(pods[name])}" if pods.get(name) else ""))
        print_table(("STATE", "FILE"), [(state, path) for path, state in files])
    return 1 if bad or not manifest.is_complete else 0


def _pods_of(names: Iterable[str], state_dir: str) -> dict[str, list[str]]:
    """By release, the pods whose shim was started from it; a sandbox outside Kubernetes is named by its id."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for sandbox in sandboxes(state_dir):
        if sandbox.release in found:
            found[sandbox.release].append(sandbox.pod or sandbox.id)
    return found
