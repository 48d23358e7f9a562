"""Which confidential guests this host can run: read from /sys, /dev and CPUID, with a sentence for each look."""

import os
from collections.abc import Callable

from pyshim.host.cpuid import Registers, cpuid
from pyshim.host.fds import open_error
from pyshim.host.processes.launch import describe_os_error
from pyshim.model.confidential import Tee, TeeFacts

QUOTE_SOCKET = "/run/tdx-qgs/qgs.socket"
_ENCRYPTION_LEAF = 0x8000001F
_PARAMETERS = {
    Tee.TDX: "kvm_intel/parameters/tdx",
    Tee.SNP: "kvm_amd/parameters/sev_snp",
    Tee.SEV_ES: "kvm_amd/parameters/sev_es",
    Tee.SEV: "kvm_amd/parameters/sev",
}
_CPUID_BITS = {Tee.SEV: 1, Tee.SEV_ES: 3, Tee.SNP: 4}
"""Bits of EAX. Source: AMD64 Architecture Programmer's Manual, volume 3, CPUID Fn8000_001F."""


def probe_tee(
    *,
    sys_root: str = "/sys",
    dev_root: str = "/dev",
    quote_socket: str = QUOTE_SOCKET,
    read_cpuid: Callable[[int], Registers] = cpuid,
) -> TeeFacts:
    """What the host offers; a file that cannot be read means "no", never an error."""
    probed: list[str] = []
    offered = {tee for tee in Tee if _is_on(f"{sys_root}/module/{_PARAMETERS[tee]}", probed)}
    amd = offered - {Tee.TDX}
    cbitpos = reduced = 0
    if amd:
        capable, cbitpos, reduced = _encryption(probed, read_cpuid)
        amd &= capable if _opens(f"{dev_root}/sev", probed) else frozenset()
    has_quotes = Tee.TDX in offered and os.path.exists(quote_socket)
    return TeeFacts(
        available=frozenset(offered & {Tee.TDX} | amd),
        probed=tuple(probed),
        cbitpos=cbitpos if amd else 0,
        reduced_phys_bits=reduced if amd else 0,
        quote_socket=quote_socket if has_quotes else "",
    )


def _is_on(path: str, probed: list[str]) -> bool:
    """A module parameter says Y, or 1 as older kernels print it."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            value = file.read(16).strip()
    except OSError as error:
        probed.append(f"'{path}': {describe_os_error(error)}")
        return False
    probed.append(f"'{path}' says {value!r}")
    return value[:1] in ("Y", "1")


def _opens(path: str, probed: list[str]) -> bool:
    error = open_error(path)
    probed.append(f"'{path}' opens" if error is None else f"'{path}': {describe_os_error(error)}")
    return error is None


def _encryption(probed: list[str], read_cpuid: Callable[[int], Registers]) -> tuple[frozenset[Tee], int, int]:
    """What the CPU can do, the position of its encryption bit, and how many address bits that costs."""
    try:
        registers = read_cpuid(_ENCRYPTION_LEAF)
    except OSError as error:
        probed.append(f"CPUID {_ENCRYPTION_LEAF:#x}: {error}")
        return frozenset(), 0, 0
    probed.append(f"CPUID {_ENCRYPTION_LEAF:#x}: eax={registers.eax:#x} ebx={registers.ebx:#x}")
    capable = frozenset(tee for tee, bit in _CPUID_BITS.items() if registers.eax >> bit & 1)
    return capable, registers.ebx & 0x3F, registers.ebx >> 6 & 0x3F
