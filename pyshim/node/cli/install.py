"""`pyshim install`, `uninstall`, `status` and `verify`: this node's installation."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import click
from msgspec.structs import replace

from pyshim.config.load import build_config
from pyshim.config.sources import SHIPPED_PATH, read_source
from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import FailedPrecondition, NotFound, ShimError
from pyshim.node.cli.check_host import look
from pyshim.node.cli.check_verdicts import VerdictLevel, verdicts
from pyshim.node.cli.command import PYSHIM
from pyshim.node.cli.handler_option import FORM, handlers_of
from pyshim.node.cli.help import manual_page
from pyshim.node.cli.output import examples, json_option, print_json, print_table
from pyshim.node.cli.progress import steps
from pyshim.node.cli.sandbox import state_dir_option
from pyshim.node.install import runtime
from pyshim.node.install.apply import (
    Change,
    Manifest,
    apply,
    changes,
    edits,
    read_manifest,
    remove,
    states,
)
from pyshim.node.install.disk import Disk
from pyshim.node.install.handlers import SANDBOXERS, SETTINGS, Handler, installed_handlers
from pyshim.node.install.node_check import NodeCheck
from pyshim.node.install.plan import PREFIX, InstallPlan, install_plan
from pyshim.node.install.release import Sources

_CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
_PROGRAMS = ("cpu", "tun", "qemu", "virtiofsd")
"""Subjects of `pyshim check` without which no pod runs, whatever is configured later."""


def _absolute(_ctx: click.Context, _parameter: click.Parameter, path: str) -> str:
    """Checks a path that is going to be written into files."""
    if not os.path.isabs(path) or os.path.normpath(path) == "/":
        raise click.BadParameter(f"{path!r} is not the absolute path of a directory below the root")
    return os.path.normpath(path)


_prefix = click.option(
    "--prefix",
    default=PREFIX,
    metavar="DIR",
    show_default=True,
    callback=_absolute,
    help="Where code and guest go.",
)
_root = click.option("--root", default="/", metavar="DIR", help="A tree in place of this node, for images of nodes.")
_config = click.option(
    "--containerd-config", "config", default="", metavar="FILE", help="Default: the container runtime's on this node."
)
_keep_edited = click.option(
    "--keep-edited", is_flag=True, help="Leave files that were edited as they are, in place of a refusal."
)
_Command = Callable[..., int]


def _sources_options(command: _Command) -> _Command:
    """Options that name the parts of a release; the command gets them as `sources`."""

    @click.option(
        "--guest", default=f"{_CHECKOUT}/.build/guest", metavar="DIR", help="Default: what 'make guest' built."
    )
    @click.option("--wheel", metavar="FILE", help="The package. Default: built from this checkout.")
    @click.option("--wheels", metavar="DIR", help="Its dependencies, where no package index is reached.")
    @click.option("--lock", default=f"{_CHECKOUT}/requirements.lock", metavar="FILE", help="Default: this checkout's.")
    @wraps(command)
    def with_sources(*, guest: str, wheel: str | None, wheels: str | None, lock: str, **others: Any) -> int:
        sources = Sources(checkout=_CHECKOUT, guest=guest, lock=lock, wheel=wheel, wheels=wheels)
        return command(sources=sources, **others)

    return with_sources


def _handlers_options(command: _Command) -> _Command:
    """Options that choose the handlers; the command gets them as `handlers`."""

    @click.option(
        "--handler",
        "words",
        multiple=True,
        metavar=FORM,
        help="Only these; default: all that come with pyshim. A name of your own starts from the handler BASE. FILE has"
        " settings on top of the shipped ones.",
    )
    @click.option(
        "--sandboxer",
        type=click.Choice(SANDBOXERS),
        default=SANDBOXERS[0],
        show_default=True,
        help="shim: containerd 2.3 makes the pods by its Sandbox API, without a pause container.",
    )
    @click.option(
        "--snapshotter",
        default="",
        metavar="NAME",
        help="containerd's for the images of these handlers; erofs: layers are disks. Default: that of the CRI plugin.",
    )
    @wraps(command)
    def with_handlers(*, words: tuple[str, ...], sandboxer: str, snapshotter: str, **others: Any) -> int:
        handlers = (replace(each, sandboxer=sandboxer, snapshotter=snapshotter) for each in handlers_of(words))
        return command(handlers=tuple(handlers), **others)

    return with_handlers


_kind = click.option(
    "--kind",
    type=click.Choice(list(runtime.KINDS)),
    help="The container runtime, or the Kubernetes that brings it. Default: what this node has.",
)
_socket = click.option(
    "--socket",
    default="",
    metavar="PATH",
    help="The container runtime's; .../crio.sock is CRI-O's, any other containerd's. Default: that of this node.",
)


@click.command(
    "install",
    epilog=examples(
        "pyshim install --dry-run",
        "pyshim install --restart",
        "pyshim install --handler pykata --handler pykata-debug",
        "pyshim install --handler pykata --handler gpu:pykata=gpu.toml",
    ),
)
@_prefix
@_root
@_kind
@_config
@_socket
@_sources_options
@_handlers_options
@click.option(
    "--restart",
    is_flag=True,
    help="Restart the container runtime and run a test pod; undo everything if that fails. When nothing changes and the"
    " test pod runs, it is not restarted.",
)
@click.option("--no-pod", is_flag=True, help="With --restart: run no test pod. It needs CNI and the pause image.")
@_keep_edited
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
def install(
    prefix: str,
    root: str,
    kind: str | None,
    config: str,
    socket: str,
    sources: Sources,
    handlers: tuple[Handler, ...],
    restart: bool,
    no_pod: bool,
    keep_edited: bool,
    dry_run: bool,
) -> int:
    """Install pyshim on this node, or bring its installation up to date.

    Code and guest go below the prefix, the configuration to /etc/pyshim, a handler for each kind of pod to containerd
    and CRI-O. Either all of it is written or nothing. A file that was edited, or that another program wrote, is shown,
    and the installation is refused. Pods that run keep the code they were started with.
    """
    _require_root(root, dry_run)
    disk = Disk(root)
    is_this_node = root == "/"
    caller = runtime.container_runtime(socket, root=disk.root, kind=kind)
    caller = caller._replace(config=disk.resolved(config or caller.config))
    with nullcontext() if dry_run else runtime.lock(root), sources:
        manifest = read_manifest(disk, prefix) or Manifest()
        is_crio = caller.name == runtime.CRIO.name
        containerd = None if is_crio else runtime.node_containerd(disk, caller, manifest)
        plan = install_plan(
            prefix=prefix,
            release=sources.release(),
            handlers=handlers,
            configs=sources.configs(),
            manual=manual_page(PYSHIM),
            containerd=containerd,
            has_crio=runtime.has_crio(disk.root),
        )
        sys.stderr.writelines(edits(plan, manifest, disk))
        todo = changes(plan, manifest, disk, keep_edited=keep_edited)
        has_release = disk.is_directory(plan.release_path)
        if dry_run:
            print(f"release {plan.release.id}: {'is there' if has_release else 'would be made'}")
            if not todo:
                print("no file would change")
            _print_changes(todo)
            return 0
        if is_this_node and any(handler.is_local for handler in handlers):
            _require_programs()
        if restart:
            runtime.require_answer(caller)
        node = NodeCheck(
            caller=caller,
            handlers=handlers,
            containerd=containerd,
            restart=restart,
            with_pod=not no_pod,
            is_installed=has_release and _is_installed(plan, manifest, todo),
        )
        try:
            with steps() as begin_step, undone_at_sigterm():
                done = apply(
                    plan,
                    disk,
                    make_release=lambda place: sources.make(
                        disk.at(place), plan.release_path, plan.release, begin_step
                    ),
                    check=partial(node.check, begin_step) if is_this_node else lambda: None,
                    rolled_back=node.rolled_back if is_this_node else lambda: None,
                    keep_edited=keep_edited,
                )
        except (OSError, ShimError) as error:
            raise _failure("install pyshim", error) from error
    _print_changes(done)
    print(f"release {plan.release.id}" + ("" if done else ": nothing to do"))
    if is_this_node:
        _prune(disk, plan)
    if is_this_node and not restart:
        print(f"next: systemctl restart {caller.unit} && pyshim verify")
    return 0


@click.command("uninstall", epilog=examples("pyshim uninstall --restart"))
@_prefix
@_root
@_kind
@_socket
@_keep_edited
@click.option("--restart", is_flag=True, help="Restart the container runtime.")
def uninstall(prefix: str, root: str, kind: str | None, socket: str, keep_edited: bool, restart: bool) -> int:
    """Remove what `pyshim install` wrote, and nothing else.

    Refused while pods run in virtual machines, and when a file was edited.
    """
    _require_root(root, False)
    disk = Disk(root)
    caller = runtime.container_runtime(socket, root=disk.root, kind=kind)
    with runtime.lock(root):
        if read_manifest(disk, prefix) is None:
            print("nothing is installed")
            return 0
        pids = runtime.running_of(f"{prefix}/releases") if root == "/" else ()
        zygotes = [pid for pid in pids if runtime.is_zygote(pid)]
        verbs = {pid: words for pid in pids if (words := runtime.operators_command(pid))}
        pods = [pid for pid in pids if pid not in zygotes and pid not in verbs]
        if pods:
            raise FailedPrecondition(
                f"uninstall pyshim: pods run with it, as processes {', '.join(map(str, pods[:20]))}"
                " (hint: remove them first)"
            )
        if verbs:
            found = "; ".join(f"'{words[:60]}' as process {pid}" for pid, words in verbs.items())
            raise FailedPrecondition(
                f"uninstall pyshim: commands of it run: {found}"
                " (hint: end them first, units by 'systemctl disable --now')"
            )
        if root == "/":
            runtime.stop_units()
        try:
            with undone_at_sigterm():
                done = remove(disk, prefix, keep_edited=keep_edited)
        except (OSError, ShimError) as error:
            raise _failure("uninstall pyshim", error) from error
    for pid in zygotes:
        runtime.end(pid, signal.SIGTERM)
    if root == "/":
        runtime.reload_units()
    _print_changes(done)
    if restart:
        runtime.restart(caller)
    elif root == "/":
        print(f"next: systemctl restart {caller.unit}")
    return 0


@click.command("status", epilog=examples("pyshim status"))
@_prefix
@_root
@state_dir_option
@json_option
def status(prefix: str, root: str, state_dir: str, as_json: bool) -> int:
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
    releases = {name: len(runtime.running_of(f"{prefix}/releases/{name}")) for name in names}
    pods = _pods_of(names, state_dir) if root == "/" else {}
    bad = [path for path, state in files if state != "ok"]
    if as_json:
        document = {"release": manifest.release, "is_complete": manifest.is_complete, "releases": releases}
        document |= {"pods": pods, "runtime": {"name": caller.name, "unit": caller.unit, "socket": caller.socket}}
        print_json({**document, "files": dict(files), "handlers": _installed(manifest)})
    else:
        unfinished = "" if manifest.is_complete else " (an installation was interrupted; run 'pyshim install' again)"
        print(f"release {manifest.release or '-'}{unfinished}")
        print(f"handlers {', '.join(_installed(manifest))}")
        print(f"container runtime {caller.name}, unit {caller.unit}, socket {caller.socket}")
        for name, count in releases.items():
            print(f"processes of {name}: {count}" + (f", of pods {', '.join(pods[name])}" if pods.get(name) else ""))
        print_table(("STATE", "FILE"), [(state, path) for path, state in files])
    return 1 if bad or not manifest.is_complete else 0


@click.command("verify", epilog=examples("pyshim verify", "pyshim verify --handler pykata-remote"))
@_prefix
@_kind
@_socket
@click.option("--handler", "name", metavar="NAME", help="Of the test pod; default: the first that is installed.")
def verify(prefix: str, kind: str | None, socket: str, name: str | None) -> int:
    """Run a test pod through the container runtime, with an installed handler.

    First it checks that the runtime runs, serves CRI, and has the handlers.
    """
    from pyshim.node.install.cri import verify as verify_cri

    manifest = read_manifest(Disk(), prefix)
    if manifest is None:
        raise NotFound(f"verify the installation in '{prefix}': there is none")
    names = _installed(manifest)
    caller = runtime.container_runtime(socket, kind=kind)
    runtime.require_answer(caller)
    with undone_at_sigterm():
        answer = verify_cri(caller.socket, frozenset(names), pod=name or names[0])
    print(f"ok: {answer} ran a pod with {name or names[0]}; it has {', '.join(names)}")
    return 0


def _is_installed(plan: InstallPlan, manifest: Manifest, todo: tuple[Change, ...]) -> bool:
    """The node has `plan` already. Settings of handlers may differ: the container runtime does not read them."""
    is_current = manifest.is_complete and manifest.release == plan.release.id
    return is_current and all(change.path.startswith(f"{SETTINGS}/") for change in todo)


@contextmanager
def undone_at_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, by KeyboardInterrupt. The undo of its work ignores both signals."""

    def interrupt(_number: int, _frame: object) -> None:
        for number in before:
            signal.signal(number, lambda _number, _frame: None)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _require_root(root: str, dry_run: bool) -> None:
    if root == "/" and os.geteuid() != 0 and not dry_run:
        raise FailedPrecondition("change the installation: only root can (hint: --dry-run needs no root)")


