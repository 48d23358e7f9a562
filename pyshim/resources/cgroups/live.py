"""The host cgroups of one sandbox, from before its first process to after its last.

Order: the shim joins first, so that its children (virtiofsd, the VMM) are counted from their first page. The vCPU
threads are placed while the guest is still stopped, and again after each hotplug. At the end the shim leaves, and
processes that are left in the cgroups are killed.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from hypervisors.base import Hypervisor
from pyshim.concurrency.tasks import together
from pyshim.model.confinement import Member, Role
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, ShimError
from pyshim.model.guest import NO_STATS, ContainerStats, MemoryUse
from pyshim.model.host_facts import CgroupMode, cpu_set
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.plans import SandboxPlan
from pyshim.model.seams import Cgroups, Records
from pyshim.model.sizing import SizingRecord
from pyshim.model.units import MIB
from pyshim.model.vm import BlockDevice, Device, VmExit, VmExitKind
from pyshim.resources.cgroups.affinity import CpuAffinity
from pyshim.resources.cgroups.applied import AppliedSettings
from pyshim.resources.cgroups.plan.block_io import Device as LimitedDevice
from pyshim.resources.cgroups.plan.block_io import block_io_settings, limited_devices
from pyshim.resources.cgroups.plan.cgroups import rdt_class
from pyshim.resources.cgroups.plan.settings import (
    DEVICE_NODES,
    SWAP_FILE,
    allowed_devices,
    checked_cpuset,
    cpuset_settings,
    cpuset_union,
    device_settings,
    limit_settings,
    refuse_realtime,
    swap_settings,
)

log = logging.getLogger(__name__)

CLAIM_S = 10.0
"""Seconds to wait while other shims claim their cgroups, which takes milliseconds each."""
CLAIM_PAUSE_S = 0.005
Resources = Mapping[str, Any]
_BY_PLACEMENT = "the placement that the node's plugin gave"


class SandboxCgroups:
    """The cgroups of one sandbox; `saved()` describes them for the state on disk."""

    def __init__(
        self,
        *,
        plan: SandboxPlan,
        host: Cgroups,
        records: Records,
        on_change: Callable[[], None],
    ) -> None:
        self._config = plan.config
        self._sandbox_id = plan.sandbox_id
        self._plan = plan.cgroups
        self._nodes = plan.numa
        self._numa_why = plan.numa_why
        self._host = host
        self._records = records
        self._hypervisor: Hypervisor | None = None
        """The VM's, from `place` on."""
        self._on_change = on_change
        self._record = plan.sizing
        self._entries: list[LedgerEntry] = []
        self._settings = AppliedSettings(plan=self._plan, host=host, sandbox_id=plan.sandbox_id)
        self._affinity = CpuAffinity(
            plan=plan, host=host, records=records, note=self._settings.note, on_change=on_change
        )
        self._threads: tuple[int, ...] = ()
        self._pids: dict[Member, int] = {}
        self._rdt_class = ""
        self._io_limited: frozenset[LimitedDevice] = frozenset()
        self._lock = asyncio.Lock()
        self._left = False

    # ---- before and while the VM starts

    async def enter(self) -> None:
        """The cgroups exist with their limits, and the shim is in its own; `leave` undoes both."""
        plan = self._plan
        if not plan.groups:
            return
        # Before they are in the ledger, since the undo of a cgroup kills the processes in it.
        for path, pid in (await self._host.occupants(plan.groups)).items():
            raise FailedPrecondition(
                f"make cgroup '{path}': process {pid} is in it: another sandbox has the same cgroupsPath"
            )
        await self._claim()
        if plan.scope is not None:
            await self._host.start_scope(plan.scope)
        self._settings.note(*await self._host.make(plan.groups))
        await self._settings.apply(limit_settings(plan, self._config, self._record))
        await self._try_placement()
        await self._join(Member.SHIM, os.getpid())
        await self._affinity.pin_shim()

    async def _try_placement(self) -> None:
        """The cgroup has the placement's CPUs. If the pod's cgroup does not allow it, it is dropped, with a note.

        Memory nodes are not limited: when they are full the kernel would kill processes, although others have room.
        """
        cpus = self._affinity.placement_cpus
        if not cpus:
            return
        try:
            await self._check_sets(cpus, frozenset())
            await self._settings.apply(cpuset_settings(self._plan, cpus, frozenset(), source=_BY_PLACEMENT))
        except ShimError as error:
            self._affinity.drop_placement(str(error))

    async def _claim(self) -> None:
        """The cgroups are in this sandbox's ledger, and in no other, whose undo would kill the processes in them."""
        paths = [group.path for group in self._plan.groups]
        until = asyncio.get_running_loop().time() + CLAIM_S
        while True:
            with self._records.claims(paths) as others:
                if others is not None:
                    self._acquire(others)
                    return
            if asyncio.get_running_loop().time() > until:
                raise DeadlineExceeded(f"claim cgroup '{paths[0]}': other shims decide for more than {CLAIM_S:g} s")
            await asyncio.sleep(CLAIM_PAUSE_S)

    def _acquire(self, others: Mapping[str, str]) -> None:
        """The cgroups are in the ledger. `others` has the sandbox of each that another one has, which is an error."""
        for path, other in others.items():
            raise FailedPrecondition(
                f"make cgroup '{path}': sandbox '{other}' has it: another sandbox has the same cgroupsPath "
                f"(hint: if its shim is gone, 'pyshim cleanup {other}')"
            )
        entries = [
            LedgerEntry(kind=ResourceKind.CGROUP, key=group.path, detail={"roots": ":".join(self._host.roots(group))})
            for group in self._plan.groups
        ]
        self._records.ledger.acquire(*entries)
        self._entries += entries

    @contextlib.asynccontextmanager
    async def starting_vmm(self) -> AsyncIterator[None]:
        """Children that the shim starts in the block are in the VMM's cgroup from their first page.

        On v2 a page's charge never moves to another cgroup.
        """
        members = self._plan.members
        apart = bool(self._plan.groups) and members[Member.VMM] is not members[Member.SHIM]
        if apart:
            await self._host.join(self._plan.group(members[Member.VMM]), (os.getpid(),))
        try:
            yield
        finally:
            if apart:
                await self._join(Member.SHIM, os.getpid())

    async def restrict_devices(self) -> None:
        """Processes of cgroups with a device list, which have none yet, may open only the devices that a VMM needs.

        The pod's PCI functions are bound to VFIO already, so their groups are known. The cgroup in which the shim
        starts the VMM gets its list after the shim has left it.
        """
        vmm_role = self._plan.members.get(Member.VMM)
        await self._write_device_list([role for role in self._plan.with_device_list if role is not vmm_role])

    async def _write_device_list(self, roles: Iterable[Role]) -> None:
        if roles:
            rules = await self._host.device_rules(DEVICE_NODES)
            await self._settings.apply(setting for role in roles for setting in device_settings(role, rules))

    async def place(self, hypervisor: Hypervisor, virtiofsd_pid: int) -> None:
        """All processes that serve the guest are bound by a device list, and the vCPU threads are in their cgroup.

        Called before the guest runs, so that all its requests are served under the list. A remote VM has no process on
        this host, and pid 0.
        """
        vmm_pid = hypervisor.pid
        self._hypervisor, self._threads = hypervisor, ()
        self._pids.update({Member.VMM: vmm_pid, Member.VIRTIOFSD: virtiofsd_pid})
        programs = tuple(filter(None, (vmm_pid, virtiofsd_pid, *hypervisor.helper_pids)))
        if not self._plan.groups or not vmm_pid:
            await self._affinity.widen(programs)
            return
        if (vmm_role := self._plan.members[Member.VMM]) in self._plan.with_device_list:
            await self._write_device_list([vmm_role])
            outside = programs[1 : 1 + bool(virtiofsd_pid)]  # the others started in this cgroup
        else:
            outside = programs
        moved = self._host.join_family(self._plan.group(Role.DEVICES), outside)
        if self._plan.mode is CgroupMode.V2:
            await moved  # first, since it moves all threads
            await self._place_vcpus()
        else:
            await together(moved, self._place_vcpus())  # the VMM answers while the kernel moves it
        await self._affinity.widen(programs)
        await self._affinity.pin_at_boot(self._threads, self._plan.group(Role.SANDBOX))

    async def allow(self, device: Device) -> None:
        """The VMM may open the device that is plugged next."""
        path = device.path if isinstance(device, BlockDevice) else ""
        if roles := self._plan.with_device_list:
            rules = await self._host.device_rules((path,) if path else ())
            await self._settings.apply(setting for role in roles for setting in allowed_devices(role, rules))

    # ---- while it runs

    async def fit(self, containers: Iterable[Resources], record: SizingRecord, *, has_new_vcpus: bool = False) -> None:
        """CPU sets, limits, block I/O and thread places follow the containers and the VM's size.

        Threads are placed if the record is another, or with `has_new_vcpus`.

        Raises InvalidArgument for CPUs that the host or the pod's cgroup lacks and for a real-time slice,
        FailedPrecondition for a limit on a device that the host lacks.
        """
        if not self._plan.groups:
            return
        # A pod's sandbox container requests nothing and does no work.
        containers = tuple(each for each in containers if each)
        refuse_realtime(containers)
        block_io = block_io_settings(self._plan, containers, self._io_limited)
        async with self._lock:
            if self._left:
                return
            former, same_size = self.saved(), record is self._record and not has_new_vcpus
            self._record = record
            by_containers, mems = cpuset_union(containers, "cpus"), cpuset_union(containers, "mems")
            cpus = by_containers or self._affinity.placement_cpus
            source = "" if cpus == by_containers else _BY_PLACEMENT
            await self._check_sets(cpus, mems)
            if cpus or mems or any(each.controller == "cpuset" for each in self._settings.written):
                await self._settings.apply(cpuset_settings(self._plan, cpus, mems, source=source))
            has_swap_limit = any(each.file == SWAP_FILE for each in self._settings.written)
            swap = swap_settings(self._plan, containers, has_limit=has_swap_limit)
            await self._settings.apply((*limit_settings(self._plan, self._config, record), *block_io, *swap))
            self._io_limited = limited_devices(containers)
            if not same_size or not self._threads:
                await self._place_vcpus()
            await self._affinity.pin(self._threads, cpus, self._plan.group(Role.SANDBOX), base=record.vcpus.base)
            if self.saved() != former:
                self._on_change()

    async def enter_class(self, container_id: str, linux: Mapping[str, Any]) -> None:
        """The VMM and its servers join the class of cache and memory bandwidth that this container's spec names.

        All containers of a VM run on the VMM's threads, so they share the class. Raises InvalidArgument for an invalid
        name, FailedPrecondition if the node lacks the class or the VM has another.
        """
        name, left_out = rdt_class(linux)
        for key in left_out:
            self._settings.note(f"container '{container_id}': linux.intelRdt.{key} is not done for a VM")
        helper_pids = self._hypervisor.helper_pids if self._hypervisor is not None else ()
        known = (self._pids.get(Member.VMM), self._pids.get(Member.VIRTIOFSD), *helper_pids)
        programs = tuple(pid for pid in known if pid)
        if not name or not programs:
            return
        async with self._lock:
            if name == self._rdt_class:
                return
            if self._rdt_class:
                raise FailedPrecondition(
                    f"join RDT class {name!r}: all containers of a VM have one class, and this one's is"
                    f" {self._rdt_class!r}"
                )
            await self._host.join_class(name, programs)
            self._rdt_class = name
            self._on_change()

    async def _check_sets(self, cpus: frozenset[int], mems: frozenset[int]) -> None:
        group = self._plan.group(Role.SANDBOX)
        for wanted, name, what in ((cpus, "cpus", "CPUs"), (mems, "mems", "memory nodes")):
            if wanted and (allowed := await self._host.allowed(group, name)):
                checked_cpuset(wanted, cpu_set(allowed, f"cpuset.{name}"), what, group.path)

    async def _place_vcpus(self) -> None:
        former = self._threads
        if self._hypervisor is None:
            return
        try:
            self._threads = await self._hypervisor.vcpu_thread_ids()
        except ShimError as exc:
            log.debug("list vCPU threads", extra={"sandbox": self._sandbox_id, "error": str(exc)})
            return
        role = self._plan.members[Member.VCPUS]
        if role is not self._plan.members[Member.VMM]:
            await self._host.join_threads(self._plan.group(role), [tid for tid in self._threads if tid not in former])

    # ---- the end

    async def explain(self, end: VmExit) -> str:
        """The reason of the VM's end: the host's OOM killer, the VMM, or the guest."""
        if end.kind is not VmExitKind.VMM_DIED or not self._plan.groups:
            return end.reason
        return await self._with_oom(Member.VMM, "the VMM", end.reason)

    async def explain_failed_start(self, reason: str) -> str:
        """The reason of a failed start if the VMM was too large for the pod's cgroup."""
        return await self._with_oom(Member.VMM, "the VMM", reason) if self._entries else reason

    async def explain_virtiofsd(self, reason: str) -> str:
        return await self._with_oom(Member.VIRTIOFSD, "virtiofsd", reason) if self._plan.groups else reason

    async def _with_oom(self, member: Member, name: str, reason: str) -> str:
        group = self._plan.group(self._plan.members[member])
        try:
            oom = await self._host.oom(group)
        except ShimError as exc:
            log.debug("read oom counters", extra={"sandbox": self._sandbox_id, "error": str(exc)})
            return reason
        if oom is None:
            return reason
        if not oom.limited_by:
            return f"the host ran out of memory and its OOM killer ended {name}: {reason}"
        limit = f" of {oom.limit_bytes // MIB} MiB" if oom.limit_bytes else ""
        return f"the host's OOM killer ended {name}, as cgroup '{oom.limited_by}' met its memory limit{limit}: {reason}"

    async def leave(self) -> None:
        """The shim has left; the cgroups are removed, also from the ledger. Idempotent."""
        if not self._entries:
            return
        async with self._lock:
            self._left = True
        try:
            await self._host.leave(self._plan.groups)
        finally:
            while self._entries:
                await self._records.ledger.release(self._entries[-1])
                self._entries.pop()

    # ---- reports

    async def stats(self) -> ContainerStats:
        """The VM's use of the host, as the kernel counts it for the pod's cgroup."""
        if not self._plan.groups:
            return NO_STATS
        used = await self._host.usage(self._plan.group(Role.SANDBOX))
        memory = MemoryUse(
            usage_bytes=used.get("memory_bytes", 0),
            max_usage_bytes=used.get("memory_peak_bytes", 0),
            failures=0,
            limit_bytes=0,
        )
        return replace(
            NO_STATS,
            cpu=replace(NO_STATS.cpu, total_ns=used.get("cpu_ns", 0)),
            memory=replace(NO_STATS.memory, usage=memory),
            pids_current=used.get("processes", 0),
            oom_kills=used.get("oom_kills", 0),
        )

    def saved(self) -> Mapping[str, object]:
        """A JSON object. Process ids may be those of processes that have ended."""
        plan = self._plan
        saved: dict[str, object] = {"Mode": str(plan.mode), "Notes": list(self._settings.notes)}
        if self._rdt_class:
            saved["RdtClass"] = self._rdt_class
        if not plan.groups:
            return saved
        if self._numa_why:
            saved["Numa"] = {"Why": self._numa_why, "Nodes": msgspec.to_builtins(self._nodes)}
        if self._affinity.placed is not None:
            saved["Placed"] = msgspec.to_builtins(self._affinity.placed)
        return saved | {
            "SandboxCgroupOnly": self._config.runtime.sandbox_cgroup_only,
            "Unit": plan.scope.unit if plan.scope is not None else "",
            "Groups": [
                {"Role": str(group.role), "Path": group.path, "Roots": list(self._host.roots(group))}
                for group in plan.groups
            ],
            "Members": {str(member): str(role) for member, role in plan.members.items()},
            "Pids": {str(member): pid for member, pid in self._pids.items()},
            "VcpuThreads": list(self._threads),
            "Settings": [
                {"Role": str(each.role), "File": each.file, "Value": each.value, "Source": each.source}
                for each in self._settings.written
            ],
            "Pinned": {str(vcpu): cpu for vcpu, cpu in self._affinity.pinning.pairs.items()},
            "Pinning": self._affinity.pinning.reason,
        }

    # ---- pieces

    async def _join(self, member: Member, pid: int) -> None:
        self._pids[member] = pid
        await self._host.join(self._plan.group(self._plan.members[member]), (pid,))
