"""/proc/PID/stat, the kernel's one line about a process. Imports nothing: `delete` reads it too.

Source: proc_pid_stat(5).
"""

STOPPED = (b"T", b"t")
"""States of a process that does nothing until it is continued."""


def stat_fields(task: int | str, proc_root: str = "/proc") -> list[bytes]:
    """The fields from the state on, which proc_pid_stat(5) counts as the third. Raises OSError.

    `task` is a pid, `self` or `PID/task/TID`. The command name before them may hold spaces and parentheses.
    """
    with open(f"{proc_root}/{task}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def start_ticks_of(task: int | str) -> int:
    """When it started, in clock ticks since boot; with the pid it names one process. Raises OSError."""
    return int(stat_fields(task)[19])


def is_stopped(pid: int) -> bool:
    """The process was stopped, by SIGSTOP or a debugger."""
    try:
        return stat_fields(pid)[0] in STOPPED
    except (OSError, IndexError):
        return False
