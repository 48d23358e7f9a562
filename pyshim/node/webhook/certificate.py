"""The server's TLS: a certificate and its key from files, read again when they have changed."""

import logging
import os
import ssl
from pathlib import Path

from cryptography import x509

from pyshim.model.errors import FailedPrecondition

log = logging.getLogger(__name__)

_Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    """An SSL context that uses, at each handshake, the pair that the files hold.

    Raises FailedPrecondition when they hold no pair at the start. Later an unusable pair, such as a half-written one,
    is logged, and the last good one stays.
    """

    def __init__(self, certificate_path: str, key_path: str) -> None:
        self._paths = (certificate_path, key_path)
        self.failures = 0
        """Changes that could not be used, since the start."""
        self.not_after_s = 0.0
        """Unix time at which the certificate in use ends."""
        self._stamp = self._stamp_of_files()
        try:
            self.context = self._latest = self._loaded()
        except (OSError, ValueError) as error:
            raise FailedPrecondition(
                f"load certificate '{certificate_path}' with key '{key_path}': {_cause(error)}"
            ) from error
        self.context.sni_callback = self._on_handshake

    def _on_handshake(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        # Called at every handshake, with or without a name. A Secret's files change all at once, by a renamed link.
        stamp = self._stamp_of_files()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._latest = self._loaded()
                log.info("certificate loaded", extra={"file": self._paths[0]})
            except (OSError, ValueError) as error:
                self.failures += 1
                log.warning("certificate not loaded", extra={"file": self._paths[0], "error": _cause(error)})
        connection.context = self._latest

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # An encrypted key is an error, not a question on the terminal.
        context.load_cert_chain(*self._paths, password=b"")
        chain = x509.load_pem_x509_certificates(Path(self._paths[0]).read_bytes())
        self.not_after_s = chain[0].not_valid_after_utc.timestamp()
        return context

    def _stamp_of_files(self) -> _Stamp:
        """Inode, time and size of each file that exists: they change with its content."""
        found = []
        for path in self._paths:
            try:
                status = os.stat(path)
            except OSError:
                continue
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)


def _cause(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
