"""What a sandbox of ours looks like on the host when its state cannot tell: by names of directories and processes.

Kata's shims use the same directories and also name their VMM `sandbox-<id>`, so a name alone proves nothing. A process
is ours when its executable, and not only its command line, is what the name says.
"""

import os
import time
from functools import partial

from pyshim.host import processes
from pyshim.host.mount_table import unmount_below
from pyshim.host.trees import remove_tree
from pyshim.model.errors import ShimError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# The places of plan/share.py and plan/sandbox.py; a test compares them.
SHARED_ROOT = "/run/kata-containers/shared/sandboxes"
VM_ROOT = "/run/vc/vm"
VMM_NAME = "sandbox-"
"""What `-name` of a VMM begins with, before the sandbox's id."""
VMM_WORD = "chardev=qmp0,mode=control"
"""A word every VMM of ours has in its command line and Kata's has not; a test asks the builder of it."""
_PROGRAMS = ("qemu", "kvm", "virtiofsd")
_ONE_UNDO_S = 1.5


class Places:
    """The roots to look below; others than the real ones are for tests."""

    def __init__(self, vm_root: str = VM_ROOT, shared_root: str = SHARED_ROOT) -> None:
        self.vm_root = vm_root
        self.shared_root = shared_root

    def vm_dir(self, sandbox_id: str) -> str:
        return f"{self.vm_root}/{sandbox_id}"

    def shared_dir(self, sandbox_id: str) -> str:
        return f"{self.shared_root}/{sandbox_id}"


def processes_of(sandbox_id: str, places: Places) -> "tuple[processes.ProcessRef, ...]":
    """The sandbox's VMM and virtiofsd: programs of those names with its directories, or its name, as arguments."""
    found = {
        process
        for directory in (places.vm_dir(sandbox_id), places.shared_dir(sandbox_id))
        for process in processes.find_by_argument(f"{directory}/")
    }
    found.update(process for name, process in named_vmms() if name == sandbox_id)
    return tuple(sorted(process for process in found if _is_known_program(process)))


def named_vmms() -> "tuple[tuple[str, processes.ProcessRef], ...]":
    """Sandbox id and process of every VMM our builder of command lines has named."""
    found = []
    for process in processes.find_by_argument(VMM_WORD):
        words = processes.arguments(process.pid)
        name = words[words.index("-name") + 1] if "-name" in words[:-1] else ""
        sandbox_id = name.removeprefix(VMM_NAME).partition(",")[0]
        if name.startswith(VMM_NAME) and sandbox_id and _is_known_program(process):
            found.append((sandbox_id, process))
    return tuple(found)


def _is_known_program(process: processes.ProcessRef) -> bool:
    return processes.program_name(process).startswith(_PROGRAMS)


def clean_by_convention(sandbox_id: str, reason: str, deadline: float, places: Places) -> "list[str]":
    """What could not be cleaned of the sandbox's processes, mounts and directories; each step is taken all the same."""
    errors: list[str] = []

    def step(what: str, work: "Callable[[], object]") -> None:
        try:
            work()
        except OSError as error:
            errors.append(f"clean sandbox {sandbox_id!r} ({reason}): {what}: {error.strerror} ({error.filename})")
        except ShimError as error:
            errors.append(f"clean sandbox {sandbox_id!r} ({reason}): {error}")

    for process in processes_of(sandbox_id, places):
        step("kill", partial(processes.kill, process, min(deadline, time.monotonic() + _ONE_UNDO_S)))
    vm_dir, shared_dir = places.vm_dir(sandbox_id), places.shared_dir(sandbox_id)
    step("unmount", partial(unmount_below, shared_dir))
    for directory in (shared_dir, vm_dir):
        step("remove directory", partial(remove_tree, directory))
    return errors


def directories_of(sandbox_id: str, places: Places) -> "tuple[str, ...]":
    """Those of the sandbox's directories that are there."""
    paths = (places.vm_dir(sandbox_id), places.shared_dir(sandbox_id))
    return tuple(path for path in paths if os.path.lexists(path))
