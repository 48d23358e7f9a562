"""`pyshim install`: installs pyshim on this node, or brings its installation up to date."""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import click
from msgspec.structs import replace

from pyshim.config.load import build_config
from pyshim.config.sources import SHIPPED_PATH, read_source
from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.units import MIB
from pyshim.node.cli.check_host import host_report
from pyshim.node.cli.check_verdicts import VerdictLevel, verdicts
from pyshim.node.cli.command import PYSHIM, manual_page
from pyshim.node.cli.installation import (
    failure,
    keep_edited_option,
    kind_option,
    prefix_option,
    print_changes,
    print_next,
    require_root,
    root_option,
    socket_option,
    wait_option,
)
from pyshim.node.cli.options import FORM, handlers_of
from pyshim.node.cli.output import examples, steps
from pyshim.node.cli.sandboxes import state_dir_option
from pyshim.node.cli.signals import undone_at_signals
from pyshim.node.install import launcher, running, runtime
from pyshim.node.install.apply import Change, apply, at_link_targets, changes, edits
from pyshim.node.install.disk import Disk
from pyshim.node.install.handlers import SANDBOXERS, SETTINGS, Handler
from pyshim.node.install.manifest import Manifest, read_manifest
from pyshim.node.install.node_check import NodeCheck, require_handlers
from pyshim.node.install.plan import InstallPlan, Release, install_plan, is_earlier, version_of
from pyshim.node.install.release import Sources
from pyshim.state.schema import StateDamaged, StateTooNew
from pyshim.state.store import StateStore

_CHECKOUT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
_PROGRAMS = ("cpu", "tun", "qemu", "virtiofsd")
"""Subjects of `pyshim check` without which no pod runs, whatever is configured later."""
_MAX_SHOWN = 10
"""Places in one message: a checkout of another user has thousands of files."""


