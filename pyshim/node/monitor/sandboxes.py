"""The sandboxes of this node, found by their sockets."""

import os
from contextlib import suppress

from pyshim.model.observation import MONITOR_SOCKET


def sockets_in(metrics_directory: str, roots: tuple[str, ...]) -> dict[str, str]:
    """By sandbox id, the socket to ask: the one in the directory of metrics, else Kata's in the sandbox's state
    directory.

    Directories that do not exist, or that this user cannot read, count as empty.
    """
    found: dict[str, str] = {}
    for root in roots:
        with suppress(OSError), os.scandir(root) as entries:
            for entry in entries:
                path = f"{entry.path}/{MONITOR_SOCKET}"
                if entry.name not in found and os.path.exists(path):
                    found[entry.name] = path
    with suppress(OSError), os.scandir(metrics_directory) as entries:
        found |= {entry.name: entry.path for entry in entries}
    return dict(sorted(found.items()))
