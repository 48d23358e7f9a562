"""Confidential guests: the technology, the facts of the host it needs, the guard in the VM's argv, the initdata."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

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


class TeeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The host's support, and the files that were read: an error can name what is missing."""

    available: frozenset[Tee]
    probed: tuple[str, ...]
    """One sentence for each thing that was probed."""
    quote_socket: str
    """The unix socket of TDX's quote generation service; empty when it is not there."""


NO_TEE = TeeFacts(available=frozenset(), probed=(), quote_socket="")


class VsockQuotes(msgspec.Struct, frozen=True, kw_only=True):
    """The quote generation service by vsock."""

    cid: int
    port: int


class UnixQuotes(msgspec.Struct, frozen=True, kw_only=True):
    """The quote generation service by unix socket."""

    path: str


class TdxGuard(msgspec.Struct, frozen=True, kw_only=True):
    mrconfigid: bytes
    """TDX_CONFIG_ID_BYTES, or empty: what the guest's owner has measured into it."""
    quotes: VsockQuotes | UnixQuotes


class SevGuard(msgspec.Struct, frozen=True, kw_only=True):
    """SEV, or SEV-ES when the policy has its bit."""

    policy: int
    launch_hook: str
    """A program that checks the launch measurement before the guest runs; empty for none."""


class SnpGuard(msgspec.Struct, frozen=True, kw_only=True):
    policy: int
    id_block: str
    id_auth: str
    """Base64 as the operator gave it, both or none."""
    host_data: bytes
    """SNP_HOST_DATA_BYTES, or empty."""


Guard = TdxGuard | SevGuard | SnpGuard


INITDATA_ALGORITHMS = ("sha256", "sha384", "sha512")


class Initdata(msgspec.Struct, frozen=True, kw_only=True):
    """The document of a guest's owner, measured into a confidential guest."""

    document: bytes
    """The TOML text, byte for byte: what is digested."""
    version: str
    algorithm: str
    """One of INITDATA_ALGORITHMS."""
    data: Mapping[str, str]

    @property
    def digest(self) -> bytes:
        import hashlib

        return hashlib.new(self.algorithm, self.document).digest()

    def digest_of(self, length: int) -> bytes:
        """The digest as a field of `length` bytes holds it: cut, or filled with zeros, at its end."""
        return self.digest[:length].ljust(length, b"\0")
