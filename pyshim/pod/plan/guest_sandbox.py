"""The sandbox as CreateSandbox sends it to the agent. Pure."""

from collections.abc import Mapping

from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument
from pyshim.model.guest import GuestSandbox, KernelModule, Storage
from pyshim.model.ids import GuestPath, SandboxId
from pyshim.model.oci import ContainerKind, OciSpec
from pyshim.model.units import GIB, KIB, MIB
from pyshim.model.vm import split_params
from pyshim.model.volumes import SourceFacts
from pyshim.resources.volumes.plan.share import GUEST_SANDBOX_DIR, GUEST_SHARED_DIR, SHARE_TAG

DEFAULT_SHM_BYTES = 64 * MIB
_MAX_HOSTNAME = 64
"""__NEW_UTS_LEN: what sethostname(2) takes."""
_UNNAMED_LENGTH = 12
"""Characters of the id that are the host name of a pod without one, as with docker."""
_UNITS = {"k": KIB, "K": KIB, "m": MIB, "M": MIB, "g": GIB, "G": GIB}
_MOST_DIGITS = 12
_SHARED = Storage(
    driver="virtio-fs",
    driver_options=(),
    source=SHARE_TAG,
    fs_type="virtiofs",
    options=("nodev",),
    mount_point=GUEST_SHARED_DIR,
)


def guest_sandbox(
    sandbox_id: SandboxId,
    kind: ContainerKind,
    spec: OciSpec,
    config: Config,
    sources: Mapping[str, SourceFacts],
    dns: tuple[str, ...],
    *,
    host_name: str,
) -> GuestSandbox:
    """The sandbox in the guest. `sources` has the facts of the mounts, `dns` the lines of the pod's resolv.conf.

    A pod without a host name gets `host_name`, or if that is empty the beginning of its id. Raises InvalidArgument.
    """
    return GuestSandbox(
        # kata-agent reports no OOM kill of a container whose id is the sandbox's.
        sandbox_id=f"{sandbox_id}-vm" if kind is ContainerKind.SINGLE_CONTAINER else sandbox_id,
        hostname=(spec.hostname or host_name or unnamed_host(sandbox_id))[:_MAX_HOSTNAME],
        dns=dns,
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
        guest_hook_path=config.hypervisor.guest_hook_path,
        kernel_modules=tuple(_kernel_module(text) for text in config.agent.kernel_modules),
    )


def unnamed_host(sandbox_id: SandboxId) -> str:
    """The host name of a pod whose spec has none."""
    return sandbox_id[:_UNNAMED_LENGTH]


def resolv_conf(spec: OciSpec) -> str:
    """The host's file that the spec mounts on /etc/resolv.conf; empty without one."""
    return next((m.source for m in spec.mounts if m.destination == "/etc/resolv.conf" and m.is_bind), "")


def dns_lines(text: bytes) -> tuple[str, ...]:
    """The lines that the agent writes into the guest's resolv.conf."""
    return tuple(line for line in text.decode("utf-8", "replace").splitlines() if line.strip())


def pod_sysctls(spec: OciSpec) -> Mapping[str, str]:
    """The kernel settings of the spec. `parse_spec` has checked that they are strings."""
    return dict((spec.raw.get("linux") or {}).get("sysctl") or {})


def _shm_bytes(spec: OciSpec, sources: Mapping[str, SourceFacts]) -> int:
    """The size of the tmpfs on /dev/shm in the spec, a new one or one of the host; else 64 MiB, as the kubelet."""
    for mount in spec.mounts:
        if mount.destination != "/dev/shm":
            continue
        facts = sources.get(mount.source)
        if mount.is_bind and facts is not None and facts.fs_type == "tmpfs" and facts.size_bytes:
            return facts.size_bytes
        for option in mount.options:
            name, _, value = option.partition("=")
            number, unit = (value[:-1], _UNITS[value[-1]]) if value[-1:] in _UNITS else (value, 1)
            if name == "size" and len(number) <= _MOST_DIGITS and number.isascii() and number.isdecimal():
                return int(number) * unit
    return DEFAULT_SHM_BYTES


def _kernel_module(text: str) -> KernelModule:
    words = split_params(text)
    if not words:
        raise InvalidArgument(f"read kernel_modules: {text!r} names no module")
    return KernelModule(name=words[0], parameters=words[1:])
