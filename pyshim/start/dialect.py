"""The two ways containerd talks to `start`: the legacy one (1.6 to 2.2) and the bootstrap protocol (2.3 and later).

Legacy: stdin holds the runtime options, one serialized `google.protobuf.Any`, or nothing; the answer is the bare
address. Bootstrap: stdin holds `containerd.runtime.bootstrap.v1.BootstrapParams`, the answer is its `BootstrapResult`.
The flags are the same in both. A legacy Any can parse as BootstrapParams (its type URL is then the instance id), so
the parameters count only if they repeat the id and the namespace of the command line.

The answer names the Task API that containerd is to use. `serve` offers versions 2 and 3 on the same socket. A caller of
the bootstrap protocol gets 3, as every release that speaks it (2.3 and later) takes 3. Version 3 also means that one
shim serves all tasks of a pod: containerd then calls neither `start` nor `delete` for the containers of a pod, only for
its sandbox. A legacy caller gets the bare address, which every release takes for version 2: 1.6 and 1.7 know no other,
and 2.0 to 2.2 look like 1.7.

`-info` and `-v` answer with the runtime's version and features, which containerd asks for before any container exists.
"""

import os
import sys

import pyshim
from pyshim.start.invocation import Invocation
from pyshim.start.wire import WireError, decode, encode, signed

TASK_API_VERSION = 3
"""For callers of the bootstrap protocol."""
OWN_MOUNT_TYPES = ("erofs",)
OWN_MOUNT_TRANSFORMS = ("mkdir", "format")
"""What of a root file system's mounts containerd leaves to the shim, which makes disks of EROFS layers. The file for
writes is not among them (`mkfs`): containerd makes it."""
_MOUNT_CAPABILITIES = "containerd.types.MountCapabilities"
_LOG_LEVEL_DEBUG = -4
_RUNC_OPTIONS = "containerd.runc.v1.Options"
_RUNTIME_OPTIONS = "runtimeoptions.v1.Options"


class StartParams:
    """The part of a call that stdin holds; fields that are absent there are empty."""

    __slots__ = ("bootstrap", "config_body", "config_path", "debug", "shim_cgroup", "socket_dir", "ttrpc_address")

    def __init__(self) -> None:
        self.bootstrap = False
        """The answer is a BootstrapResult, not the bare address."""
        self.debug = False
        self.config_path = ""
        """The runtime handler's configuration file."""
        self.config_body = b""
        """The configuration itself, where the handler names no file."""
        self.ttrpc_address = ""
        self.socket_dir = ""
        self.shim_cgroup = ""
        """A cgroup below the hierarchy's root that the daemon has to join."""

    def answer(self, address: str) -> bytes:
        """The exact bytes for stdout."""
        if not self.bootstrap:
            return address.encode()
        mounts = encode(*((1, name) for name in OWN_MOUNT_TYPES), *((2, name) for name in OWN_MOUNT_TRANSFORMS))
        extension = encode((1, encode((1, _MOUNT_CAPABILITIES), (2, mounts))))
        return encode((1, TASK_API_VERSION), (2, address), (3, "ttrpc"), (6, extension))


def params_of(stdin: bytes, call: Invocation) -> StartParams:
    """The parameters in `stdin` of `call`. Bytes of neither dialect count as options that `start` does not use."""
    params = StartParams()
    if not stdin:
        return params
    try:
        fields = decode(stdin)
    except WireError:
        return params
    if not _are_params_of(fields, call):
        _read_options(fields, params)
        return params
    params.bootstrap = True
    params.debug = any(number == 3 and isinstance(v, int) and signed(v) <= _LOG_LEVEL_DEBUG for number, v in fields)
    params.ttrpc_address = _text(fields, 5)
    params.socket_dir = _text(fields, 9)
    for number, extension in fields:
        if number == 8 and isinstance(extension, bytes):
            _read_extension(extension, params)
    return params


def _are_params_of(fields: list[tuple[int, int | bytes]], call: Invocation) -> bool:
    return bool(call.id) and _text(fields, 1) == call.id and _text(fields, 2) == call.namespace


def _text(fields: list[tuple[int, int | bytes]], wanted: int) -> str:
    """The last string of field `wanted`, as protobuf merges repeats; empty when absent or not UTF-8."""
    found = ""
    for number, value in fields:
        if number == wanted and isinstance(value, bytes):
            try:
                found = value.decode()
            except UnicodeDecodeError:
                return ""
    return found


def _read_extension(extension: bytes, params: StartParams) -> None:
    try:
        for number, value in decode(extension):
            if number == 1 and isinstance(value, bytes):
                _read_options(decode(value), params)
    except WireError:
        return


def _read_options(any_fields: list[tuple[int, int | bytes]], params: StartParams) -> None:
    """Reads from an Any what `start` uses: `shim_cgroup` of runc's options, and the configuration of ours."""
    name = _text(any_fields, 1).rpartition("/")[2]
    try:
        for number, value in any_fields:
            if number != 2 or not isinstance(value, bytes):
                continue
            options = decode(value)
            if name == _RUNC_OPTIONS:
                params.shim_cgroup = _text(options, 3)
            elif name == _RUNTIME_OPTIONS:
                params.config_path = _text(options, 2)
                params.config_body = next((body for n, body in options if n == 3 and isinstance(body, bytes)), b"")
    except WireError:
        return


RUNTIME = "io.containerd.pykata.v2"
BINARY = "containerd-shim-pykata-v2"
_FEATURES_URL = "types.containerd.io/opencontainers/runtime-spec/1/features/Features"
# The runtime-spec versions whose configurations are understood, and the words of bind mounts. containerd offers a pod
# recursive read-only mounts where `rro` is listed. Idmapped mounts are not listed: containerd would turn them on.
_FEATURES_JSON = (
    '{"ociVersionMin":"1.0.0","ociVersionMax":"1.3.0","mountOptions":["bind","private","rbind","ro","rprivate","rro",'
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
