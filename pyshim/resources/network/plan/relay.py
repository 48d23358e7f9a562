"""Containers of the shim's own in the guest: one program, no images, no rights. Pure.

One carries forwarded connections and DNS queries, another holds the pid namespace of a pod that shares its processes
and has no pause container.

The program is `guest/relay/relay.c`, built by the set-up; the shim copies it into the share.

Like every container of the pod it lives in the guest's one network namespace, so its loopback is theirs. It is made
through the calls any kata-agent answers, with the first connection.
"""

import msgspec

import pyshim
from pyshim.model.guest import GuestContainer
from pyshim.model.ids import HostPath, SandboxId
from pyshim.model.plans import SharePlan
from pyshim.resources.volumes.plan.share import GUEST_SHARED_DIR

BUILT_PROGRAM = HostPath(f"{pyshim.__file__.rsplit('/', 2)[0]}/.build/guest/relay")
MAX_PROGRAM_BYTES = 16 << 20
"""A static program of some 40 lines has 0.7 MiB with glibc."""
_PROGRAM = "/relay"
_NOBODY = 65534


class RelayPlan(msgspec.Struct, frozen=True, kw_only=True):
    directories: tuple[HostPath, ...]
    """To be made in order, in the share; they go with it."""
    program_path: HostPath
    """To be made in the share, a copy of BUILT_PROGRAM."""
    guest: GuestContainer


def relay_plan(sandbox_id: SandboxId, share: SharePlan) -> RelayPlan:
    """The container whose further processes carry connections and queries."""
    return _plan(f"{sandbox_id}-relay", share, ("mount", "ipc", "uts"))


def process_holder(sandbox_id: SandboxId, share: SharePlan) -> RelayPlan:
    """The container whose only process is the first of a pid namespace, and reaps those that lose their parent."""
    return _plan(f"{sandbox_id}-processes", share, ("mount", "ipc", "uts", "pid"))


def _plan(container_id: str, share: SharePlan, namespaces: tuple[str, ...]) -> RelayPlan:
    home = f"{share.mounts_dir}/{container_id}"
    root = f"{home}/rootfs"
    return RelayPlan(
        # The guest sees the share read-only, so what its runtime mounts on must be there.
        directories=tuple(map(HostPath, (home, root, f"{root}/proc", f"{root}/dev"))),
        program_path=HostPath(f"{root}{_PROGRAM}"),
        guest=GuestContainer(
            container_id=container_id,
            spec={
                "ociVersion": "1.0.2",
                "root": {"path": f"{GUEST_SHARED_DIR}/{container_id}/rootfs", "readonly": True},
                "process": relay_process(),
                "mounts": [
                    {
                        "destination": "/proc",
                        "type": "proc",
                        "source": "proc",
                        "options": ["nosuid", "noexec", "nodev"],
                    },
                    {
                        "destination": "/dev",
                        "type": "tmpfs",
                        "source": "tmpfs",
                        "options": ["nosuid", "strictatime", "mode=755", "size=64k"],
                    },
                ],
                "linux": {
                    "cgroupsPath": f"/{container_id}",
                    "namespaces": [{"type": kind} for kind in namespaces],
                    "resources": {},
                },
            },
            storages=(),
            devices=(),
            shared_pid_namespace=False,
        ),
    )


def relay_process(*arguments: str, capabilities: tuple[str, ...] = ()) -> dict[str, object]:
    """The `process` of an OCI spec: the relay with arguments, or without any, which keeps its container running."""
    sets = ("bounding", "effective", "permitted", "inheritable", "ambient") if capabilities else ()
    return {
        "terminal": False,
        "user": {"uid": _NOBODY, "gid": _NOBODY},
        "args": [_PROGRAM, *arguments],
        "env": [],
        "cwd": "/",
        "capabilities": {name: list(capabilities) for name in sets},
        "noNewPrivileges": True,
    }


def connection_process(port: int) -> dict[str, object]:
    """It carries one connection to the port of the guest's loopback."""
    return relay_process(str(port))


def resolver_process(address: str) -> dict[str, object]:
    """It takes the guest's DNS queries at that address."""
    return relay_process("resolve", address, capabilities=("CAP_NET_BIND_SERVICE",))
