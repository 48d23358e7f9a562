"""Initdata read and written: base64 of gzip of TOML in an annotation, a small disk for the guest.

Source of the formats: Kata's annotation `cc_init_data` and the disk its guest looks for. Everything is bounded: the
text comes from users who may create a pod.
"""

import base64
import binascii
import struct
import zlib

from pyshim.model.confidential import INITDATA_ALGORITHMS, Initdata
from pyshim.model.decoding import toml_value
from pyshim.model.errors import InvalidArgument

MAX_DOCUMENT_BYTES = 1 << 20
"""Bytes after decompression: enough for a guest's owner, too few for a compression bomb. Kubernetes limits a pod's
annotations to 256 KiB."""
MAX_TEXT_BYTES = 2 << 20
VERSIONS = ("0.1.0",)
_MAGIC = b"initdata"
_SECTOR_BYTES = 512
_GZIP = 16 + zlib.MAX_WBITS


def decode(text: str, origin: str) -> Initdata:
    """The document: given as such (it has line breaks or quotes), or as base64 of its gzip.

    Raises InvalidArgument naming `origin` and what is wrong.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise InvalidArgument(f"read initdata of {origin}: {len(text)} bytes, at most {MAX_TEXT_BYTES}")
    if '"' in text or "'" in text:
        # JSON can spell halves of a surrogate pair. They are no UTF-8, which is what `parse` then says.
        return parse(text.encode(errors="surrogatepass"), origin)
    try:
        packed = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidArgument(f"read initdata of {origin}: not base64: {exc}") from exc
    return parse(_unpacked(packed, origin), origin)


def _unpacked(packed: bytes, origin: str) -> bytes:
    """The one gzip member in `packed`, never more than MAX_DOCUMENT_BYTES of it."""
    inflater = zlib.decompressobj(_GZIP)
    try:
        document = inflater.decompress(packed, MAX_DOCUMENT_BYTES + 1)
    except zlib.error as exc:
        raise InvalidArgument(f"read initdata of {origin}: not gzip: {exc}") from exc
    if len(document) > MAX_DOCUMENT_BYTES:
        raise InvalidArgument(f"read initdata of {origin}: more than {MAX_DOCUMENT_BYTES} bytes once unpacked")
    if not inflater.eof:
        raise InvalidArgument(f"read initdata of {origin}: the gzip data ends early")
    if inflater.unused_data:
        raise InvalidArgument(f"read initdata of {origin}: bytes after the gzip data")
    return document


def parse(document: bytes, origin: str) -> Initdata:
    """The document's members, checked. Raises InvalidArgument."""
    if len(document) > MAX_DOCUMENT_BYTES:
        raise InvalidArgument(f"read initdata of {origin}: {len(document)} bytes, at most {MAX_DOCUMENT_BYTES}")
    members = toml_value(document, lambda problem: InvalidArgument(f"read initdata of {origin}: {problem}"))
    version, algorithm, data = members.get("version"), members.get("algorithm"), members.get("data", {})
    if version not in VERSIONS:
        raise InvalidArgument(f"read initdata of {origin}: version {version!r} is not one of {', '.join(VERSIONS)}")
    if algorithm not in INITDATA_ALGORITHMS:
        known = ", ".join(INITDATA_ALGORITHMS)
        raise InvalidArgument(f"read initdata of {origin}: algorithm {str(algorithm)[:100]!r} is not one of {known}")
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise InvalidArgument(f"read initdata of {origin}: data is not a table of strings")
    return Initdata(document=document, version=version, algorithm=algorithm, data=data)


def encode(initdata: Initdata) -> str:
    """The annotation's text; the same document gives the same text, whenever it is made."""
    return base64.b64encode(_packed(initdata)).decode()


def disk_image(initdata: Initdata) -> bytes:
    """The guest's disk: magic, length of the gzip data as 64 bits little-endian, the data, zeros to a whole sector."""
    packed = _packed(initdata)
    content = _MAGIC + struct.pack("<Q", len(packed)) + packed
    return content + bytes(-len(content) % _SECTOR_BYTES)


def _packed(initdata: Initdata) -> bytes:
    deflater = zlib.compressobj(9, zlib.DEFLATED, _GZIP)
    return deflater.compress(initdata.document) + deflater.flush()
