"""The wait before a process is moved, taken while there is other work.

The kernel lets nobody fork or exit while it moves a process from cgroup to cgroup. To enter that state takes a grace
period of RCU, 5 to 15 ms in which a shim has nothing to do; for about as long afterwards further moves are free. So
this process is "moved" to where it is: when it begins to serve and when a first container is asked for, for its own
first move; and every few milliseconds while the VMM comes up, for the moves when it answers. Source: in the kernel,
cgroup_procs_write_start in kernel/cgroup/cgroup.c, and kernel/rcu/sync.c.
"""

import os
import threading
from collections.abc import Iterable
from contextlib import suppress

from pyshim.host.cgroups.hierarchies import Hierarchy, members, places_of, write

AGAIN_S = 0.004
"""Less than a grace period: so long moves stay free."""
MOST_TIMES = 100
"""A VMM that takes longer than these is slow anyway."""


def move_to_own_place(hierarchies: Iterable[Hierarchy], proc_root: str = "/proc") -> None:
    """This process is where it was, and the next moves need not wait. Blocks; never raises.

    Nobody else may move this process meanwhile: it would be moved back.
    """
    pid = os.getpid()
    with suppress(OSError):
        places = places_of(pid, proc_root)
        for each in hierarchies:
            directory = f"{each.mount_point}{places.get(frozenset(each.controllers), '')}"
            if pid in members(directory):
                write(f"{directory}/cgroup.procs", str(pid))
                return


def stay_movable(stop: threading.Event, directory: str) -> None:
    """As `move_to_own_place`, again and again until `stop` is set, or MOST_TIMES; this process is in `directory`.

    Not at once: it has just been moved there, and a fork that is about to be made would have to wait.
    """
    with suppress(OSError):
        for _ in range(MOST_TIMES):
            if stop.wait(AGAIN_S):
                return
            write(f"{directory}/cgroup.procs", str(os.getpid()))
