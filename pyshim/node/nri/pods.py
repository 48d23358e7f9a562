"""The node's pods and containers, as runtime and shims report them, and the CPUs that each container should have.

Theory of operation. A VM is placed by its shim's request, before it boots; without a request it is placed when the
runtime reports its pod. Every change of what is placed changes the shared CPUs, and with them the CPUs that
other containers should have: `due` compares these with the last ones sent for each container.

- a container of a VM whose shim has requested a placement: the CPUs of the VM. The shim has placed the threads already;
  from this update it learns of changed shared CPUs.
- a container of another VM with exclusive CPUs: these CPUs. Its shim can pin as many vCPUs to them.
- a container of another VM: nothing. Its shim would make the VM as large as the set.
- a container with CPUs from another manager, such as the kubelet's: nothing, and they are taken.
- any other container: the shared CPUs, from the first exclusive placement of the node on.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from pyshim.model.host_facts import Machine
from pyshim.model.sizing import Placement, PlacementRequest
from pyshim.node.nri.assignments import (
    Assignments,
    Other,
    PlacementError,
    keep,
    place_or_share,
    release,
    shared_cpus,
    with_others,
)

log = logging.getLogger(__name__)


class NriPod(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    """`NAMESPACE/POD`."""
    handler: str
    """The runtime handler; empty for the runtime's default."""
    need: PlacementRequest
    """The need of a VM of the pod's size, as far as the runtime reports it."""


class CpuSet(msgspec.Struct, frozen=True, kw_only=True):
    cpus: tuple[int, ...] = ()
    """In ascending order; empty: not restricted."""
    nodes: tuple[int, ...] = ()
    """Memory nodes, in ascending order; empty: not restricted."""


class NriContainer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    pod_id: str
    name: str
    memory_bytes: int
    """Its limit; 0 for none."""
    reported: CpuSet
    """Its CPUs and nodes, as the runtime reports them."""
    is_ours: bool
    """This plugin chose its CPUs: it was made while the plugin ran, without exclusive CPUs."""
    rdt_class: str = ""
    """Its class of cache and memory bandwidth; empty for none."""
    whole_cpus: int
    """The CPUs of a Guaranteed pod's container if they are a whole number, else 0."""

    @property
    def has_own_cpus(self) -> bool:
        """True if another manager, such as the kubelet's, gave it exclusive CPUs: as many as its whole limit.

        Any other set is shared.
        """
        return bool(self.reported.cpus) and not self.is_ours and len(self.reported.cpus) == self.whole_cpus


class _Tracked(msgspec.Struct, kw_only=True):
    """A container, and what the runtime was sent about it."""

    container: NriContainer
    sent: CpuSet
    """Its CPUs and nodes as last sent; at first those that the runtime reported."""
    can_update: bool
    """The runtime has created it, and takes updates of it."""


EXCLUSIVE, SHARED = "exclusive", "shared"
"""The two kinds of VMs in `rdt_classes`."""
_NO_CLASSES: Mapping[str, str] = MappingProxyType({})


