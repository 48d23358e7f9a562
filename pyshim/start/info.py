"""`-info` and `-v`: the runtime's version and features, which containerd asks for before any container exists."""

import os
import sys

import pyshim
from pyshim.start.dialect import OWN_MOUNT_TRANSFORMS, OWN_MOUNT_TYPES
from pyshim.start.wire import encode

RUNTIME = "io.containerd.pykata.v2"
BINARY = "containerd-shim-pykata-v2"
_FEATURES_URL = "types.containerd.io/opencontainers/runtime-spec/1/features/Features"
# The runtime-spec versions whose configurations are understood, and the words of bind mounts. containerd offers a pod
# recursive read-only mounts where `rro` is listed. Idmapped mounts are not listed: containerd would turn them on.
_FEATURES_JSON = (
    '{"ociVersionMin":"1.0.0","ociVersionMax":"1.1.0","mountOptions":["bind","private","rbind","ro","rprivate","rro",'
    '"rshared","rslave","rw","shared","slave"]}'
)
# containerd 2.2 and 2.3 read here what later releases find in the answer of `start`.
_OWN_MOUNTS = ",".join((*(f"{name}/*" for name in OWN_MOUNT_TRANSFORMS), *OWN_MOUNT_TYPES))
_SERVICES = "containerd.task.v2.Task,containerd.task.v3.Task,containerd.runtime.sandbox.v1.Sandbox"


def runtime_info() -> bytes:
    """`containerd.types.RuntimeInfo`; its annotations are the services of a shim's socket and the shim's own mounts."""
    features = encode((1, _FEATURES_URL), (2, _FEATURES_JSON))
    services = encode((1, f"{RUNTIME}/services"), (2, _SERVICES))
    mounts = encode((1, "containerd.io/runtime-allow-mounts"), (2, _OWN_MOUNTS))
    return encode((1, RUNTIME), (2, encode((1, pyshim.__version__))), (4, features), (5, services), (5, mounts))


def version_text() -> str:
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{BINARY}:\n  Version:  {pyshim.__version__}\n  Python:   {python}\n"


def print_runtime_info() -> int:
    os.write(1, runtime_info())
    return 0


def print_version() -> int:
    os.write(1, version_text().encode())
    return 0
