"""Theory of operation of one process (an init or an exec).

    CREATED --start--> RUNNING --pause--> PAUSING -> PAUSED --resume--> RUNNING
       |                  |                            |
       +--exit (killed)---+------------ exit ----------+--> STOPPED --delete--> (gone)

STOPPED is a latch: exit status and time are final before anybody can see it, and it never leaves it.
A process killed before it was started goes from CREATED to STOPPED (containerd kills created tasks).
Source: containerd's runc shim process states.
"""

from pyshim.model.task import Status

TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.CREATED: frozenset({Status.RUNNING, Status.STOPPED}),
    Status.RUNNING: frozenset({Status.PAUSING, Status.STOPPED}),
    Status.PAUSING: frozenset({Status.PAUSED, Status.RUNNING, Status.STOPPED}),
    Status.PAUSED: frozenset({Status.RUNNING, Status.STOPPED}),
    Status.STOPPED: frozenset(),
    Status.UNKNOWN: frozenset(),
}


def can_become(now: Status, wanted: Status) -> bool:
    return wanted in TRANSITIONS[now]
