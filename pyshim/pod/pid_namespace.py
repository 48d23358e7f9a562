"""The pid namespace that a pod's containers share: the process that keeps it, and the container that each joins.

In a pod with a shared pid namespace, every container joins that of the sandbox container, which is made in the guest
first. So the namespace outlives every other container. In a pod without one, a container that asks for a shared
namespace is a debug container, which joins that of another container. containerd names it by its pid on the host, which
is the same for all tasks of a pod. So the target is known only if a single container can be meant.
"""

import asyncio
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition
from pyshim.model.guest import GuestContainer
from pyshim.model.ids import ContainerId
from pyshim.model.seams import Host
from pyshim.model.task import Status
from pyshim.pod.container import Container
from pyshim.pod.pause import PauseAgent
from pyshim.pod.sandbox import Sandbox
from pyshim.resources.network.plan.relay import process_holder
from pyshim.resources.network.relay import run_relay


class PodPidNamespace:
    def __init__(
        self, sandbox: Sandbox, *, host: Host, containers: Mapping[ContainerId, Container], is_pod: bool
    ) -> None:
        """`containers` is a view of those that exist now. The single container of a sandbox is not a pod's."""
        self._sandbox = sandbox
        self._is_pod = is_pod
        self._host = host
        self._containers = containers
        self.pause: PauseAgent | None = None
        """The pod's sandbox container; None in a pod of the Sandbox API."""
        self._first: ContainerId | None = None
        """The first container in the guest; kata-agent can share only its pid namespace."""
        self._has_holder = False
        """A process in the guest keeps the shared namespace until the sandbox ends."""
        self._lock = asyncio.Lock()

    async def join(self, guest: GuestContainer) -> GuestContainer:
        """`guest`, with the container that it joins unless the agent itself shares the right namespace.

        Raises FailedPrecondition as `_container_to_join` does.
        """
        if not guest.shared_pid_namespace or not self._is_pod or self._has_holder:
            return guest
        sandbox_container = self.pause.container_id if self.pause is not None else None
        others = [other for other in self._containers.values() if other.id != sandbox_container]
        if not others:
            async with self._lock:
                self._has_holder = self._has_holder or await self._make_holder()
            return guest
        joinable = [
            other.id
            for other in others
            if not other.plan.guest.shared_pid_namespace and other.init.status is not Status.STOPPED
        ]
        by_name = await self._sandbox.agent.joins_by_name()
        target = _container_to_join(guest.container_id, joinable, self._first, by_name=by_name)
        return guest if target is None else _with_namespace_of(guest, target)

    def container_was_created(self, container_id: ContainerId) -> None:
        """The container was created in the guest."""
        if self._first is None:
            self._first = container_id

    async def _make_holder(self) -> bool:
        """The guest has a process that keeps the namespace. False if it cannot have one."""
        plan = self._sandbox.plan
        timeout_s = plan.config.runtime.create_container_timeout_s
        if self.pause is not None:
            await self.pause.enter_guest(timeout_s)
        elif plan.share.virtiofsd is not None:
            holder = process_holder(plan.sandbox_id, plan.share)
            await run_relay(holder, host=self._host, agent=self._sandbox.agent, timeout_s=timeout_s)
        else:
            return False
        return True


def _container_to_join(container_id: str, joinable: Sequence[str], first: str | None, *, by_name: bool) -> str | None:
    """The container whose pid namespace `container_id` joins; None for the pod's first, which every agent shares.

    `joinable` are the containers that can be meant. Raises FailedPrecondition if they are several, or if the only one
    is not the first and the agent cannot join `by_name`.
    """
    if joinable == [first]:
        return None
    if by_name and len(joinable) == 1:
        return joinable[0]
    raise FailedPrecondition(
        f"create container '{container_id}': it is to join the processes of another container, and the guest's agent "
        "cannot know which (hint: set shareProcessNamespace in the pod, or debug without a target)"
    )


def _with_namespace_of(guest: GuestContainer, target: str) -> GuestContainer:
    """`guest` in the pid namespace of container `target`, by a path that our own agent reads."""
    linux = guest.spec["linux"]
    namespaces = [*linux["namespaces"], {"type": "pid", "path": f"container:{target}"}]
    return replace(guest, spec={**guest.spec, "linux": {**linux, "namespaces": namespaces}})
