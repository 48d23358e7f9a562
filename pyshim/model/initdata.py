"""Initdata: the document a guest's owner has measured into a confidential guest."""

from collections.abc import Mapping

from pyshim.model.dataclasses import dataclass

ALGORITHMS = ("sha256", "sha384", "sha512")


@dataclass(frozen=True, slots=True, kw_only=True)
class Initdata:
    document: bytes
    """The TOML text, byte for byte: what is digested."""
    version: str
    algorithm: str
    """One of ALGORITHMS."""
    data: Mapping[str, str]

    @property
    def digest(self) -> bytes:
        import hashlib

        return hashlib.new(self.algorithm, self.document).digest()

    def digest_of(self, length: int) -> bytes:
        """The digest as a field of `length` bytes holds it: cut, or filled with zeros, at its end."""
        return self.digest[:length].ljust(length, b"\0")
