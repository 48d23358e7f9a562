"""A certificate authority for one peer and its VMs, made with the `openssl` program."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

_DAYS = "30"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """PEM texts."""

    certificate: str
    key: str


class Authority:
    """The authority in `directory`, made at first use.

    Its clients cannot pass as servers, nor servers as clients: a key taken out of one VM opens no other.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (directory / "client.pem").exists():
            self._make()

    def _make(self) -> None:
        _openssl(
            *("req", "-x509", *_KEY, "-days", _DAYS, "-subj", "/CN=peer authority"),
            *("-keyout", self._directory / "ca.key", "-out", self._directory / "ca.pem"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )
        client = self._issue("peer", "clientAuth", self._directory / "client.key")
        (self._directory / "client.pem").write_text(client.certificate)

    @property
    def certificate(self) -> str:
        return (self._directory / "ca.pem").read_text()

    def server(self, name: str) -> Issued:
        """A certificate and key for the host `name`. Only the caller keeps the key."""
        key = self._directory / f"{name}.key"
        try:
            return self._issue(name, "serverAuth", key)
        finally:
            key.unlink(missing_ok=True)

    def client_context(self) -> ssl.SSLContext:
        """For connections to servers of this authority, by the names they were issued for."""
        context = ssl.create_default_context(cafile=str(self._directory / "ca.pem"))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._directory / "client.pem", self._directory / "client.key")
        return context

    def _issue(self, name: str, usage: str, key: Path) -> Issued:
        certificate = _openssl(
            *("req", "-x509", *_KEY, "-days", _DAYS, "-subj", f"/CN={name}", "-keyout", key),
            *("-CA", self._directory / "ca.pem", "-CAkey", self._directory / "ca.key"),
            *("-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"extendedKeyUsage={usage}"),
            *("-addext", f"subjectAltName=DNS:{name}"),
        )
        return Issued(certificate=certificate, key=key.read_text())


def _openssl(*words: str | Path) -> str:
    done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"make certificate: openssl {words[0]} exited {done.returncode}: {done.stderr.strip()[-500:]}"
        )
    return done.stdout
