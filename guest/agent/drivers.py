"""Drivers of devices that no program opens by name, and file systems that every pod mounts."""

from __future__ import annotations

import os

from guest.agent.children import Child, Children
from guest.agent.files import read_text

LISTED = "/usr/lib/agent/drivers"
"""The names of kernel modules, in order of urgency. Only our own image has the file."""
NICENESS = 10
"""Calls of the host get nine tenths of a busy CPU. Not 19: a container that keeps the only CPU busy would leave that a
hundredth, and a disk or NIC that is plugged then would wait for its driver for many seconds."""


def load_drivers(children: Children, *, listed: str = LISTED, modprobe: str = "/sbin/modprobe") -> Child | None:
    """`modprobe` runs with the modules of the file `listed`, at NICENESS. None if there is no such file.

    Under emulation, loading takes 0.3 s of the guest's only CPU; at this priority it hardly delays calls of the host. A
    call that needs a device waits for it; the mount of a file system loads its module. Raises AgentError, OSError.
    """
    try:
        names = read_text(listed).split()
    except FileNotFoundError:
        return None
    child = children.spawn([modprobe, "-a", *names], stderr=2)
    os.setpriority(os.PRIO_PROCESS, child.pid, NICENESS)
    return child
