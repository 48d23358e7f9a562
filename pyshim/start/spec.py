"""The group of a bundle, by the annotations of its OCI spec."""

import os

from pyshim.start.errors import BootstrapError, os_failure
from pyshim.start.stdlib import parse_json

# The annotation that says that a container belongs to a pod, and the one that names the pod, of CRI-O, containerd and
# cri-dockerd. As pyshim.model.oci has them. Not io.containerd.runc.v2.group, with which runc's shim serves unrelated
# containers in one process to save memory: here it would put them into one virtual machine.
_POD_ANNOTATIONS = (
    ("io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri-o.SandboxID"),
    ("io.kubernetes.cri.container-type", "io.kubernetes.cri.sandbox-id"),
    ("io.kubernetes.docker.type", "io.kubernetes.sandbox.id"),
)
_IN_A_POD = "container"
_MAX_ID_CHARS = 76


def group_id(bundle: str, container_id: str) -> str:
    """The id under which containers share a shim and a virtual machine: the pod's, or the container's own.

    For annotations that make no sense it is the container's own; Create refuses those, with an error of its own.
    Raises BootstrapError naming the file or the annotation. A bundle without config.json is that of a sandbox which is
    made through containerd's Sandbox API.
    """
    path = f"{bundle}/config.json"
    try:
        with open(path, "rb") as file:
            spec = parse_json(file.read())
    except FileNotFoundError as error:
        if not os.path.isdir(bundle):
            raise os_failure("read spec", path, error) from error
        return checked_id(container_id, "flag -id")
    except OSError as error:
        raise os_failure("read spec", path, error) from error
    except (ValueError, RecursionError) as error:
        raise BootstrapError(f"parse spec {path!r}: {error}") from error
    annotations = spec.get("annotations") if isinstance(spec, dict) else None
    if isinstance(annotations, dict):
        found = [keys for keys in _POD_ANNOTATIONS if annotations.get(keys[0]) is not None]
        if len(found) == 1:
            kind, name = found[0]
            group = annotations.get(name) if annotations[kind] == _IN_A_POD else None
            if isinstance(group, str) and group:
                return checked_id(group, f"annotation {name}")
    return checked_id(container_id, "flag -id")


def require(bundle: str) -> None:
    """Raises BootstrapError unless the bundle has a spec."""
    path = f"{bundle}/config.json"
    try:
        os.stat(path)
    except OSError as error:
        raise os_failure("read spec", path, error) from error


def checked_id(text: str, what: str) -> str:
    """`text` when it is an identifier by containerd's rule, and so one safe path component; else BootstrapError.

    The rule of pyshim.model.ids.checked_id, without `re`.
    """
    words = text.replace("-", ".").replace("_", ".").split(".")
    if len(text) > _MAX_ID_CHARS or not all(word.isascii() and word.isalnum() for word in words):
        raise BootstrapError(f"check {what} {text[:100]!r}: not a valid identifier")
    return text
