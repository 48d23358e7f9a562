"""Three parts of the standard library that `start` uses without the modules around them: sockets, JSON and SHA-256.

All of `start` may take twice as long as the bare interpreter. In milliseconds, medians of 40 runs of CPython 3.11: the
bare interpreter 9.4, with `start` 14.2; with the public module besides, 16.7 (`hashlib`, which loads OpenSSL), 20.7
(`socket`, for `enum` and `selectors`) or 21.7 (`json`, for `re`). What these wrap takes 0.5: `_socket.socket` is the
base class of `socket.socket`, `make_scanner` does the work of `json.loads`, and `hashlib` itself takes the same sha256
where there is no OpenSSL.
"""

import _socket as socket
import sys

try:  # by its name in this Python only: to look for a module that is not there reads every directory of sys.path
    if sys.version_info >= (3, 12):
        from _sha2 import sha256
    else:
        from _sha256 import sha256  # type: ignore[import-not-found]
except ImportError:
    from hashlib import sha256

try:
    from _json import make_scanner
except ImportError:
    make_scanner = None  # type: ignore[assignment,misc]

__all__ = ["parse_json", "sha256_digits", "socket"]


def sha256_digits(data: bytes) -> str:
    """The hash of `data` in 64 hexadecimal digits."""
    return str(sha256(data).hexdigest())


def parse_json(data: bytes) -> object:
    """`json.loads(data)`; raises ValueError with its words."""
    if make_scanner is not None:
        try:
            text = data.decode().strip(" \t\r\n")
            value, end = make_scanner(_Decoder)(text, 0)  # type: ignore[arg-type]
            if end == len(text):
                return value
        except (StopIteration, ValueError, SystemError):
            pass  # SystemError: the scanner looks for the exception of json.decoder, which is not imported
    import json  # it says where the error is

    return json.loads(data)


class _Decoder:
    """The attributes of JSONDecoder that the scanner reads."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