_config = click.option(
    "--containerd-config", "config", default="", metavar="FILE", help="Default: the container runtime's on this node."
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


@click.command(
    epilog=examples(
        "pyshim install --dry-run",
        "pyshim install --restart",
        "pyshim install --handler pykata --handler pykata-debug",
        "pyshim install --handler pykata --handler gpu:pykata=gpu.toml",
        "pyshim install --kind docker --handler pykata --daemon-json --restart",
        "pyshim install --launcher /usr/local/bin",
    ),
)
@prefix_option
@root_option
@kind_option
@_config
@socket_option
@_sources_options
@_handlers_options
@click.option(
    "--restart",
    is_flag=True,
    help="Restart the container runtime and run a test pod; undo everything if that fails. When nothing changes and the"
    " test pod runs, it is not restarted.",
)
@click.option("--no-pod", is_flag=True, help="With --restart: run no test pod. It needs CNI and the pause image.")
@click.option(
    "--daemon-json",
    "names_runtimes",
    is_flag=True,
    help="Name the handlers in /etc/docker/daemon.json, for 'docker run --runtime HANDLER', beside what is there.",
)
@keep_edited_option
@click.option("--dry-run", is_flag=True, help="Only say what would be written.")
@click.option(
    "--launcher",
    "launcher_directory",
    metavar="DIR",
    help="Only write the shim's binary into DIR of containerd's PATH, for this interpreter and checkout.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Only warn of what is refused otherwise: running sandboxes of a later release, code that others can write.",
)
@click.option("--downgrade", is_flag=True, help="Install an earlier version than the node has.")
@wait_option
@state_dir_option
def command(
    prefix: str,
    root: str,
    kind: str | None,
    config: str,
    socket: str,
    sources: Sources,
    handlers: tuple[Handler, ...],
    restart: bool,
    no_pod: bool,
    names_runtimes: bool,
    keep_edited: bool,
    dry_run: bool,
    launcher_directory: str | None,
    force: bool,
    downgrade: bool,
    wait_s: float,
    state_dir: str,
) -> int:
    """Install pyshim on this node, or bring its installation up to date.

    Code and guest go below the prefix, the configuration to /etc/pyshim, a handler for each kind of pod to containerd
    and CRI-O; for Docker (--kind docker) containerd's configuration stays as it is. Either
    all of it is written or nothing. A file that was edited, or that another program wrote, is shown, and the
    installation is refused. Pods that run keep the code they were started with.
    """
    if launcher_directory is not None:
        return _write_launcher(launcher_directory, force=force)
    if not dry_run:
        require_root(root)
    disk = Disk(root)
    is_this_node = root == "/"
    caller = runtime.container_runtime(socket, root=disk.root, kind=kind)
    caller = caller._replace(config=disk.resolved(config or caller.config))
    with nullcontext() if dry_run else running.lock(root, prefix, wait_s), sources:
        manifest = read_manifest(disk, prefix) or Manifest()
        is_docker = caller.name == runtime.DOCKER.name
        is_other = is_docker or caller.name == runtime.CRIO.name
        containerd = None if is_other else runtime.node_containerd(disk, caller, manifest)
        plan = install_plan(
            prefix=prefix,
            release=sources.release(),
            handlers=handlers,
            configs=sources.configs(),
            manual=manual_page(PYSHIM),
            containerd=containerd,
            has_crio=not is_docker and runtime.has_crio(disk.root),
            daemon_json=runtime.node_daemon_json(disk, handlers, manifest) if names_runtimes else None,
        )
        plan = at_link_targets(plan, disk)
        sys.stderr.writelines(edits(plan, manifest, disk))
        todo = changes(plan, manifest, disk, keep_edited=keep_edited)
        has_release = disk.is_directory(plan.release_path)
        if not downgrade:
            _require_no_later(version_of(manifest.release), plan.release)
        if dry_run:
            _print_dry_run(plan, todo, has_release)
            return 0
        if not has_release:
            _require_room(disk, prefix, sources.size_bytes())
        if is_this_node:
            require_readable_states(StateStore(root=state_dir), force=force)
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
            has_entries=names_runtimes,
        )
        names = frozenset(handler.name for handler in handlers)
        in_tree = partial(require_handlers, caller, containerd, names, root=disk.root)
        done = _applied(plan, disk, sources, node if is_this_node else None, in_tree, keep_edited=keep_edited)
    print_changes(done)
    print(f"release {plan.release.id}" + ("" if done else ": nothing to do"))
    if is_this_node:
        _prune(disk, plan)
    if is_this_node:
        print_next(done, caller, was_restarted=restart, more="pyshim verify")
    return 0


def _write_launcher(directory: str, *, force: bool) -> int:
    """Writes the shim's binary, whose interpreter and import path are this program's. Prints its path."""
    os.makedirs(directory, exist_ok=True)
    found = launcher.exposed(directory)
    if found:
        more = f" and {len(found) - _MAX_SHOWN} more places" if len(found) > _MAX_SHOWN else ""
        places = ", ".join(found[:_MAX_SHOWN])
        print(
            f"pyshim: install launcher in '{directory}': root would execute or boot what others can write:"
            f" {places}{more} (hint: 'chown -R root:root' and 'chmod -R go-w', or an installation in another place)",
            file=sys.stderr,
        )
        if not force:
            return 1
    print(launcher.install(directory))
    return 0


def _print_dry_run(plan: InstallPlan, todo: tuple[Change, ...], has_release: bool) -> None:
    print(f"release {plan.release.id}: {'is there' if has_release else 'would be made'}")
    if not todo:
        print("no file would change")
    print_changes(todo)


def _applied(
    plan: InstallPlan,
    disk: Disk,
    sources: Sources,
    node: NodeCheck | None,
    check_tree: Callable[[], None],
    *,
    keep_edited: bool,
) -> tuple[Change, ...]:
    """The node is as `plan` has it, and `node` has checked it, or `check_tree` a tree in place of this node.

    Returns the changes; ShimError when none were made.
    """
    try:
        with steps() as begin_step, undone_at_signals():
            return apply(
                plan,
                disk,
                make_release=lambda place: sources.make(disk.at(place), plan.release_path, plan.release, begin_step),
                check=partial(node.check, begin_step) if node else check_tree,
                rolled_back=node.rolled_back if node else lambda: None,
                keep_edited=keep_edited,
            )
    except (OSError, ShimError) as error:
        raise failure("install pyshim", error) from error


