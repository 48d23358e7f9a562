"""The size of one sandbox's VM while its containers come, go and are updated.

One lock serialises every change. Callers wait for growth: the guest has the resources before a container is created or
a limit raised. Shrinking follows in a task of the sandbox; if the guest returns too little, that is logged. For a VM of
fixed size (not `is_resizable`) the containers' demands are recorded as well, so that an update beyond its size is
refused.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from msgspec.structs import replace

from hypervisors.base import Hypervisor
from pyshim.concurrency.tasks import TaskOwner, to_the_end
from pyshim.model.errors import FailedPrecondition, ShimError, Unavailable
from pyshim.model.host_facts import HostFacts
from pyshim.model.ids import ContainerId
from pyshim.model.plans import SandboxPlan
from pyshim.model.seams import Agent
from pyshim.model.sizing import Dimension, SizingRecord
from pyshim.model.units import MIB
from pyshim.model.vm import LocalVm, VmConfig
from pyshim.resources.sizing.plan.resize import (
    Demand,
    ResizePlan,
    VmSize,
    check_static_update,
    demand,
    growth_steps,
    merged,
    resize_plan,
)
from pyshim.resources.sizing.plan.static import is_resizable
from pyshim.resources.sizing.plan.workload import container_workload

log = logging.getLogger(__name__)

_NO_BLOCKS = 1
"""The block size recorded for a guest without memory hotplug; its memory is not resized."""
Resources = Mapping[str, Any]


class Fit(Protocol):
    async def __call__(
        self, containers: Iterable[Resources], record: SizingRecord, *, has_new_vcpus: bool = False
    ) -> None:
        """As `SandboxCgroups.fit`."""


class Resizer:
    """`record` is the newest sizing decision; `on_change` is called after it has changed.

    `fit` makes the host's cgroups follow; it is called when the containers' resources or the record have changed.
    """

    def __init__(
        self,
        *,
        plan: SandboxPlan,
        host: HostFacts,
        hypervisor: Hypervisor,
        agent: Callable[[], Agent],
        tasks: TaskOwner,
        on_change: Callable[[], None],
        fit: Fit,
    ) -> None:
        self._plan = plan
        self._host = host
        self._hypervisor = hypervisor
        self._agent = agent
        self._tasks = tasks
        self._on_change = on_change
        self._fit = fit
        self._dynamic = is_resizable(plan.config)
        self._lock = asyncio.Lock()
        self._asked: dict[ContainerId, Resources] = {}
        self._pod: Resources = {}
        self._block_mib = 0
        self._dimms = 0
        self.record: SizingRecord = plan.sizing
        self.vcpus = plan.vm.cpu.boot_vcpus
        self.memory_mib = plan.vm.memory.boot_mib

    async def join(self, container_id: ContainerId, resources: Resources) -> None:
        """The VM has room for the container. If this raises, it does not count and added memory is removed."""
        async with self._lock:
            self._demand(container_id, resources)  # refused before it counts
            with self._asking(container_id, resources):
                await self._make_room()

    async def grow_from(self, base: LocalVm, agent: Agent) -> None:
        """A VM that runs with the size of `base` has the planned one; memory is rounded up to whole blocks.

        Raises ShimError when the VM cannot grow.
        """
        planned = self.vcpus, self.memory_mib
        self.vcpus, self.memory_mib = base.cpu.boot_vcpus, base.memory.boot_mib
        await self._grow_to(*planned, base, agent)
        if planned != (base.cpu.boot_vcpus, base.memory.boot_mib):
            self._keep(self.record)
            await self._fit((), self.record, has_new_vcpus=True)

    async def _grow_to(self, vcpus: int, memory_mib: int, base: LocalVm, agent: Agent) -> None:
        if vcpus > self.vcpus:
            self.vcpus = await self._hypervisor.resize_vcpus(vcpus)
            await agent.online_cpu_memory(self.vcpus, cpu_only=True)
        if memory_mib > self.memory_mib:
            self._block_mib = (await agent.guest_details()).memory_block_bytes // MIB or _NO_BLOCKS
            for step_mib in growth_steps(self._size(base), memory_mib):
                self.memory_mib = await self._hypervisor.resize_memory(step_mib)
                self._dimms += 1
                await agent.online_cpu_memory(self.vcpus, cpu_only=False)
        if self.vcpus < vcpus or self.memory_mib < memory_mib:
            raise FailedPrecondition(
                f"grow vm '{self._plan.sandbox_id}' to {vcpus} vCPUs and {memory_mib} MiB:"
                f" it has {self.vcpus} and {self.memory_mib} MiB"
            )

    def asked(self, container_id: ContainerId) -> Resources:
        """The resources the container counts with; empty when it does not count."""
        return self._asked.get(container_id, {})

    async def leave(self, container_id: ContainerId) -> None:
        """The container no longer counts; the VM shrinks soon. Idempotent."""
        if self._asked.pop(container_id, None) is not None:
            self._shrink_soon()

    async def update(
        self, container_id: ContainerId, update: Resources, apply: Callable[[Resources], Awaitable[None]]
    ) -> None:
        """The VM has the resources that the container asks for after `update`, and `apply` was called with them.

        Raises FailedPrecondition beyond the size of a VM of fixed size, before anything has changed: the kubelet
        repeats such an update every second. Raises what growing or `apply` raise; the container's request is then the
        former one.
        """
        action = f"update container '{container_id}'"
        async with self._lock:
            before = self._asked.get(container_id)
            if before is None:
                raise FailedPrecondition(f"{action}: it has ended")
            after = merged(before, update)
            demands = self._demands()
            wanted = [self._demand(each.name, after) if each.name == container_id else each for each in demands]
            if not self._dynamic:
                check_static_update(action, self._size(self._plan.vm), demands, wanted)
            try:
                with self._asking(container_id, after):
                    await self._make_room()
                    await apply(after)
            finally:
                self._on_change()  # also after a failure: the VM may have grown
        self._shrink_soon()

    async def update_pod(self, update: Resources) -> None:
        """While containers run, the VM has at least the resources that the pod asks for after `update`.

        Raises FailedPrecondition beyond the size of a VM of fixed size, and what growing raises; the pod's request is
        then the former one.
        """
        action = f"update sandbox '{self._plan.sandbox_id}'"
        async with self._lock:
            before, after = self._pod, merged(self._pod, update)
            demands = [demand("pod", before)], [demand("pod", after)]  # refused before it counts
            if not self._dynamic:
                check_static_update(action, self._size(self._plan.vm), *demands)
            self._pod = after
            try:
                if self._dynamic:
                    await self._make_room()
            except BaseException:
                self._pod = before
                self._shrink_soon()
                raise
            finally:
                self._on_change()  # also after a failure: the VM may have grown
        self._shrink_soon()

    def _demands(self) -> list[Demand]:
        return [self._demand(container_id, resources) for container_id, resources in self._asked.items()]

    def _demand(self, container_id: str, resources: Resources) -> Demand:
        """The CPU sets of a placed VM's containers decide where it runs, not its size."""
        found = demand(container_id, resources)
        return found if self._plan.placement is None else replace(found, cpus=frozenset())

    @contextmanager
    def _asking(self, container_id: ContainerId, resources: Resources) -> Iterator[None]:
        """The container counts with `resources`; as before if the block fails, unless it has ended meanwhile."""
        before = self._asked.get(container_id)
        self._asked[container_id] = resources
        try:
            yield
        except BaseException:
            if before is None:
                self._asked.pop(container_id, None)
            elif container_id in self._asked:
                self._asked[container_id] = before
            self._shrink_soon()
            raise

    async def _make_room(self) -> None:
        """The VM and the host's cgroups have what the containers ask for."""
        if self._dynamic:
            await to_the_end(self._grow())  # QEMU does not take half a command back
        await self._fit(self._asked.values(), self.record)

    # ---- growing and shrinking, under the lock

    async def _grow(self) -> None:
        """The VM has at least what its containers ask for, up to its limits, and the guest uses it."""
        plan = await self._decide()
        had = self.vcpus, self.memory_mib
        if plan.vcpus > self.vcpus or any(step_mib > self.memory_mib for step_mib in plan.memory_steps_mib):
            # The limits first: preallocated memory is charged when it is plugged, and could meet the OOM killer.
            await self._fit(self._asked.values(), _larger(plan.record, self.record))
        try:
            if plan.vcpus > self.vcpus:
                self.vcpus = await self._hypervisor.resize_vcpus(plan.vcpus)
            for step_mib in plan.memory_steps_mib:
                if step_mib > self.memory_mib:
                    await self._grow_memory(step_mib)
            if (self.vcpus, self.memory_mib) != had:
                await self._agent().online_cpu_memory(self.vcpus, cpu_only=self.memory_mib == had[1])
        except ShimError:
            await self._take_stock()
            raise
        self._keep(plan.record)

    async def _grow_memory(self, step_mib: int) -> None:
        """One step. The guest uses the new memory before the next step, whose description needs memory."""
        before_mib = self.memory_mib
        self.memory_mib = await self._hypervisor.resize_memory(step_mib)
        if self.memory_mib != before_mib and not self._plan.vm.memory.virtio_mem:
            self._dimms += 1
            await self._agent().online_cpu_memory(self.vcpus, cpu_only=False)

    def _shrink_soon(self) -> None:
        self._tasks.supervise(f"shrink/{self._plan.sandbox_id}", self._shrink())

    async def _shrink(self) -> None:
        """Shrinks in steps, as the guest returns memory; between steps a growing container gets the lock."""
        more = True
        while more:
            async with self._lock:
                more = self._dynamic and await self._shrink_vm()
                try:
                    await self._fit(self._asked.values(), self.record)
                except ShimError as exc:
                    log.debug("fit cgroups", extra={"sandbox": self._plan.sandbox_id, "error": str(exc)})

    async def _shrink_vm(self) -> bool:
        """True if the guest has returned a part of its memory and still has to return more."""
        had_mib = self.memory_mib
        try:
            plan = await self._decide()
            try:
                if plan.vcpus < self.vcpus:
                    self.vcpus = await self._hypervisor.resize_vcpus(plan.vcpus)
                for step_mib in plan.memory_steps_mib:
                    if step_mib < self.memory_mib:
                        self.memory_mib = await self._hypervisor.resize_memory(step_mib)
            except ShimError:
                await self._take_stock()
                raise
        except ShimError as exc:
            level = logging.DEBUG if isinstance(exc, Unavailable) else logging.WARNING  # an ended VM keeps nothing
            log.log(level, "shrink vm", extra={"sandbox": self._plan.sandbox_id, "error": str(exc)})
            return False
        kept = ((plan.vcpus, self.vcpus, "vCPUs"), (plan.record.memory_mib.granted, self.memory_mib, "MiB"))
        too_much = [f"{has} {unit} kept, {wanted} wanted" for wanted, has, unit in kept if has > wanted]
        if too_much and self.memory_mib < had_mib:
            self._keep(plan.record)
            return True
        self._keep(plan.record.with_warnings(*too_much))
        return False

    async def _take_stock(self) -> None:
        """After a change that failed half-way, the recorded sizes are the VM's. Added memory is removed if possible."""
        try:
            self.vcpus = len(await self._hypervisor.vcpu_thread_ids())
            self.memory_mib = await self._hypervisor.resize_memory(self.memory_mib)
        except ShimError as exc:
            log.debug("measure vm", extra={"sandbox": self._plan.sandbox_id, "error": str(exc)})

    async def _decide(self) -> ResizePlan:
        if not self._block_mib:
            details = await self._agent().guest_details()
            self._block_mib = details.memory_block_bytes // MIB or _NO_BLOCKS
        asked = container_workload(self._pod)
        pod = replace(asked, vcpus_source="the pod's CPU limit", memory_source="the pod's memory limit")
        return resize_plan(self._size(self._plan.vm), self._demands(), self._plan.config, self._host, pod)

    def _size(self, vm: VmConfig) -> VmSize:
        cpu, memory = vm.cpu, vm.memory
        can_grow = self._hypervisor.capabilities().memory_hotplug and self._block_mib != _NO_BLOCKS
        return VmSize(
            boot_vcpus=cpu.boot_vcpus,
            vcpus=self.vcpus,
            max_vcpus=cpu.max_vcpus,
            boot_memory_mib=memory.boot_mib,
            memory_mib=self.memory_mib,
            max_memory_mib=max(memory.max_mib, memory.boot_mib) if can_grow else memory.boot_mib,
            block_mib=self._block_mib or _NO_BLOCKS,
            free_slots=max(0, memory.slots - self._dimms),
            virtio_mem=memory.virtio_mem,
        )

    def _keep(self, decided: SizingRecord) -> None:
        """The record has the VM's size where it differs from the decision; a change is logged and persisted."""
        record = replace(
            decided,
            vcpus=_had(decided.vcpus, self.vcpus),
            memory_mib=_had(decided.memory_mib, self.memory_mib),
        )
        if record == self.record:
            return
        for warning in record.warnings:
            if warning not in self.record.warnings:
                log.warning("sizing", extra={"sandbox": self._plan.sandbox_id, "problem": warning})
        self.record = record
        log.info(
            "sizing",
            extra={
                "sandbox": self._plan.sandbox_id,
                "vcpus": record.vcpus.explain("vCPU"),
                "memory": record.memory_mib.explain("MiB"),
            },
        )
        self._on_change()


def _larger(one: SizingRecord, other: SizingRecord) -> SizingRecord:
    """`one`, with the larger of both in each dimension."""
    return replace(
        one,
        vcpus=max(one.vcpus, other.vcpus, key=lambda each: each.granted),
        memory_mib=max(one.memory_mib, other.memory_mib, key=lambda each: each.granted),
    )


def _had(decided: Dimension, granted: int) -> Dimension:
    if decided.granted == granted:
        return decided
    reason = "what is not taken away" if granted > decided.granted else "what could be added"
    return replace(decided, granted=granted, limited_by=reason)
