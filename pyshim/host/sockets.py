"""Unix sockets that a child inherits."""

import os
import socket

from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import Internal, InvalidArgument

UNIX_PATH_BYTES = 107
"""The longest path of a unix socket, without the final NUL. Source: unix(7), sun_path."""


def listening_socket(path: str, *, mode: int = 0o600, backlog: int = 1) -> socket.socket:
    """A close-on-exec stream socket that listens at `path`, which has `mode` less the umask. Replaces a stale file."""
    if len(os.fsencode(path)) > UNIX_PATH_BYTES:
        raise InvalidArgument(f"listen at {path!r}: longer than {UNIX_PATH_BYTES} bytes, the limit of a unix socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if os.path.exists(path):
            os.unlink(path)
        # fchmod on an unbound socket decides the mode bind() gives the file (unix(7)), so there is no open moment.
        os.fchmod(listener.fileno(), mode)
        listener.bind(path)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise Internal(f"listen at {path!r}: {describe_os_error(error)}") from error
    return listener
