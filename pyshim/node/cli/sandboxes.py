"""All sandboxes of this node, read from their states, and their names on the command line.

A name is an id, the beginning of one, or the pod's NAMESPACE/NAME. The names of pods come from the saved states, so
containerd need not answer.
"""

import os
import re
from collections.abc import Mapping, Sequence

import click
from click.shell_completion import CompletionItem
from msgspec import Struct
from msgspec.structs import replace

from pyshim.host.processes.identity import ProcessRef, arguments, is_alive, our_pid_namespace
from pyshim.host.processes.stat import is_stopped
from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound, ShimError
from pyshim.model.ids import SandboxId, checked_id
from pyshim.model.ledger import ResourceKind
from pyshim.model.observation import spans_from_json
from pyshim.model.oci import pod_of
from pyshim.model.places import STATE_ROOT as STATE_DIR
from pyshim.model.sandbox import Phase, SandboxSnapshot, SandboxStatus
from pyshim.model.sizing import SizingRecord
from pyshim.node.install.plan import release_of
from pyshim.state.schema import NotOurState, SandboxState
from pyshim.state.store import StateStore

RUNS = "runs"
"""The health of a sandbox whose processes run, before its shim is asked."""
STOPPED = "stopped"
"""The health of a sandbox that has ended and is not removed yet."""
_MAX_NAMED = 5
_POD = re.compile("[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9.-]*")
"""NAMESPACE/NAME as Kubernetes allows them."""


class SandboxRow(Struct, frozen=True, kw_only=True):
    """One line of `pyshim list`. Sizes are 0 where none is recorded."""

    id: str
    pod: str = ""
    """NAMESPACE/NAME; empty for a sandbox outside Kubernetes."""
    containers: int = 0
    started_ns: int = 0
    """The time since the epoch at which its Create began; 0: unknown."""
    requested_vcpus: float = 0
    requested_memory_mib: float = 0
    """The sum of its containers' requests."""
    vcpus: int = 0
    memory_mib: int = 0
    """The VM's own size."""
    release: str = ""
    """The installed release that its shim runs; empty for a checkout, and if it is unknown."""
    origin: str = ""
    """Boot or template of its VM (`SandboxSnapshot.origin`); empty: unknown."""
    health: str
    """RUNS, or the problem; `ok` once the guest's agent has answered."""
    agent_age_s: float | None = None
    """Since the agent's last answer; None without a request or an answer."""
    processes: tuple[ProcessRef, ...] = ()
    """Shim, VMM and file server, as far as they run."""


def sandboxes(state_dir: str, *, prefix: str = "") -> list[SandboxRow]:
    """Every recorded sandbox whose id begins with `prefix`, sorted by id. Raises PermissionError."""
    store = StateStore(root=state_dir)
    found = []
    for sandbox_id in sorted(store.sandbox_ids()):
        if sandbox_id.startswith(prefix):
            try:
                found.append(described(store.load(sandbox_id)))
            except NotFound:
                continue  # it ended meanwhile
            except NotOurState:
                found.append(SandboxRow(id=sandbox_id, health="another runtime's"))
            except ShimError as error:
                found.append(SandboxRow(id=sandbox_id, health=f"state damaged: {error}"))
    return found


def described(state: SandboxState) -> SandboxRow:
    snapshot = state.snapshot
    ours = state.shim.pid_namespace in (0, our_pid_namespace())
    known = {"shim": ProcessRef(state.shim.pid, state.shim.start_ticks), **_servers(state)}
    living = {name: process for name, process in known.items() if ours and is_alive(process)}
    health = _health(snapshot, known, living) if ours else "not known: its processes are in another pid namespace"
    release = release_of(next(iter(arguments(living["shim"].pid)), "")) if "shim" in living else ""
    row = SandboxRow(id=state.sandbox_id, release=release, health=health, processes=tuple(living.values()))
    if snapshot is None:
        return row
    requested_vcpus = requested_mib = 0.0
    vcpus = memory_mib = 0
    if snapshot.sizing:
        try:
            record = SizingRecord.from_json(snapshot.sizing, f"sizing record of '{state.sandbox_id}'")
        except ShimError as error:
            health = f"state damaged: {error}"
        else:
            requested_vcpus, requested_mib = float(record.vcpus.requested), float(record.memory_mib.requested)
            vcpus, memory_mib = record.vcpus.granted, record.memory_mib.granted
    return replace(
        row,
        pod=_pod_name(snapshot),
        containers=len(snapshot.containers),
        started_ns=_started_ns(snapshot),
        requested_vcpus=requested_vcpus,
        requested_memory_mib=requested_mib,
        vcpus=vcpus,
        memory_mib=memory_mib,
        origin=snapshot.origin,
        health=health,
    )


def _servers(state: SandboxState) -> dict[str, ProcessRef]:
    """The processes in the ledger, by program name."""
    found = {}
    for entry in state.ledger:
        pid, ticks = entry.detail.get("pid"), entry.detail.get("start_ticks")
        if entry.kind is ResourceKind.PROCESS and isinstance(pid, int) and isinstance(ticks, int) and pid > 0:
            found[os.path.basename(str(entry.detail.get("program", ""))) or entry.key] = ProcessRef(pid, ticks)
    return found


def _health(snapshot: SandboxSnapshot | None, known: Mapping[str, ProcessRef], living: Mapping[str, ProcessRef]) -> str:
    if snapshot is not None and snapshot.failure:
        return f"failed: {snapshot.failure}"
    if "shim" not in living:
        return "its shim is gone (hint: pyshim cleanup)"
    if stopped := [name for name, process in living.items() if is_stopped(process.pid)]:
        return f"{', '.join(stopped)} is stopped (SIGSTOP or a debugger)"
    if snapshot is None or snapshot.status is SandboxStatus.CREATING:
        return "starting"
    if snapshot.phase is Phase.ENDING:
        return "ending"
    if snapshot.status is SandboxStatus.STOPPED:
        return STOPPED
    if gone := [name for name in known if name not in living]:
        return f"{', '.join(gone)} is gone"
    return RUNS


def _pod_name(snapshot: SandboxSnapshot) -> str:
    if snapshot.pod:
        return snapshot.pod
    for container in snapshot.containers:
        pod = pod_of(container.annotations)
        if pod.name:
            return f"{pod.namespace}/{pod.name}"
    return ""


def _started_ns(snapshot: SandboxSnapshot) -> int:
    try:
        spans = spans_from_json(snapshot.trace)
    except ValueError:
        return 0
    return spans[0].start_ns if spans else 0


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
optional_sandbox_argument = click.argument("sandbox", metavar="[SANDBOX]", default="", type=_SandboxParameter())
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
