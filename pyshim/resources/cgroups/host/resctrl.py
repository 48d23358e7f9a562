"""Puts programs into resctrl groups. The node's administrator makes and removes the groups.

Source: the kernel's arch/x86/resctrl.rst: a write of a number to `tasks` moves one thread, and a new thread or process
begins in the group of the one that made it.
"""

import contextlib
import os
from collections.abc import Iterable

from pyshim.host.os_errors import describe_os_error
from pyshim.host.processes.identity import family_threads
from pyshim.model.errors import FailedPrecondition
from pyshim.resources.cgroups.plan.rdt import ROOT_CLASS

ROOT = "/sys/fs/resctrl"


def join(name: str, pids: Iterable[int], root: str = ROOT) -> None:
    """All threads of the processes and of their descendants are in the group.

    Raises FailedPrecondition when the group is missing or the kernel refuses.
    """
    directory = root if name == ROOT_CLASS else f"{root}/{name}"
    try:
        tasks = os.open(f"{directory}/tasks", os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        is_mounted = os.path.exists(f"{root}/schemata")
        hint = "" if is_mounted else f" (hint: mount -t resctrl resctrl {ROOT})"
        cause = f"open '{directory}/tasks': {describe_os_error(error)}{hint}"
        raise FailedPrecondition(f"join RDT class {name!r}: {cause}") from error
    try:
        for tid in family_threads(pids):
            with contextlib.suppress(ProcessLookupError):
                os.write(tasks, f"{tid}\n".encode())
    except OSError as error:
        cause = f"{describe_os_error(error)}{_last_words(root)}"
        raise FailedPrecondition(f"join RDT class {name!r}: {cause}") from error
    finally:
        os.close(tasks)


def _last_words(root: str) -> str:
    """resctrl's own error text for a refused write."""
    try:
        with open(f"{root}/info/last_cmd_status", encoding="utf-8", errors="replace") as file:
            said = file.read(1000).strip()
    except OSError:
        return ""
    return f": {said}" if said not in ("", "ok") else ""
