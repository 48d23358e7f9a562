"""`pyshim uninstall`, `verify` and `status`, and what they share with `install`: options, rights, texts."""

import os
import signal
from collections.abc import Iterable

import click

from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import FailedPrecondition, NotFound, ShimError
from pyshim.node.cli.output import examples, json_option, print_json, print_table
from pyshim.node.cli.sandboxes import optional_sandbox_argument, sandboxes, state_dir_option
from pyshim.node.cli.signals import undone_at_signals
from pyshim.node.cli.state import print_cgroups, print_record
from pyshim.node.install import docker, running, runtime
from pyshim.node.install.apply import Change, remove
from pyshim.node.install.disk import Disk
from pyshim.node.install.handlers import installed_handlers
from pyshim.node.install.manifest import Manifest, read_manifest, states
from pyshim.node.install.plan import PREFIX


def _absolute(_ctx: click.Context, _parameter: click.Parameter, path: str) -> str:
    """Checks a path that is going to be written into files."""
    if not os.path.isabs(path) or os.path.normpath(path) == "/":
        raise click.BadParameter(f"{path!r} is not the absolute path of a directory below the root")
    return os.path.normpath(path)


prefix_option = click.option(
    "--prefix",
    default=PREFIX,
    metavar="DIR",
    show_default=True,
    callback=_absolute,
    help="Where code and guest go.",
)
root_option = click.option(
    "--root", default="/", metavar="DIR", help="A tree in place of this node, for images of nodes."
)
keep_edited_option = click.option(
    "--keep-edited", is_flag=True, help="Leave files that were edited as they are, in place of a refusal."
)
kind_option = click.option(
    "--kind",
    type=click.Choice(list(runtime.KINDS)),
    help="The container runtime, or the Kubernetes that brings it. Default: what this node has.",
)
socket_option = click.option(
    "--socket",
    default="",
    metavar="PATH",
    help="The container runtime's; .../crio.sock is CRI-O's, any other containerd's. Default: that of this node.",
)


wait_option = click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0, max=86400),
    default=0.0,
    metavar="SECONDS",
    help="For another 'pyshim' that changes the installation now, in place of a refusal.",
)


def require_root(root: str) -> None:
    """Raises FailedPrecondition for another user of this node."""
    if root == "/" and os.geteuid() != 0:
        raise FailedPrecondition("change the installation: only root can (hint: --dry-run needs no root)")


def handlers_installed(manifest: Manifest) -> tuple[str, ...]:
    return installed_handlers(tuple(entry.path for entry in manifest.entries))


def _caller_of(manifest: Manifest, disk: Disk, socket: str = "", kind: str | None = None) -> runtime.ContainerRuntime:
    """The container runtime that is asked for, else the one that the installation serves."""
    found = kind or (None if socket else runtime.installed_kind(manifest))
    return runtime.container_runtime(socket, root=disk.root, kind=found)


def print_next(
    done: tuple[Change, ...], caller: runtime.ContainerRuntime, *, was_restarted: bool, more: str = ""
) -> None:
    """Prints the commands by which programs read changed files, where that has not happened."""
    is_docker = caller.name == runtime.DOCKER.name
    commands = [] if was_restarted or is_docker else [f"systemctl {caller.reads_again} {caller.unit}"]
    if any(change.path.endswith(".json") for change in done) and not (was_restarted and is_docker):
        commands.append(f"systemctl {runtime.DOCKER.reads_again} {runtime.DOCKER.unit}")
    if more and not was_restarted:
        commands.append(more)
    if commands:
        print(f"next: {' && '.join(commands)}")


def print_changes(done: tuple[Change, ...]) -> None:
    for change in done:
        word = "remove" if change.after is None else "change" if change.before is not None else "write"
        print(f"{word} {change.path}")


def failure(what: str, error: OSError | ShimError) -> ShimError:
    """The error with the object's name and the failures of the undo."""
    if isinstance(error, OSError):
        place = f" '{error.filename}'" if error.filename else ""
        text = f"{what}:{place} {describe_os_error(error)}"
    else:
        text = str(error)
    return FailedPrecondition("; ".join((text, *getattr(error, "__notes__", ()))))


