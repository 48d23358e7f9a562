"""Confidential guests: which technology, what of the host it needs to know, and the guard a VM gets in its argv."""

from enum import StrEnum

from pyshim.model.dataclasses import dataclass

SNP_HOST_DATA_BYTES = 32
TDX_CONFIG_ID_BYTES = 48
SEV_POLICY_NO_DEBUG = 1 << 0
SEV_POLICY_ES = 1 << 2
"""Bits of the SEV guest policy. Source: AMD's SEV API specification, chapter 3."""


class Tee(StrEnum):
    TDX = "tdx"
    SNP = "snp"
    SEV_ES = "sev-es"
    SEV = "sev"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeeFacts:
    """What the host offers, and what was looked at: an error can say why something is missing."""

    available: frozenset[Tee]
    probed: tuple[str, ...]
    """One sentence for each thing that was probed."""
    cbitpos: int
    """The page table bit that marks an encrypted page; 0 when no SEV kind is available."""
    reduced_phys_bits: int
    """Physical address bits the guest loses to encryption; 0 as above."""
    quote_socket: str
    """The unix socket of TDX's quote generation service; empty when it is not there."""


NO_TEE = TeeFacts(available=frozenset(), probed=(), cbitpos=0, reduced_phys_bits=0, quote_socket="")


@dataclass(frozen=True, slots=True, kw_only=True)
class VsockQuotes:
    """The quote generation service by vsock."""

    cid: int
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixQuotes:
    """The quote generation service by unix socket."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TdxGuard:
    mrconfigid: bytes
    """TDX_CONFIG_ID_BYTES, or empty: what the guest's owner has measured into it."""
    quotes: VsockQuotes | UnixQuotes


@dataclass(frozen=True, slots=True, kw_only=True)
class SevGuard:
    """SEV, or SEV-ES when the policy has its bit."""

    cbitpos: int
    reduced_phys_bits: int
    policy: int
    launch_hook: str
    """A program asked before the guest runs, told the launch measurement; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnpGuard:
    cbitpos: int
    reduced_phys_bits: int
    policy: int
    id_block: str
    id_auth: str
    """Base64 as the operator gave it, both or none."""
    host_data: bytes
    """SNP_HOST_DATA_BYTES, or empty."""


Guard = TdxGuard | SevGuard | SnpGuard
