"""Reads CRI-O's configuration: crio.conf, and the drop-ins that override it key by key, in the order of names."""

import os
from typing import Any

from pyshim.node.install.containerd_config import combined, read_document

CONFIG = "/etc/crio/crio.conf"
DROP_INS = "/etc/crio/crio.conf.d"


def document(*, root: str = "") -> dict[str, Any]:
    """The merged configuration; empty if CRI-O runs with its defaults. Raises OSError, FailedPrecondition naming the
    file."""
    found: dict[str, Any] = {}
    for path in _files(root):
        found = combined(found, read_document(path, root))
    return found


def _files(root: str) -> list[str]:
    files = [CONFIG] if os.path.exists(f"{root}{CONFIG}") else []
    if os.path.isdir(f"{root}{DROP_INS}"):
        files += [f"{DROP_INS}/{name}" for name in sorted(os.listdir(f"{root}{DROP_INS}"))]
    return files
