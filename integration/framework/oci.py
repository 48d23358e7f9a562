"""OCI specs for tests that need what `ctr run` has no option for, or that talk to a shim directly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage

Spec = dict[str, Any]

_PROCESS_TYPE = "types.containerd.io/opencontainers/runtime-spec/1/Process"
_CAPABILITIES = [
    "CAP_CHOWN",
    "CAP_FOWNER",
    "CAP_KILL",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
]
_MOUNTS = [
    ("/proc", "proc", "proc", ["nosuid", "noexec", "nodev"]),
    ("/dev", "tmpfs", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
    ("/dev/pts", "devpts", "devpts", ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]),
    ("/dev/shm", "tmpfs", "shm", ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
    ("/sys", "sysfs", "sysfs", ["nosuid", "noexec", "nodev", "ro"]),
    ("/run", "tmpfs", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
]
_DEVICES = [("c", 1, 3), ("c", 1, 5), ("c", 1, 7), ("c", 1, 8), ("c", 1, 9), ("c", 5, 0), ("c", 5, 2), ("c", 136, None)]


def spec(*args: str, name: str, rootfs: Path | str, terminal: bool = False) -> Spec:
    """A complete spec for `args` in `rootfs`, as a client would write it; tests change what they are about."""
    rules: list[dict[str, Any]] = [{"allow": False, "access": "rwm"}]
    for kind, major, minor in _DEVICES:
        rule = {"allow": True, "type": kind, "major": major, "access": "rwm"}
        rules.append(rule if minor is None else {**rule, "minor": minor})
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": terminal,
            "user": {"uid": 0, "gid": 0, "additionalGids": [0]},
            "args": list(args),
            "env": ["PATH=/bin:/sbin:/usr/bin:/usr/sbin"],
            "cwd": "/",
            "capabilities": {kind: list(_CAPABILITIES) for kind in ("bounding", "effective", "permitted")},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
            "noNewPrivileges": True,
        },
        "root": {"path": str(rootfs)},
        "mounts": [{"destination": d, "type": t, "source": s, "options": o} for d, t, s, o in _MOUNTS],
        "linux": {
            "resources": {"devices": rules},
            "cgroupsPath": f"/default/{name}",
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }


def process(*args: str) -> AnyMessage:
    """The process of an Exec that runs `args` as root."""
    described = {"args": list(args), "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0}}
    return AnyMessage(type_url=_PROCESS_TYPE, value=json.dumps(described).encode())


def write(config: Spec, directory: Path) -> Path:
    """`config` as `directory/config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path
