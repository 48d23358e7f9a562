"""Finds the confidential guests this host can run, from /sys and /dev, with a sentence for each look.

KVM's modules answer for the CPU as well: a parameter says Y only where the CPU can do it and the firmware is ready.
"""

import os

from pyshim.host.fds import open_error
from pyshim.host.os_errors import describe_os_error
from pyshim.model.confidential import Tee, TeeFacts

QUOTE_SOCKET = "/run/tdx-qgs/qgs.socket"
_PARAMETERS = {
    Tee.TDX: "kvm_intel/parameters/tdx",
    Tee.SNP: "kvm_amd/parameters/sev_snp",
    Tee.SEV_ES: "kvm_amd/parameters/sev_es",
    Tee.SEV: "kvm_amd/parameters/sev",
}


def probe_tee(*, sys_root: str = "/sys", dev_root: str = "/dev", quote_socket: str = QUOTE_SOCKET) -> TeeFacts:
    """The host's guards; a file that cannot be read means "no", never an error."""
    probed: list[str] = []
    offered = {tee for tee in Tee if _is_on(f"{sys_root}/module/{_PARAMETERS[tee]}", probed)}
    if offered - {Tee.TDX} and not _opens(f"{dev_root}/sev", probed):
        offered &= {Tee.TDX}
    has_quotes = Tee.TDX in offered and os.path.exists(quote_socket)
    return TeeFacts(
        available=frozenset(offered),
        probed=tuple(probed),
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
