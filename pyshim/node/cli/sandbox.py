"""Names of sandboxes on the command line: an id, the beginning of one, or the pod's NAMESPACE/NAME.

The names of pods come from the saved states, so containerd need not answer.
"""

import os
import re
from collections.abc import Sequence

import click
from click.shell_completion import CompletionItem

from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound
from pyshim.model.ids import SandboxId, checked_id
from pyshim.model.places import STATE_ROOT as STATE_DIR
from pyshim.model.sandbox import SandboxSnapshot
from pyshim.node.cli.sandboxes import STOPPED, sandboxes
from pyshim.state.store import StateStore

_MAX_NAMED = 5
_POD = re.compile("[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9.-]*")
"""NAMESPACE/NAME as Kubernetes allows them."""


def sandbox_id(text: str, state_dir: str) -> SandboxId:
    """The id of the only recorded sandbox whose id is `text` or begins with it, or which is that of the pod `text`.

    Raises InvalidArgument when `text` is not an identifier, or matches several; NotFound when it matches none.
    """
    found = ended_or_recorded(text, state_dir)
    if not os.path.isdir(f"{state_dir}/{found}"):
        raise NotFound(f"find sandbox '{text}': no recorded id begins with this (hint: pyshim list)")
    return found


def ended_or_recorded(text: str, state_dir: str) -> SandboxId:
    """As `sandbox_id`, but `text` itself if nothing matches: it may be the id of a sandbox that has ended."""
    if _POD.fullmatch(text):
        return _of_pod(text, state_dir)
    checked = SandboxId(checked_id(text, "sandbox id"))
    found = recorded(state_dir, checked)
    if checked in found or not found:
        return checked
    if len(found) > 1:
        raise InvalidArgument(f"find sandbox '{text}': {len(found)} ids begin with this: {_named(found)}")
    return found[0]


def snapshot_of(found: SandboxId, state_dir: str) -> SandboxSnapshot:
    """The sandbox as its shim saved it last. Raises as `StateStore.load`, FailedPrecondition before the first time."""
    snapshot = StateStore(root=state_dir).load(found).snapshot
    if snapshot is None:
        raise FailedPrecondition(f"read state of sandbox '{found}': its shim has not saved it yet")
    return snapshot


def _of_pod(name: str, state_dir: str) -> SandboxId:
    """The pod's sandbox, a running one if there is one: after a failure a pod gets a new sandbox."""
    found = [each for each in sandboxes(state_dir) if each.pod == name]
    running = [each for each in found if each.health != STOPPED]
    ids = [SandboxId(each.id) for each in running or found]
    if not ids:
        raise NotFound(f"find pod '{name}': no sandbox of it is recorded here (hint: pyshim list)")
    if len(ids) > 1:
        raise InvalidArgument(f"find pod '{name}': it has {len(ids)} sandboxes: {_named(ids)}")
    return ids[0]


def _named(ids: Sequence[str]) -> str:
    return ", ".join(sorted(ids)[:_MAX_NAMED]) + (", ..." if len(ids) > _MAX_NAMED else "")


def recorded(state_dir: str, prefix: str = "") -> list[SandboxId]:
    """The ids of recorded sandboxes that begin with `prefix`; empty without a state directory."""
    return sorted(SandboxId(each) for each in StateStore(root=state_dir).sandbox_ids() if each.startswith(prefix))


class _SandboxParameter(click.ParamType[str]):
    name = "sandbox"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            return [CompletionItem(found) for found in recorded(ctx.params.get("state_dir") or STATE_DIR, incomplete)]
        except OSError:
            return []


sandbox_argument = click.argument("sandbox", metavar="SANDBOX", type=_SandboxParameter())
state_dir_option = click.option(
    "--state-dir", default=STATE_DIR, show_default=True, metavar="DIR", help="Where sandboxes are recorded."
)
sandbox_id_option = click.option(
    "--sandbox-id", "named", default="", metavar="ID", help="In place of SANDBOX, as for kata-runtime."
)


def named_sandbox(words: Sequence[str], named: str, *, further: int) -> tuple[str, tuple[str, ...]]:
    """The sandbox, from the option or the first word, and the `further` words. Raises UsageError for more or fewer."""
    given = [named, *words] if named else list(words)
    if len(given) != 1 + further or not all(given):
        raise click.UsageError("expected SANDBOX" + (" and FILE" if further else ""))
    return given[0], tuple(given[1:])