class Pods:
    """The pods, containers and placements of the node. Pods with one of the runtime's `handlers` are our VMs."""

    def __init__(
        self,
        assignments: Assignments,
        handlers: frozenset[str],
        rdt_classes: Mapping[str, str] = _NO_CLASSES,
        place: Callable[[Assignments, PlacementRequest], Assignments] = place_or_share,
    ) -> None:
        """`rdt_classes` names the class of EXCLUSIVE and of SHARED VMs, where they have one; `place` is the policy."""
        self._policy = place
        self.assignments = assignments
        self._rdt_classes = rdt_classes
        self._handlers = handlers
        self._requested: set[str] = set()
        """Sandboxes whose running shim has requested a placement."""
        self._pods: dict[str, NriPod] = {}
        self._containers: dict[str, _Tracked] = {}

    def rdt_class(self, pod: NriPod, container: NriContainer) -> str:
        """The class to give to a container of our VM; empty for none, and if it has one already."""
        placement = self.assignments.placements.get(pod.id)
        if placement is None or container.rdt_class:
            return ""
        return self._rdt_classes.get(EXCLUSIVE if placement.exclusive else SHARED, "")

    # ---- from shims

    def place_for_shim(self, need: PlacementRequest) -> Placement:
        """The placement of a VM about to boot. Raises PlacementError, and InvalidArgument for an empty need.

        Without room for exclusive CPUs the VM runs on shared ones.
        """
        self._place(need)
        self._requested.add(need.sandbox_id)
        return self.assignments.placements[need.sandbox_id]

    def restore(self, need: PlacementRequest, placement: Placement) -> None:
        """A running shim has this placement from an earlier run of the plugin. If its CPUs are taken by now, it loses
        the placement, with a warning."""
        if need.sandbox_id in self.assignments.placements:
            return
        self._requested.add(need.sandbox_id)
        if self._keep(need, placement):
            log.info("placement restored", extra={"sandbox": need.sandbox_id, "pod": need.name, "why": placement.why})

    def shim_ended(self, sandbox_id: str) -> None:
        """The shim has ended, and the VM with it."""
        self._requested.discard(sandbox_id)
        self._release(sandbox_id)

    # ---- from the kernel

    def set_machine(self, machine: Machine) -> None:
        """VMs keep their placements on the new `machine`. One whose CPUs or nodes are gone loses it, with a warning."""
        before = self.assignments
        if machine == before.machine:
            return
        log.info("the machine has changed", extra={"cpus": sum(cpu.online for cpu in machine.cpus)})
        self.assignments = Assignments(machine=machine, reserved=before.reserved, others=before.others)
        for sandbox_id, placement in before.placements.items():
            self._keep(before.needs[sandbox_id], placement)

    # ---- from the runtime

    def synchronize(self, pods: Iterable[NriPod], containers: Iterable[NriContainer]) -> None:
        """These are all of the runtime's pods and containers, except VMs that are still booting."""
        self._pods = {pod.id: pod for pod in pods}
        found = tuple(containers)
        self._containers = {each.id: _Tracked(container=each, sent=each.reported, can_update=True) for each in found}
        for sandbox_id in set(self.assignments.placements) - self._requested - set(self._pods):
            self._release(sandbox_id)
        others = [self._other(each) for each in found if not self._is_vm(each.pod_id)]
        self.assignments = with_others(self.assignments, others)
        # The runtime lists stopped pods as well; only running ones have containers.
        for pod_id in dict.fromkeys(each.pod_id for each in found):
            if pod_id in self._pods:
                self._place_pod(self._pods[pod_id])

    def pod_started(self, pod: NriPod) -> None:
        self._pods[pod.id] = pod
        self._place_pod(pod)

    def pod_ended(self, pod_id: str) -> None:
        """The pod was stopped or removed. An unknown pod is ignored."""
        self._pods.pop(pod_id, None)
        self._requested.discard(pod_id)
        self._release(pod_id)

    def create_container(self, pod: NriPod, container: NriContainer) -> CpuSet | None:
        """The CPUs with which to create the container; None for those of the request."""
        self.pod_started(pod)
        tracked = _Tracked(container=container, sent=container.reported, can_update=False)
        self._containers[container.id] = tracked
        if not self._is_vm(pod.id):
            others = {**self.assignments.others, container.id: self._other(container)}
            self.assignments = with_others(self.assignments, others.values())
        wanted = self._wanted(tracked)
        if wanted is None or wanted == container.reported:
            return None
        tracked.sent = wanted
        return wanted

    def shares_cpus(self, container_id: str) -> bool:
        """True for a container outside our VMs and without exclusive CPUs."""
        other = self.assignments.others.get(container_id)
        return other is not None and not other.own_cpus

    def container_created(self, container_id: str) -> None:
        """The runtime can update the container from now on."""
        if tracked := self._containers.get(container_id):
            tracked.can_update = True

    def update_container(self, container_id: str, requested: CpuSet) -> CpuSet | None:
        """The CPUs the container should have instead of those that another client `requested`; None for these."""
        tracked = self._containers.get(container_id)
        if tracked is None or not requested.cpus:
            return None
        wanted = self._wanted(tracked)
        tracked.sent = wanted or requested
        return wanted if wanted != requested else None

    def container_ended(self, container_id: str) -> None:
        self._containers.pop(container_id, None)
        others = self.assignments.others
        if container_id in others:
            rest = [other for each, other in others.items() if each != container_id]
            self.assignments = with_others(self.assignments, rest)

    # ---- for the runtime

    def due(self) -> Mapping[str, CpuSet]:
        """The updates to send now, by container."""
        found = {}
        for container_id, tracked in self._containers.items():
            wanted = self._wanted(tracked) if tracked.can_update else None
            if wanted is not None and wanted != tracked.sent:
                found[container_id] = wanted
        return found

    def sent(self, updates: Mapping[str, CpuSet]) -> None:
        """These updates were sent to the runtime, which may have failed to apply them."""
        for container_id, wanted in updates.items():
            if tracked := self._containers.get(container_id):
                tracked.sent = wanted

    # ---- pieces

    def _is_vm(self, pod_id: str) -> bool:
        pod = self._pods.get(pod_id)
        return pod_id in self.assignments.placements or (pod is not None and pod.handler in self._handlers)

    def _place_pod(self, pod: NriPod) -> None:
        if pod.handler not in self._handlers or pod.id in self.assignments.placements:
            return
        try:
            self._place(pod.need)
        except PlacementError as error:
            log.warning("pod not placed", extra={"sandbox": pod.id, "pod": pod.name, "error": str(error)})

    def _place(self, need: PlacementRequest) -> None:
        self.assignments = self._policy(self.assignments, need)
        placement = self.assignments.placements[need.sandbox_id]
        log.info("placed", extra={"sandbox": need.sandbox_id, "pod": need.name, "why": placement.why})

    def _keep(self, need: PlacementRequest, placement: Placement) -> bool:
        try:
            self.assignments = keep(self.assignments, need, placement)
        except PlacementError as error:
            log.warning("placement not kept", extra={"sandbox": need.sandbox_id, "error": str(error)})
            return False
        return True

    def _release(self, sandbox_id: str) -> None:
        if sandbox_id in self.assignments.placements:
            self.assignments = release(self.assignments, sandbox_id)
            log.info("released", extra={"sandbox": sandbox_id})

    def _other(self, container: NriContainer) -> Other:
        own_cpus = container.reported.cpus if container.has_own_cpus else ()
        pod = self._pods.get(container.pod_id)
        name = f"{pod.name if pod else container.pod_id}/{container.name}"
        return Other(container_id=container.id, name=name, memory_bytes=container.memory_bytes, own_cpus=own_cpus)

    def _wanted(self, tracked: _Tracked) -> CpuSet | None:
        """The CPUs that the container should have; None to leave it unchanged."""
        container = tracked.container
        placement = self.assignments.placements.get(container.pod_id)
        if placement is not None:
            has_request = container.pod_id in self._requested
            if not has_request and not placement.exclusive:
                return None
            cpus = {*placement.vcpu_cpus, *(placement.service_cpus if has_request else ())}
            return replace(tracked.sent, cpus=tuple(sorted(cpus)))
        if not self.shares_cpus(container.id):
            return None
        if not tracked.sent.cpus and not any(each.exclusive for each in self.assignments.placements.values()):
            return None
        return replace(tracked.sent, cpus=shared_cpus(self.assignments))