def _is_installed(plan: InstallPlan, manifest: Manifest, todo: tuple[Change, ...]) -> bool:
    """The node has `plan` already. Settings of handlers may differ: the container runtime does not read them."""
    is_current = manifest.is_complete and manifest.release == plan.release.id
    return is_current and all(change.path.startswith(f"{SETTINGS}/") for change in todo)


def _require_no_later(installed: str, release: Release) -> None:
    """Raises FailedPrecondition if the version `installed` is later than the release's."""
    if is_earlier(release.version, installed):
        raise FailedPrecondition(
            f"install pyshim {release.version}: the node has {installed}, which is later (hint: --downgrade)"
        )


def _require_room(disk: Disk, prefix: str, wanted_bytes: int) -> None:
    """The file system of `prefix` has room for the release. Raises FailedPrecondition."""
    path = prefix
    while path != "/" and not disk.is_directory(path):
        path = os.path.dirname(path)
    free_bytes = shutil.disk_usage(disk.at(path)).free
    if free_bytes < wanted_bytes:
        raise FailedPrecondition(
            f"install pyshim: '{path}' has {free_bytes // MIB} MiB free, and a release takes {-(-wanted_bytes // MIB)}"
        )


def require_readable_states(store: StateStore, *, force: bool) -> None:
    """This release reads the states of all sandboxes, so that it can clean up after each.

    A warning names those of a format that is too old or damaged. Raises FailedPrecondition naming those of a later
    release, with `force` another warning.
    """
    later, others = _unreadable_states(store)
    for sandbox_id, why in others.items():
        text = f"sandbox '{sandbox_id}': after a crash this release would clean up by its names alone: {why}"
        print(f"pyshim: warning: {text}", file=sys.stderr)
    if not later:
        return
    named = ", ".join(f"'{each}'" for each in list(later)[:_MAX_SHOWN])
    more = f" and {len(later) - _MAX_SHOWN} more" if len(later) > _MAX_SHOWN else ""
    text = f"sandboxes {named}{more} are of a later release, whose states this one cannot read or clean up"
    if not force:
        raise FailedPrecondition(f"install pyshim: {text} (hint: end their pods first, or --force)")
    print(f"pyshim: warning: {text}", file=sys.stderr)


def _unreadable_states(store: StateStore) -> tuple[dict[str, str], dict[str, str]]:
    """The sandboxes whose states this release cannot read, with the reason: of later releases, and others."""
    later: dict[str, str] = {}
    others: dict[str, str] = {}
    for sandbox_id in sorted(store.sandbox_ids()):
        try:
            store.load(sandbox_id)
        except StateTooNew as error:
            later[sandbox_id] = str(error)
        except StateDamaged as error:
            others[sandbox_id] = str(error)
        except ShimError:
            continue  # it has ended, or is another runtime's
    return later, others


def _require_programs() -> None:
    """QEMU and the node's other programs are there. Raises FailedPrecondition naming those that are missing."""
    found = verdicts(host_report(build_config(read_source(None, {}, (SHIPPED_PATH,))), ""))
    lacking = [each for each in found if each.subject in _PROGRAMS and each.level is VerdictLevel.MISSING]
    if lacking:
        said = "; ".join(f"{each.subject}: {each.text} (hint: {each.hint})" for each in lacking)
        raise FailedPrecondition(f"install pyshim: this node lacks what virtual machines need: {said}")


def _prune(disk: Disk, plan: InstallPlan) -> None:
    """Releases that no process uses are gone; the others are named."""
    for name in disk.names(f"{plan.prefix}/releases"):
        if name == plan.release.id:
            continue
        path = f"{plan.prefix}/releases/{name}"
        pids = [pid for pid in running.processes_of(path) if not running.is_zygote(pid)]
        if pids:
            print(f"release {name} stays: {len(pids)} processes of running pods use it")
            continue
        try:
            disk.remove_tree(path)
        except OSError as error:
            print(f"pyshim: remove release '{name}': {describe_os_error(error)}", file=sys.stderr)
