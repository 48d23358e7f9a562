"""`pyshim cleanup`: what dead shims left on this node is undone, and nothing else is touched."""

import argparse
import sys

from pyshim.bootstrap.conventions import Places
from pyshim.model.errors import ShimError
from pyshim.model.ids import checked_id
from pyshim.model.ledger import LedgerEntry
from pyshim.operator.orphans import Orphan, Spared, candidates, clean, judged
from pyshim.state.store import REGISTER, ROOT, StateStore

CLEAN, FAILED, TO_DO, IN_USE = 0, 1, 3, 4
"""Exit codes, besides argparse's 2: nothing is left; something could not be undone; `--dry-run` found something; the
sandbox that was named is in use, or not ours."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("id", metavar="ID", nargs="?", help="sandbox id")
    which.add_argument("--all", action="store_true", help="every sandbox whose shim is gone")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be undone; exit 3 if anything")
    parser.epilog = (
        "exit codes: 0 nothing left, 1 something could not be undone, 3 --dry-run found something, 4 ID in use"
    )


def run(arguments: argparse.Namespace, *, store: StateStore | None = None, places: Places | None = None) -> int:
    """The exit code; one line per thing undone on stdout, per thing that could not be on stderr."""
    store = store or StateStore(root=ROOT, register=REGISTER)
    places = places or Places()
    if arguments.id is not None:
        return _one(store, checked_id(arguments.id, "sandbox id"), places, arguments.dry_run, was_named=True)
    codes = [_one(store, name, places, arguments.dry_run, was_named=False) for name in candidates(store, places)]
    return next((code for code in (FAILED, TO_DO) if code in codes), CLEAN)


def _one(store: StateStore, sandbox_id: str, places: Places, dry_run: bool, *, was_named: bool) -> int:
    held: tuple[LedgerEntry, ...] = ()
    errors: list[str] = []
    try:
        if dry_run:
            found = judged(store, sandbox_id, places)
        else:
            found, held, errors = clean(store, sandbox_id, places)
    except (ShimError, OSError) as error:
        print(f"pyshim: clean sandbox {sandbox_id!r}: {error}", file=sys.stderr)
        return FAILED
    if found is None:
        if was_named:
            print(f"sandbox '{sandbox_id}': nothing is left of it")
        return CLEAN
    if isinstance(found, Spared):
        if was_named or not found.is_served:
            print(f"sandbox '{sandbox_id}': left alone: {found.reason}")
        return IN_USE if was_named else CLEAN
    for line in _report(found, held, "would undo" if dry_run else "undone"):
        print(line)
    for text in errors:
        print(f"pyshim: {text}", file=sys.stderr)
    if dry_run:
        return TO_DO
    return FAILED if held or errors else CLEAN


def _report(found: Orphan, held: tuple[LedgerEntry, ...], done: str) -> list[str]:
    who = f", shim {found.shim.pid} of namespace '{found.shim.namespace}' is gone" if found.shim is not None else ""
    lines = [f"sandbox '{found.sandbox_id}': known by {found.known_by}{who}"]
    for entry in reversed(found.ledger):
        pid = f" (pid {entry.detail['pid']})" if "pid" in entry.detail else ""
        lines.append(f"  {'kept' if entry in held else done}: {entry.kind.value} {entry.key}{pid}")
    return lines
