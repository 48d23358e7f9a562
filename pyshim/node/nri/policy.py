"""A policy decides where a VM runs. `GuardedPolicy` replaces an answer that cannot be used.

A policy is an object with the functions of `Policy`, found by its name (`policies.py`). If it raises, is late, or
places a VM on CPUs or nodes that are taken, its answer is refused and logged, and the default policy answers.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import msgspec
from msgspec.structs import replace

from pyshim.host.threads import daemon_thread
from pyshim.model.sizing import Placement, PlacementRequest
from pyshim.node.nri.assignments import (
    Assignments,
    PlacementError,
    apply,
    check_need,
    place_or_share,
    release,
)

WITHIN_S = 0.5
"""Seconds for one answer: a shim waits 2 s for its placement, and a runtime as long for the plugin."""
MAX_WHY_CHARS = 300


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a policy."""

    placement: Placement
    """`service_cpus`, and `vcpu_cpus` of a shared VM, are ignored: they follow from `cpu_nodes`."""
    moved: Mapping[str, tuple[int, ...]] = {}
    """New CPU nodes of shared VMs, by sandbox id. Their memory does not move, nor do exclusive VMs."""


class Policy(Protocol):
    """A policy is pure: its answer depends on the arguments only, and it changes nothing."""

    def place(self, assignments: Assignments, need: PlacementRequest) -> Decision:
        """The CPUs and nodes for `need`, which has no placement yet, and the reason in `placement.why`.

        `assignments` has the machine, the VMs placed on it, and the containers outside them. The CPUs of an
        exclusive placement, as many as vCPUs, are among `free_cpus(assignments)`; a need that is not exclusive gets
        shared CPUs. Raises PlacementError without room; an exclusive need then comes again as a shared one.
        """


class _Refused(Exception):
    """The answer cannot be used; the text has the reason."""


class GuardedPolicy:
    """Calls a policy, and the default one if its answer cannot be used."""

    def __init__(
        self, policy: Policy, *, on_refusal: Callable[[PlacementRequest, str], None], within_s: float = WITHIN_S
    ) -> None:
        """`on_refusal` is called with the reason before the default policy answers."""
        self._policy = policy
        self._on_refusal = on_refusal
        self._within_s = within_s
        self._late: threading.Thread | None = None

    def place(self, assignments: Assignments, need: PlacementRequest) -> Assignments:
        """As `assignments.place_or_share`. Raises PlacementError, InvalidArgument."""
        check_need(need)
        if assignments.needs.get(need.sandbox_id) == need:
            return assignments
        try:
            return place_or_share(release(assignments, need.sandbox_id), need, self._placed)
        except _Refused as refused:
            self._on_refusal(need, str(refused))
            return place_or_share(assignments, need)

    def _placed(self, assignments: Assignments, need: PlacementRequest) -> Assignments:
        """Raises PlacementError when the policy finds no room, _Refused."""
        decision = self._decision(assignments, need)
        if decision.placement.exclusive and not need.exclusive:
            raise _Refused("exclusive CPUs for a VM that shares")
        try:
            return apply(assignments, need, decision.placement, decision.moved)
        except PlacementError as error:
            raise _Refused(str(error).partition(": ")[2]) from error

    def _decision(self, assignments: Assignments, need: PlacementRequest) -> Decision:
        try:
            # Checks the types, since the object comes from another program's code.
            found = msgspec.convert(msgspec.to_builtins(self._answer(assignments, need)), Decision)
        except (PlacementError, _Refused):
            raise
        except (Exception, SystemExit) as error:  # of another program's code
            raise _Refused(f"{type(error).__name__}: {error}"[:MAX_WHY_CHARS]) from error
        why = "".join(each if each.isprintable() else " " for each in found.placement.why[:MAX_WHY_CHARS])
        return replace(found, placement=replace(found.placement, why=why))

    def _answer(self, assignments: Assignments, need: PlacementRequest) -> object:
        """Calls the policy in a thread, which cannot be ended. While a late call runs, it is not called again."""
        if self._late is not None and self._late.is_alive():
            raise _Refused("an earlier answer is still due")
        thread, answer = daemon_thread("nri/policy", partial(self._policy.place, assignments, need))
        thread.join(self._within_s)
        if not answer.done():
            self._late = thread
            raise _Refused(f"no answer within {self._within_s:g} s")
        return answer.result()
