"""AMD SEV, SEV-ES and SEV-SNP. Source of the rules: QEMU's docs/system/i386/amd-memory-encryption.rst."""

import base64
import binascii

from pyshim.model.confidential import SNP_HOST_DATA_BYTES, SevGuard, SnpGuard

SEV_ID = "sev"
SNP_ID = "snp"
_ID_BLOCK_BYTES = 96
_MAX_ID_AUTH_BYTES = 4096
"""Source: AMD's SEV-SNP firmware ABI, ID block and ID authentication information structure."""


def sev_object(guard: SevGuard) -> tuple[str, ...]:
    return ("-object", f"sev-guest,id={SEV_ID},{_common(guard)},policy={guard.policy}")


def snp_object(guard: SnpGuard) -> tuple[str, ...]:
    text = f"sev-snp-guest,id={SNP_ID},{_common(guard)},policy={guard.policy}"
    if guard.id_block:
        text += f",id-block={guard.id_block},id-auth={guard.id_auth}"
    if guard.host_data:
        text += f",host-data={base64.b64encode(guard.host_data).decode()}"
    return ("-object", text)


def _common(guard: SevGuard | SnpGuard) -> str:
    """kernel-hashes: without them the launch measurement says nothing about kernel, initrd and command line."""
    return f"cbitpos={guard.cbitpos},reduced-phys-bits={guard.reduced_phys_bits},kernel-hashes=on"


def problem(guard: SevGuard | SnpGuard) -> str:
    if not 0 < guard.cbitpos < 64 or not 0 < guard.reduced_phys_bits < 64:
        return f"encryption bit {guard.cbitpos} and {guard.reduced_phys_bits} reduced address bits are not a CPU's"
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
