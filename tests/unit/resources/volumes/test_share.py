"""The share of a sandbox on the host, before its guest is set up."""

from tests.unit.pod.conftest import Stack

WATCHABLE = "/run/kata-containers/shared/sandboxes/c1/mounts/watchable"


async def test_the_directory_of_watched_volumes_is_in_the_share_before_the_guest_is_set_up(stack: Stack) -> None:
    """The guest has the share read-only, and kata-agent mounts over this directory."""
    made: list[bool] = []
    stack.on_connected = lambda: made.append(WATCHABLE in stack.host.directories)

    await stack.create("c1", ["sleep"])

    assert made == [True]
