"""The pid namespace that a container joins. Pure.

In a pod with a shared pid namespace, every container joins that of the sandbox container, which is made in the guest
first. So the namespace outlives every other container. In a pod without one, a container that asks for a shared
namespace is a debug container, which joins that of another container. containerd names it by its pid on the host, which
is the same for all tasks of a pod. So the target is known only if a single container can be meant.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition
from pyshim.model.guest import GuestContainer


def container_to_join(container_id: str, joinable: Sequence[str], first: str | None, *, by_name: bool) -> str | None:
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


def with_namespace_of(guest: GuestContainer, target: str) -> GuestContainer:
    """`guest` in the pid namespace of container `target`, by a path that our own agent reads."""
    linux = guest.spec["linux"]
    namespaces = [*linux["namespaces"], {"type": "pid", "path": f"container:{target}"}]
    return replace(guest, spec={**guest.spec, "linux": {**linux, "namespaces": namespaces}})
