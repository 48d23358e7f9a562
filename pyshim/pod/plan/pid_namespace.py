"""The pid namespace that a container joins. Pure.

In a pod that shares its processes, a container joins the sandbox container's namespace. The sandbox container enters
the guest before the first of the others, so that the namespace outlives each of them. In another pod, a container that
asks for a shared namespace is a debug container, which joins the processes of one other. containerd names that one by
its pid on the host, which all tasks of a pod share. So it is found only if a single container can be meant.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition
from pyshim.model.guest import GuestContainer


def container_to_join(container_id: str, joinable: Sequence[str], first: str | None, *, by_name: bool) -> str | None:
    """The container to name to the agent; None for the pod's first, whose namespace each agent shares by itself.

    `joinable` are the containers that can be meant. Raises FailedPrecondition if they are several, or one that is not
    the first while the agent cannot join `by_name`.
    """
    if joinable == [first]:
        return None
    if by_name and len(joinable) == 1:
        return joinable[0]
    raise FailedPrecondition(
        f"create container '{container_id}': it is to join the processes of another container, and the guest's agent "
        "cannot know which (hint: set shareProcessNamespace in the pod, or debug without a target)"
    )


def with_namespace_of(guest: GuestContainer, target: str) -> GuestContainer:
    """The container joins the pid namespace of container `target`, by the name that our own agent reads."""
    linux = guest.spec["linux"]
    namespaces = [*linux["namespaces"], {"type": "pid", "path": f"container:{target}"}]
    return replace(guest, spec={**guest.spec, "linux": {**linux, "namespaces": namespaces}})