def _require_programs() -> None:
    """QEMU and the node's other programs are there. Raises FailedPrecondition naming those that are missing."""
    found = verdicts(look(build_config(read_source(None, {}, (SHIPPED_PATH,))), ""))
    lacking = [each for each in found if each.subject in _PROGRAMS and each.level is VerdictLevel.MISSING]
    if lacking:
        said = "; ".join(f"{each.subject}: {each.text} (hint: {each.hint})" for each in lacking)
        raise FailedPrecondition(f"install pyshim: this node lacks what virtual machines need: {said}")


def _installed(manifest: Manifest) -> tuple[str, ...]:
    return installed_handlers(tuple(entry.path for entry in manifest.entries))


def _pods_of(names: Iterable[str], state_dir: str) -> dict[str, list[str]]:
    """By release, the pods whose shim was started from it; a sandbox outside Kubernetes is named by its id."""
    from pyshim.node.cli.sandboxes import sandboxes

    found: dict[str, list[str]] = {name: [] for name in names}
    for sandbox in sandboxes(state_dir):
        if sandbox.release in found:
            found[sandbox.release].append(sandbox.pod or sandbox.id)
    return found


def _print_changes(done: tuple[Change, ...]) -> None:
    for change in done:
        word = "remove" if change.after is None else "change" if change.before is not None else "write"
        print(f"{word} {change.path}")


def _prune(disk: Disk, plan: InstallPlan) -> None:
    """Releases that no process uses are gone; the others are named."""
    for name in disk.names(f"{plan.prefix}/releases"):
        if name == plan.release.id:
            continue
        path = f"{plan.prefix}/releases/{name}"
        pids = [pid for pid in runtime.running_of(path) if not runtime.is_zygote(pid)]
        if pids:
            print(f"release {name} stays: {len(pids)} processes of running pods use it")
            continue
        try:
            disk.remove_tree(path)
        except OSError as error:
            print(f"pyshim: remove release '{name}': {describe_os_error(error)}", file=sys.stderr)


def _failure(what: str, error: OSError | ShimError) -> ShimError:
    """The error with the object's name and the failures of the undo."""
    if isinstance(error, OSError):
        place = f" '{error.filename}'" if error.filename else ""
        text = f"{what}:{place} {describe_os_error(error)}"
    else:
        text = str(error)
    return FailedPrecondition("; ".join((text, *getattr(error, "__notes__", ()))))
