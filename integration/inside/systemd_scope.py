"""A real systemd, and the real host code that asks it for a scope: `python systemd_scope.py PROJECT PACKAGES RESULT`.

As pid 1 of a container it becomes systemd, in a cgroup namespace of its own; that starts this program again as a
service, which writes what it saw to RESULT.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

_NEW_CGROUP_NAMESPACE = 0x2000000
_UNITS = {
    "dbus.socket": "[Unit]\nDefaultDependencies=no\n[Socket]\nListenStream=/run/dbus/system_bus_socket\n",
    "dbus.service": (
        "[Unit]\nDefaultDependencies=no\nRequires=dbus.socket\n[Service]\nType=notify\nNotifyAccess=main\n"
        "ExecStart=/usr/bin/dbus-daemon --system --address=systemd: --nofork --nopidfile --syslog-only\n"
    ),
    "probe.service": (
        "[Unit]\nDefaultDependencies=no\nRequires=dbus.service\nAfter=dbus.service\nSuccessAction=exit\n"
        "FailureAction=exit\n[Service]\nType=oneshot\nExecStart={command}\n"
    ),
}
_PROPERTIES = ("Slice", "Delegate", "ControlGroup", "DevicePolicy", "DeviceAllow", "MemoryAccounting", "Description")
_PATH = "kubepods-pod1.slice:cri-containerd:c1"
_UNIT = "cri-containerd-c1.scope"


def become_systemd() -> None:
    from integration.inside.cgroups_v2 import ROOT, mount

    mount("cgroup2", str(ROOT), "cgroup2")
    own = ROOT / "systemd"
    own.mkdir()
    (own / "cgroup.procs").write_text(str(os.getpid()))
    (ROOT / "cgroup.subtree_control").write_text("+cpu +cpuset +io +memory +pids")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_CGROUP_NAMESPACE) != 0 or libc.umount2(str(ROOT).encode(), 0) != 0:
        raise OSError(ctypes.get_errno(), "enter a cgroup namespace")
    mount("cgroup2", str(ROOT), "cgroup2")
    command = " ".join([sys.executable, "-I", *sys.argv])
    units = Path("/etc/systemd/system")
    units.mkdir(parents=True)
    for name, text in _UNITS.items():
        (units / name).write_text(text.format(command=command))
    Path("/etc/passwd").write_text("root:x:0:0::/:/bin/sh\nmessagebus:x:100:100::/:/bin/false\n")
    Path("/etc/group").write_text("root:x:0:\nmessagebus:x:100:\n")
    Path("/run/dbus").mkdir(exist_ok=True)
    os.environ["container"] = "oci"  # noqa: SIM112 - systemd's own spelling
    os.execv("/usr/lib/systemd/systemd", ["systemd", "--system", "--unit=probe.service", "--log-target=console"])


def shown(unit: str) -> dict[str, str]:
    done = subprocess.run(["systemctl", "show", unit], capture_output=True, text=True, check=True)
    lines = [line.partition("=")[::2] for line in done.stdout.splitlines()]
    wanted = (*_PROPERTIES, "ActiveState")
    return {name: ", ".join(value for key, value in lines if key == name) for name in wanted}


async def scope() -> dict[str, object]:
    from integration.inside.cgroups_v2 import places, read, running, sandbox, where

    found: dict[str, object] = {"shim before": where(os.getpid())}
    async with running(_PATH, systemd=True, sandbox_cgroup_only=True, sandbox_cgroup_limits=True) as (cgroups, vmm):
        found["unit"] = shown(_UNIT)
        found |= places(vmm)
        found["cpu.max"] = read(f"{cgroups._plan.groups[0].path}/cpu.max")
        second = sandbox(_PATH, systemd=True, sandbox_cgroup_only=True)
        try:
            await second._host.start_scope(second._plan.scope)
        except Exception as exc:
            found["twice"] = str(exc)
    found["shim after"] = where(os.getpid())
    found["after"] = state_once_ended()
    found["left"] = read(f"{cgroups._plan.groups[0].path}/cgroup.procs")
    return found


def state_once_ended() -> str:
    """systemd hears of an empty cgroup a moment later."""
    deadline = time.monotonic() + 60
    while (state := shown(_UNIT)["ActiveState"]) != "inactive" and time.monotonic() < deadline:
        time.sleep(0.2)
    return state


def main() -> int:
    project, packages, result = sys.argv[1:4]
    sys.path.insert(0, project)
    sys.path.append(packages)
    try:
        if os.getpid() == 1:
            become_systemd()
        Path(result).write_text(json.dumps(asyncio.run(scope())))
    except Exception:
        Path(result).write_text(traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
