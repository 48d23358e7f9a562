"""The CPUs on which a sandbox's threads run: by its placement, its containers' CPU sets, or its guest's NUMA nodes."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from fractions import Fraction

from pyshim.concurrency.tasks import to_the_end
from pyshim.host.threads import in_thread
from pyshim.model.confinement import Group
from pyshim.model.host_facts import cpu_set
from pyshim.model.plans import SandboxPlan
from pyshim.model.seams import Cgroups, Records
from pyshim.resources.cgroups.plan.pinning import Pinning, pinning, placed_pinning, service_cpus, vcpu_cpus

log = logging.getLogger(__name__)


class CpuAffinity:
    """`placed` has the placement, None without one and after `drop_placement`; `pinning` is the last decision."""

    def __init__(
        self,
        *,
        plan: SandboxPlan,
        host: Cgroups,
        records: Records,
        note: Callable[[str], None],
        on_change: Callable[[], None],
    ) -> None:
        self._sandbox_id = plan.sandbox_id
        self._nodes = plan.numa
        self._pins_vcpus = plan.config.runtime.enable_vcpus_pinning
        self._host = host
        self._records = records
        self._note = note
        self._on_change = on_change
        self.placed = plan.placement
        self.pinning = Pinning(pairs={}, reason="enable_vcpus_pinning is false")

    @property
    def placement_cpus(self) -> frozenset[int]:
        """All CPUs of the placement; empty without one."""
        if self.placed is None:
            return frozenset()
        return frozenset((*self.placed.placement.vcpu_cpus, *self.placed.placement.service_cpus))

    def drop_placement(self, reason: str) -> None:
        self._note(f"not placed: {reason}")
        self.placed = None

    async def pin_shim(self) -> None:
        """With a placement, the shim and each child that it starts run on the CPUs for other threads than vCPUs."""
        if self.placed is None:
            return
        cpus = service_cpus(self.placed.placement, self.placement_cpus)
        if problem := await self._host.pin(os.getpid(), cpus):
            self._note(f"the shim is not where it is placed: {problem}")

    async def widen(self, pids: Iterable[int]) -> None:
        """The threads of the programs run on all CPUs of their cgroups, and follow a change of those.

        They were started with the mask of containerd, which may be confined to a few CPUs (systemd's `CPUAffinity=`). A
        cpuset does not undo an inherited mask since Linux 6.2.
        """
        if self.placed is None:
            for pid in pids:
                if problem := await self._host.pin_family(pid, (), ()):
                    self._note(f"a thread has only containerd's CPUs: {problem}")

    async def pin_at_boot(self, threads: tuple[int, ...], group: Group) -> None:
        """`pin` on the placement's CPUs, before the guest runs; nothing without placement and NUMA nodes."""
        if self.placed is not None or self._nodes:
            await self.pin(threads, self.placement_cpus, group, base=Fraction(0))

    async def pin(self, threads: tuple[int, ...], cpus: frozenset[int], group: Group, *, base: Fraction) -> None:
        """Each vCPU thread runs on its own CPU, or on `cpus`. With a placement, other threads are pinned as well.

        `threads` are sorted by vCPU, `base` is the number of vCPUs beside those for the containers. Without `cpus` all
        those of `group` are meant.
        """
        former = self.pinning
        if self.placed is not None:
            cpus = service_cpus(self.placed.placement, cpus)
            self.pinning = placed_pinning(self.placed.placement, len(threads))
            # The VMM and its servers are children of the shim.
            if problem := await self._host.pin_family(os.getpid(), cpus, threads):
                self._note(f"a thread is not where it is placed: {problem}")
            self._on_change()
        elif self._pins_vcpus:
            # A cancellation between lock and release would leave it locked.
            await to_the_end(self._decide(len(threads), cpus, base))
        if self.placed is None and not (self.pinning.pairs or former.pairs or self._nodes):
            return
        if not cpus:
            cpus = cpu_set(await self._host.allowed(group, "cpus"), "cpuset.cpus")
        for vcpu, tid in enumerate(threads):
            is_free = self.placed is None and vcpu not in self.pinning.pairs and not self._nodes
            own = () if is_free else vcpu_cpus(vcpu, self.pinning, cpus, self._nodes)
            if problem := await self._host.pin(tid, own):
                self._note(f"vCPU {vcpu} is not where it is pinned to: {problem}")

    async def _decide(self, vcpus: int, cpus: frozenset[int], base: Fraction) -> None:
        former = self.pinning
        with contextlib.ExitStack() as lock:
            taken = await in_thread(lock.enter_context, self._records.pins())
            self.pinning = pinning(vcpus=vcpus, base=base, cpus=cpus, taken=taken, nodes=self._nodes)
            if self.pinning != former:
                log.info("vCPU pinning", extra={"sandbox": self._sandbox_id, "reason": self.pinning.reason})
                self._on_change()  # on disk before the next shim looks