@click.command(epilog=examples("pyshim uninstall --restart"))
@prefix_option
@root_option
@kind_option
@socket_option
@keep_edited_option
@click.option("--restart", is_flag=True, help="Restart the container runtime.")
@wait_option
def uninstall(
    prefix: str, root: str, kind: str | None, socket: str, keep_edited: bool, restart: bool, wait_s: float
) -> int:
    """Remove what `pyshim install` wrote, and nothing else.

    Refused while pods run in virtual machines, and when a file was edited.
    """
    require_root(root)
    disk = Disk(root)
    with running.lock(root, prefix, wait_s):
        manifest = read_manifest(disk, prefix)
        if manifest is None:
            print("nothing is installed")
            return 0
        caller = _caller_of(manifest, disk, socket, kind)
        zygotes: tuple[int, ...] = ()
        if root == "/":
            zygotes = _zygotes_alone(prefix)
            running.stop_units()
        try:
            with undone_at_signals():
                done = remove(disk, prefix, keep_edited=keep_edited)
        except (OSError, ShimError) as error:
            raise failure("uninstall pyshim", error) from error
    for pid in zygotes:
        running.end(pid, signal.SIGTERM)
    if root == "/":
        running.reload_units()
    print_changes(done)
    if restart:
        runtime.read_again(caller)
    if root == "/":
        print_next(done, caller, was_restarted=restart)
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


@click.command(epilog=examples("pyshim verify", "pyshim verify --handler pykata-remote"))
@prefix_option
@kind_option
@socket_option
@click.option("--handler", "name", metavar="NAME", help="Of the test pod; default: the first that is installed.")
def verify(prefix: str, kind: str | None, socket: str, name: str | None) -> int:
    """Run a test pod through the container runtime, with an installed handler; through Docker a test container.

    First it checks that the runtime runs, serves CRI, and has the handlers.
    """
    from pyshim.node.install.cri import verify as verify_cri

    manifest = read_manifest(Disk(), prefix)
    if manifest is None:
        raise NotFound(f"verify the installation in '{prefix}': there is none")
    names = handlers_installed(manifest)
    caller = _caller_of(manifest, Disk(), socket, kind)
    runtime.require_answer(caller)
    if caller.name == runtime.DOCKER.name:
        has_entries = any(entry.members for entry in manifest.entries)
        with undone_at_signals():
            print(f"ok: {docker.verify(caller.socket, [name] if name else names, has_entries=has_entries)}")
        return 0
    with undone_at_signals():
        answer = verify_cri(caller.socket, frozenset(names), pod=name or names[0])
    print(f"ok: {answer} ran a pod with {name or names[0]}; it has {', '.join(names)}")
    return 0


@click.command(
    epilog=examples(
        "pyshim status",
        "pyshim status 1a2b --json | jq .Pyshim.Snapshot.Sizing",
        "pyshim status 1a2b --cgroups",
    )
)
@optional_sandbox_argument
@click.option("--cgroups", is_flag=True, help="Of SANDBOX: its host cgroups, their processes, limits and usage.")
@prefix_option
@root_option
@state_dir_option
@json_option
def status(sandbox: str, cgroups: bool, prefix: str, root: str, state_dir: str, as_json: bool) -> int:
    """Show what is installed on this node, and which pods run with which release; or what is recorded about SANDBOX.

    Without SANDBOX, the exit code is 1 when nothing is installed, or something is not as `pyshim install` wrote it.
    """
    if sandbox:
        (print_cgroups if cgroups else print_record)(sandbox, state_dir, as_json=as_json)
        return 0
    if cgroups:
        raise click.UsageError("--cgroups needs SANDBOX")
    return _print_installation(prefix, root, state_dir, as_json=as_json)


def _print_installation(prefix: str, root: str, state_dir: str, *, as_json: bool) -> int:
    disk = Disk(root)
    manifest = read_manifest(disk, prefix)
    if manifest is None:
        raise NotFound(f"show the installation in '{prefix}': there is none")
    files = states(manifest, disk)
    caller = _caller_of(manifest, disk)
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
