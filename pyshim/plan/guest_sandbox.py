"""What the guest's agent is told of a sandbox, before there is any container in it. Pure."""

import re
from collections.abc import Mapping

from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument
from pyshim.model.guest import GuestSandbox, KernelModule, Storage
from pyshim.model.ids import GuestPath, SandboxId
from pyshim.model.kernel_line import split_params
from pyshim.model.oci import OciSpec
from pyshim.model.volumes import SourceFacts
from pyshim.plan.share import GUEST_SANDBOX_DIR, GUEST_SHARED_DIR, SHARE_TAG

DEFAULT_SHM_BYTES = 64 * 1024 * 1024
_MAX_HOSTNAME = 64
"""__NEW_UTS_LEN: what sethostname(2) takes."""
_UNNAMED_LENGTH = 12
"""A host name must not be empty: without one it is the head of the id, as docker has it."""
_SHARED = Storage(
    driver="virtio-fs",
    driver_options=(),
    source=SHARE_TAG,
    fs_type="virtiofs",
    options=("nodev",),
    mount_point=GUEST_SHARED_DIR,
)


def guest_sandbox(
    sandbox_id: SandboxId, spec: OciSpec, config: Config, sources: Mapping[str, SourceFacts]
) -> GuestSandbox:
    """The sandbox in the guest; `sources` has the facts of the mounts. Raises InvalidArgument."""
    return GuestSandbox(
        sandbox_id=sandbox_id,
        hostname=(spec.hostname or sandbox_id[:_UNNAMED_LENGTH])[:_MAX_HOSTNAME],
        dns=(),
        storages=(
            *((_SHARED,) if config.hypervisor.shared_fs != "none" else ()),
            Storage(
                driver="ephemeral",
                driver_options=(),
                source="shm",
                fs_type="tmpfs",
                options=("noexec", "nosuid", "nodev", "mode=1777", f"size={_shm_bytes(spec, sources)}"),
                mount_point=GuestPath(f"{GUEST_SANDBOX_DIR}/shm"),
            ),
        ),
        shared_pid_namespace=False,
        guest_hook_path="",
        kernel_modules=tuple(_kernel_module(text) for text in config.agent.kernel_modules),
    )


def pod_sysctls(spec: OciSpec) -> Mapping[str, str]:
    """Kernel settings the spec asks for. Raises InvalidArgument."""
    found = (spec.raw.get("linux") or {}).get("sysctl") or {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise InvalidArgument("read spec: linux.sysctl is not an object of strings")
    return dict(found)


def _shm_bytes(spec: OciSpec, sources: Mapping[str, SourceFacts]) -> int:
    """The size of the tmpfs the spec has on /dev/shm, its own or one of the host's; else 64 MiB (the kubelet's)."""
    for mount in spec.mounts:
        if mount.destination != "/dev/shm":
            continue
        facts = sources.get(mount.source)
        if mount.is_bind and facts is not None and facts.fs_type == "tmpfs" and facts.size_bytes:
            return facts.size_bytes
        for option in mount.options:
            name, _, value = option.partition("=")
            if name == "size" and re.fullmatch(r"[0-9]{1,12}[kKmMgG]?", value):
                return _with_unit(value)
    return DEFAULT_SHM_BYTES


def _with_unit(text: str) -> int:
    units = {"k": 1024, "m": 1024**2, "g": 1024**3}
    unit = units.get(text[-1].lower())
    return int(text[:-1]) * unit if unit else int(text)


def _kernel_module(text: str) -> KernelModule:
    words = split_params(text)
    if not words:
        raise InvalidArgument(f"read kernel_modules: {text!r} names no module")
    return KernelModule(name=words[0], parameters=words[1:])
