"""The host's state, which a test must leave as it found it: processes, mounts, links, namespaces, cgroups, sockets,
loop devices, files.

Because the run has its own namespaces, everything seen is the run's own: no list of names to look for, anything extra
is a leak.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from . import processes
from .waiting import PATIENCE_S, eventually

_OWNED = ("/run", "/tmp", "/dev/shm")
# Directories that containerd, runc or a shim make once and keep, as a node does between pods. Files in them are never
# excused, but for what the node's shims know of its virtiofsd, and the zygote's lock.
_FURNITURE = frozenset(
    {
        "/run/containerd/runc",
        "/run/containerd/runc/default",
        "/run/containerd/runc/k8s.io",
        "/run/containerd/s",
        "/run/containerd/io.containerd.runtime.v2.task/default",
        "/run/kata-containers",
        "/run/kata-containers/shared",
        "/run/kata-containers/shared/sandboxes",
        "/run/vc",
        "/run/vc/sbs",
        "/run/vc/vm",
        "/run/mount",
        "/run/netns",
        "/run/pyshim",
        "/run/pyshim/metrics",
        "/run/pyshim/sandboxes",
        "/run/pyshim/sockets",
        "/run/pyshim/virtiofsd",
    }
)
_CONSOLE = "console.log"
_KEPT = re.compile("/run/pyshim/(zygote-[0-9a-f]+\\.lock|virtiofsd/[0-9-]+)")
# Whatever the shim does: a `ctr` that detaches or is killed leaves its FIFOs, conmon a link for each of its containers.
_OF_OTHERS = ("/run/containerd/fifo", "/run/crio/attach")
# The parents of `/<namespace>/<id>` and `/kata_overhead/<id>`: made by the first container, shared by all later ones.
_FURNITURE_CGROUPS = frozenset({"default", "k8s.io", "kata_overhead", "vc"})
_LISTENING = 0x10000
_KUBELETS = "/var/lib/kubelet/"
"""A kubelet that was restarted has some of its own sockets under new names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """One look at the enclosure. Every field is a multiset of printable things."""

    processes: Counter[str]
    mounts: Counter[str]
    links: Counter[str]
    namespaces: Counter[str]
    cgroups: Counter[str]
    listening_sockets: Counter[str]
    loop_devices: Counter[str]
    files: Counter[str]

    @classmethod
    def look(cls, ignore_below: tuple[Path, ...] = ()) -> HostState:
        return cls(
            processes=Counter(_processes()),
            mounts=Counter(_mounts()),
            links=Counter(_links()),
            namespaces=Counter(_network_namespaces()),
            cgroups=Counter(_cgroups()),
            listening_sockets=Counter(_listening_sockets()),
            loop_devices=Counter(_loop_devices()),
            # Twice: a directory's list may lack a file that is being replaced, as the state of a pod is.
            files=Counter({path for _ in range(2) for path in _files(tuple(map(str, ignore_below)))}),
        )

    def left_over(self, now: HostState) -> list[str]:
        """What `now` has more of than this state, one line per thing."""
        found = []
        for field in fields(self):
            before: Counter[str] = getattr(self, field.name)
            after: Counter[str] = getattr(now, field.name)
            found += [f"{field.name}: {thing}" for thing in sorted((after - before).elements())]
        return found


def assert_nothing_left(before: HostState, ignore_below: tuple[Path, ...] = (), within_s: float = PATIENCE_S) -> None:
    """Nothing more is there than `before`, at the latest after `within_s` (a shim may still be ending when `ctr`
    returns).
    """
    left: list[str] = []

    def look() -> bool:
        left[:] = before.left_over(HostState.look(ignore_below))
        return not left

    eventually(
        look, what=lambda: "the host is as it was; left over:\n  " + "\n  ".join(left), within_s=within_s, every_s=0.1
    )


def _processes() -> Iterator[str]:
    for process in processes.running():
        # Children of this very process that come and go (ip, ctr) are the framework's, and zombies of init's are
        # being reaped. A bare node's containerd is another process after an installation.
        if process.state not in "ZX" and process.parent != os.getpid() and process.command[:1] != ("containerd",):
            yield str(process)


def _mounts() -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        if left.split()[4] != "/run/netns":  # `ip netns add` makes the directory a mount of its own, once
            yield f"{left.split()[4]} ({right.split()[0]})"


def _links() -> Iterator[str]:
    shown = subprocess.run(["ip", "-json", "link", "show"], check=True, capture_output=True).stdout
    for link in json.loads(shown):
        yield link["ifname"]


def _network_namespaces() -> Iterator[str]:
    """Network namespaces some process lives in. Named ones are files in /run/netns and mounts as well."""
    seen = set()
    for process in processes.running():
        try:
            seen.add(os.readlink(f"/proc/{process.pid}/ns/net"))
        except OSError:
            continue
    yield from seen


def cgroup_roots() -> Iterator[tuple[str, Path]]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        if right.split()[0] in ("cgroup", "cgroup2"):
            mount_point = Path(left.split()[4])
            yield mount_point.name, mount_point


def _cgroups() -> Iterator[str]:
    seen = set()
    for name, root in cgroup_roots():
        for directory, _, _ in os.walk(root):
            inside = os.path.relpath(directory, root)
            if inside not in (".", "runner") and inside not in _FURNITURE_CGROUPS:
                seen.add(f"{name}:/{inside}")
    yield from seen


def _listening_sockets() -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        name = words[7] if len(words) > 7 else "(unnamed)"
        if int(words[3], 16) & _LISTENING and not name.startswith(_KUBELETS):
            yield name


def _loop_devices() -> Iterator[str]:
    """Loop devices are the whole machine's: those on some other run's private tmpfs are not ours to count."""
    shown = subprocess.run(
        ["losetup", "--json", "--list", "--output", "NAME,BACK-FILE,BACK-MAJ:MIN"], check=True, capture_output=True
    )
    ours = {os.stat(top).st_dev for top in _OWNED}
    for device in json.loads(shown.stdout or b'{"loopdevices": []}')["loopdevices"]:
        if device["back-maj:min"] is None:
            continue  # it was detached between the listing and the look at it
        major, minor = map(int, device["back-maj:min"].split(":"))
        if major != 0 or os.makedev(major, minor) in ours:
            yield f"{device['name']} {device['back-file']}"


def _files(ignored: tuple[str, ...]) -> Iterator[str]:
    mount_points = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    for top in _OWNED:
        for directory, names, files in os.walk(top):
            if directory in _OF_OTHERS or (ignored and directory.startswith(ignored)):
                names.clear()
                continue
            # A pod's mounted tree shows in the mounts; what lies inside it is not a file of the host.
            names[:] = [n for n in names if os.path.join(directory, n) not in mount_points]
            if directory not in _OWNED and directory not in _FURNITURE:
                yield directory + "/"
            if _CONSOLE in files:  # its predecessor comes with time, and goes with it
                files = [name for name in files if name != f"{_CONSOLE}.1"]
            paths = (os.path.join(directory, name) for name in files)
            yield from (path for path in paths if path not in _FURNITURE and not _KEPT.fullmatch(path))
