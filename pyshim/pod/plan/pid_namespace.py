"""Which pid namespace a container may join. Pure.

In a pod that shares its processes, a container joins the sandbox container's namespace. The sandbox container enters
the guest before the first of the others, so that the namespace outlives each of them. In another pod, a container that
asks for a shared namespace is a debug container, which joins the processes of one other. containerd names that one by
its pid on the host, which all tasks of a pod have in common, and the agent can share the namespace of the pod's first
container only.
"""

from collections.abc import Sequence

from pyshim.model.errors import FailedPrecondition


def require_first(container_id: str, joinable: Sequence[str], first: str | None) -> None:
    """The one container that may be meant is the first. Raises FailedPrecondition."""
    if joinable != [first]:
        raise FailedPrecondition(
            f"create container '{container_id}': it is to join the processes of another container, which the "
            "guest's agent can do in a pod of one container only (hint: set shareProcessNamespace in the pod, or "
            "debug without a target)"
        )
