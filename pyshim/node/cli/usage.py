"""CPU and memory that the processes of sandboxes use."""

import errno
import os
import time
from collections.abc import Sequence
from typing import Any

import psutil
from msgspec import Struct

from pyshim.host.processes.identity import ProcessRef
from pyshim.model.errors import NotFound
from pyshim.model.units import MIB
from pyshim.node.cli.sandboxes import SandboxRow


class Usage(Struct, frozen=True, kw_only=True):
    cpu_percent: float
    """In percent of one CPU."""
    memory_mib: int
    """Memory that processes share, such as guest RAM, counts once (PSS)."""


class UsageMeter:
    """Measures CPU use between two calls of `measure`, and memory at each."""

    def __init__(self) -> None:
        self._before: dict[ProcessRef, float] = {}
        self._at_s = 0.0

    def measure(self, found: Sequence[SandboxRow]) -> dict[str, Usage]:
        """The usage by sandbox id. CPU use is that since the former call, and 0 at the first one."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._at_s
        now: dict[ProcessRef, float] = {}
        usage = {}
        for sandbox in found:
            used_s, memory_bytes = 0.0, 0
            for process in sandbox.processes:
                try:
                    measured = psutil.Process(process.pid)
                    times = measured.cpu_times()
                    memory_bytes += _memory_bytes(measured)
                except psutil.Error:
                    continue  # it has ended
                now[process] = times.user + times.system
                used_s += max(now[process] - self._before.get(process, now[process]), 0.0)
            percent = 100 * used_s / elapsed_s if self._before and elapsed_s > 0 else 0.0
            usage[sandbox.id] = Usage(cpu_percent=round(percent, 1), memory_mib=memory_bytes >> 20)
        self._before, self._at_s = now, now_s
        return usage


def _memory_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)


def host_side_mib_of(sandbox: SandboxRow) -> float:
    """MiB that its processes take beside guest RAM; a page that they share counts once.

    Raises PermissionError, NotFound when one of them has ended.
    """
    total_bytes = 0
    for process in sandbox.processes:
        try:
            mappings = psutil.Process(process.pid).memory_maps(grouped=False)
        except psutil.NoSuchProcess as error:
            raise NotFound(f"measure process {process.pid} of '{sandbox.id}': it has ended") from error
        except psutil.AccessDenied as error:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), f"/proc/{process.pid}/smaps") from error
        total_bytes += sum(each.pss for each in mappings if not _is_guest_ram(each, sandbox.memory_mib))
    return total_bytes / MIB


def _is_guest_ram(mapping: Any, vm_mib: int) -> bool:
    """Guest RAM is a memfd, whose name the kernel shows; if not shared, an anonymous mapping of exactly the VM's size.

    A larger anonymous mapping has the code that an emulating QEMU has translated.
    """
    if mapping.path.startswith("/memfd:"):
        return True
    return mapping.path in ("", "[anon]") and vm_mib > 0 and mapping.size == vm_mib << 20
