"""`pyshim cleanup`: undo what dead shims left on this node, touch nothing else, and list lost remote VMs."""

import os
import sys
import time
from contextlib import suppress
from glob import glob

import click
from msgspec import Struct

from pyshim.cleanup.ended import answer_crio
from pyshim.cleanup.lost_vms import LostVm, lost_vms, remove_tombstone
from pyshim.cleanup.names import Places
from pyshim.cleanup.orphans import Orphan, Spared, candidates, clean_orphan, judged
from pyshim.cleanup.sockets import noted_sockets, remove_dead_socket
from pyshim.config.load import load_config
from pyshim.config.sources import named_file
from pyshim.model.errors import ShimError
from pyshim.model.ids import checked_id
from pyshim.model.ledger import LedgerEntry
from pyshim.model.places import REGISTER, STATE_ROOT
from pyshim.node.cli.output import counted, examples
from pyshim.node.install.handlers import SETTINGS
from pyshim.resources.templates.store import TemplateStore
from pyshim.start.address import NOTES
from pyshim.state.store import StateStore

CLEAN, FAILED, TO_DO, IN_USE = 0, 1, 3, 4
"""Exit codes, in this order: nothing is left; something could not be undone, or a remote VM is lost; `--dry-run` found
something; the named sandbox is in use, or not ours. 2 is wrong usage."""


class CleanupPlaces(Struct, frozen=True, kw_only=True):
    """The directories of sandboxes' states and leftovers, and of templates."""

    store: StateStore
    places: Places
    templates: tuple[str, ...] = ()
    notes: str = NOTES
    """Where `start` notes the sockets that it makes."""


@click.command(
    epilog=examples("pyshim cleanup --all --dry-run", "pyshim cleanup --all")
    + """

Exit codes: 0 nothing left, 1 something could not be undone or a remote vm is lost, 3 --dry-run found something,
4 ID in use."""
)
@click.argument("sandbox", metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="Every sandbox whose shim is gone.")
@click.option("--strike", metavar="ID", help="Strike a lost remote vm off the list, once it was looked for.")
@click.option("--dry-run", is_flag=True, help="Only say what would be undone; exit 3 if anything.")
@click.pass_obj
def command(
    node: CleanupPlaces | None, sandbox: str | None, everything: bool, strike: str | None, dry_run: bool
) -> int:
    """Undo what dead shims left on this node, touch nothing else, and list lost remote VMs.

    Name one sandbox by its whole id, or use --all, which also discards templates that no VM can continue from and
    removes the sockets of shims that ended before they had a sandbox. Each resource that was undone is a line on
    stdout, each that could not be undone a line on stderr.
    """
    if sum((sandbox is not None, everything, strike is not None)) != 1:
        raise click.UsageError("expected one of ID, --all and --strike")
    node = node or CleanupPlaces(
        store=StateStore(root=STATE_ROOT, register=REGISTER), places=Places(), templates=template_directories()
    )
    if strike is not None:
        return _strike(strike)
    if sandbox is not None:
        codes = [_one(node, checked_id(sandbox, "sandbox id"), dry_run, was_named=True)]
    else:
        names = counted(candidates(node.store, node.places), "look at sandboxes" if dry_run else "clean sandboxes")
        codes = [_one(node, name, dry_run, was_named=False) for name in names]
        codes += [_templates(directory, dry_run) for directory in node.templates]
        codes.append(_sockets(node.notes, dry_run))
    for lost in lost_vms():
        if sandbox in (None, lost.id):
            print(_lost_line(lost), file=sys.stderr)
            codes.append(TO_DO if dry_run else FAILED)
    return next((code for code in (FAILED, TO_DO, IN_USE) if code in codes), CLEAN)


def template_directories() -> tuple[str, ...]:
    """The template directories of the node's configurations. A configuration that cannot be read is skipped."""
    found = set()
    for path in ("", *glob(f"{SETTINGS}/**/configuration.toml", recursive=True)):
        with suppress(ShimError):
            found.add(load_config(named_file(path), {}, dict(os.environ)).factory.template_path)
    return tuple(sorted(found))


def _templates(directory: str, dry_run: bool) -> int:
    code = CLEAN
    try:
        for reason in TemplateStore(directory).discard_useless(dry_run=dry_run):
            print(f"{'would discard' if dry_run else 'discarded'} a template: {reason}")
            code = TO_DO if dry_run else CLEAN
    except (ShimError, OSError) as error:
        print(f"pyshim: clean templates in '{directory}': {error}", file=sys.stderr)
        return FAILED
    return code


def _sockets(notes: str, dry_run: bool) -> int:
    """Sockets of shims that ended before their first call: no sandbox names them."""
    code = CLEAN
    for path in noted_sockets(notes):
        if remove_dead_socket(f"unix://{path}", notes, dry_run=dry_run):
            print(f"{'would remove' if dry_run else 'removed'} socket '{path}': its shim is gone")
            code = TO_DO if dry_run else CLEAN
    return code


def _strike(vm_id: str) -> int:
    was_lost = remove_tombstone(vm_id)
    print(f"remote vm '{vm_id}': {'struck off' if was_lost else 'it is not on the list'}")
    return CLEAN


def _lost_line(lost: LostVm) -> str:
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(lost.found_s)) if lost.found_s else "an unknown time"
    return (
        f"pyshim: remote vm '{lost.id}': lost: '{lost.service}' did not know it at {found}, and it may run on and cost"
        f" money (hint: look for it in the cloud, then 'pyshim cleanup --strike {lost.id}')"
    )


def _one(node: CleanupPlaces, sandbox_id: str, dry_run: bool, *, was_named: bool) -> int:
    held: tuple[LedgerEntry, ...] = ()
    errors: list[str] = []
    try:
        if dry_run:
            found = judged(node.store, sandbox_id, node.places)
        else:
            found, held, errors = clean_orphan(node.store, sandbox_id, node.places)
    except (ShimError, OSError) as error:
        print(f"pyshim: clean sandbox {sandbox_id!r}: {error}", file=sys.stderr)
        return FAILED
    if found is None:
        if was_named:
            print(f"sandbox '{sandbox_id}': nothing is left of it")
        return CLEAN
    if isinstance(found, Spared) and not found.is_readable:
        print(f"pyshim: clean sandbox {sandbox_id!r}: {found.reason}", file=sys.stderr)
        return FAILED
    if isinstance(found, Spared):
        if was_named or not found.is_served:
            print(f"sandbox '{sandbox_id}': left alone: {found.reason}")
        return IN_USE if was_named else CLEAN
    _print_orphan(found, held, "would undo" if dry_run else "undone")
    for text in errors:
        print(f"pyshim: {text}", file=sys.stderr)
    if dry_run:
        return TO_DO
    if found.state is not None and not node.store.has_record(sandbox_id) and (pid := answer_crio(found.state)):
        print(f"  process {pid} answers CRI-O until the pod is removed")
    return FAILED if held or errors else CLEAN


def _print_orphan(found: Orphan, held: tuple[LedgerEntry, ...], done: str) -> None:
    who = f", shim {found.shim.pid} of namespace '{found.shim.namespace}' is gone" if found.shim is not None else ""
    print(f"sandbox '{found.sandbox_id}': known by {found.known_by}{who}")
    for entry in reversed(found.ledger):
        pid = f" (pid {entry.detail['pid']})" if "pid" in entry.detail else ""
        print(f"  {'kept' if entry in held else done}: {entry.kind.value} {entry.key}{pid}")
