"""AMD SEV, SEV-ES and SEV-SNP. Source of the rules: QEMU's docs/system/i386/amd-memory-encryption.rst."""

import base64
import binascii
from typing import NamedTuple

from pyshim.model.confidential import SNP_HOST_DATA_BYTES, SevGuard, SnpGuard
from pyshim.model.errors import FailedPrecondition

SEV_ID = "sev"
SNP_ID = "snp"
_ID_BLOCK_BYTES = 96
_MAX_ID_AUTH_BYTES = 4096
"""Source: AMD's SEV-SNP firmware ABI, ID block and ID authentication information structure."""


class Encryption(NamedTuple):
    """The host CPU's parameters of memory encryption, for QEMU's argv."""

    cbitpos: int
    """The page table bit that marks an encrypted page."""
    reduced_phys_bits: int
    """The number of physical address bits that the guest loses."""


NO_ENCRYPTION = Encryption(0, 0)
QUERY_CAPABILITIES = "query-sev-capabilities"


def capabilities_argv(program: str, name: str, qmp_fd: int) -> tuple[str, ...]:
    """The argv of a QEMU without a machine, which answers QUERY_CAPABILITIES on the connected socket `qmp_fd`."""
    machine = ("-nodefaults", "-no-user-config", "-display", "none", "-machine", "none", "-accel", "kvm")
    control = ("-chardev", f"socket,id=qmp,fd={qmp_fd}", "-mon", "chardev=qmp,mode=control")
    return (program, "-name", name, *machine, *control)


def parse_encryption(capabilities: object) -> Encryption:
    """The parameters in QEMU's answer to QUERY_CAPABILITIES. Raises FailedPrecondition for a malformed answer."""
    members = capabilities if isinstance(capabilities, dict) else {}
    found = Encryption(members.get("cbitpos", 0), members.get("reduced-phys-bits", 0))
    # `type` and not isinstance: JSON's true would count as 1.
    if not all(type(bits) is int and 0 < bits < 64 for bits in found):
        raise FailedPrecondition(
            f"ask qemu {QUERY_CAPABILITIES!r}: encryption bit {found.cbitpos!r} and {found.reduced_phys_bits!r} reduced"
            " address bits are not a CPU's"
        )
    return found


def sev_object(guard: SevGuard, encryption: Encryption) -> tuple[str, ...]:
    return ("-object", f"sev-guest,id={SEV_ID},{_common(encryption)},policy={guard.policy}")


def snp_object(guard: SnpGuard, encryption: Encryption) -> tuple[str, ...]:
    text = f"sev-snp-guest,id={SNP_ID},{_common(encryption)},policy={guard.policy}"
    if guard.id_block:
        text += f",id-block={guard.id_block},id-auth={guard.id_auth}"
    if guard.host_data:
        text += f",host-data={base64.b64encode(guard.host_data).decode()}"
    return ("-object", text)


def _common(encryption: Encryption) -> str:
    """Without `kernel-hashes` the launch measurement does not cover kernel, initrd and command line."""
    return f"cbitpos={encryption.cbitpos},reduced-phys-bits={encryption.reduced_phys_bits},kernel-hashes=on"


def problem(guard: SevGuard | SnpGuard) -> str:
    if isinstance(guard, SevGuard):
        return "" if 0 <= guard.policy < 1 << 32 else f"SEV policy {guard.policy:#x} has more than 32 bits"
    if bool(guard.id_block) != bool(guard.id_auth):
        return "snp_id_block and snp_id_auth are only of use together"
    if guard.id_block:
        for name, text, least, most in (
            ("snp_id_block", guard.id_block, _ID_BLOCK_BYTES, _ID_BLOCK_BYTES),
            ("snp_id_auth", guard.id_auth, 1, _MAX_ID_AUTH_BYTES),
        ):
            try:
                found = len(base64.b64decode(text, validate=True))
            except (binascii.Error, ValueError):
                return f"{name} is not base64"
            if not least <= found <= most:
                return f"{name} is {found} bytes, not {least if least == most else f'{least} to {most}'}"
    if len(guard.host_data) not in (0, SNP_HOST_DATA_BYTES):
        return f"host data is {len(guard.host_data)} bytes, not {SNP_HOST_DATA_BYTES}"
    return ""
