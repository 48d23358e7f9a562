"""Confidential guests: the technologies, the host's support for them, a guest's guard and its initdata.

A guard is the protection of one guest by one technology, with its parameters; the driver adds it to the VM's argv.
"""

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
    """The technologies that the host supports."""

    available: frozenset[Tee]
    probed: tuple[str, ...]
    """One sentence for each probe and its result, for errors."""
    quote_socket: str
    """The unix socket of TDX's quote generation service; empty if it does not exist."""


NO_TEE = TeeFacts(available=frozenset(), probed=(), quote_socket="")


class VsockQuotes(msgspec.Struct, frozen=True, kw_only=True):
    """The vsock address of the quote generation service."""

    cid: int
    port: int


class UnixQuotes(msgspec.Struct, frozen=True, kw_only=True):
    """The unix socket of the quote generation service."""

    path: str


class TdxGuard(msgspec.Struct, frozen=True, kw_only=True):
    mrconfigid: bytes
    """The digest of the initdata, TDX_CONFIG_ID_BYTES long; empty without initdata."""
    quotes: VsockQuotes | UnixQuotes


class SevGuard(msgspec.Struct, frozen=True, kw_only=True):
    """SEV, or SEV-ES if the policy has SEV_POLICY_ES."""

    policy: int
    launch_hook: str
    """The program that checks the launch measurement before the guest runs; empty for none."""


class SnpGuard(msgspec.Struct, frozen=True, kw_only=True):
    policy: int
    id_block: str
    id_auth: str
    """Base64; both are set or both are empty."""
    host_data: bytes
    """The digest of the initdata, SNP_HOST_DATA_BYTES long; empty without initdata."""


Guard = TdxGuard | SevGuard | SnpGuard


INITDATA_ALGORITHMS = ("sha256", "sha384", "sha512")


class Initdata(msgspec.Struct, frozen=True, kw_only=True):
    """The document that a guest's owner passes to a confidential guest, and whose digest is in the measurement."""

    document: bytes
    """The TOML text as it was given: the digest is over these bytes."""
    version: str
    algorithm: str
    """One of INITDATA_ALGORITHMS."""
    data: Mapping[str, str]

    @property
    def digest(self) -> bytes:
        import hashlib

        return hashlib.new(self.algorithm, self.document).digest()

    def digest_of(self, length: int) -> bytes:
        """The digest in a field of `length` bytes: cut at its end, or padded there with zeros."""
        return self.digest[:length].ljust(length, b"\0")
