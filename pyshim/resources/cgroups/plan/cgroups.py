"""The host cgroups of a sandbox and the members of each: from `cgroupsPath`, the configuration and the host's version.

The sandbox cgroup is the one that `cgroupsPath` names, below the pod's cgroup, without Kata's prefix `kata_`: with the
cgroupfs driver the kubelet reads network figures from the cgroup whose name is the sandbox's id. The overhead cgroup is
Kata's `/kata_overhead/<sandbox>`. With `sandbox_cgroup_only` all processes of a sandbox are in the sandbox cgroup.
Without it the vCPUs, which run the pod's work, are there, and the other threads in the overhead cgroup:

- v1 places threads one by one, so CPU time counts in that way. v1 charges memory to the owner of an address space, so
  guest RAM counts in the overhead cgroup.
- v2 has all threads of a process in one domain, so the whole VMM with its memory is in the sandbox cgroup, and the vCPU
  threads are in a threaded cgroup below it; shim and virtiofsd are in the overhead cgroup.

Programs that serve the guest are in a cgroup with a device list, without the shim. A remote VM has no such program on
this host, so the shim is alone.

A systemd path (`slice:prefix:name`) names the scope `prefix-name.scope`. systemd makes it only with
`sandbox_cgroup_only`, since a scope exists as long as a process is in it.

A container may also name a class of cache and memory bandwidth (Intel RDT, AMD QoS, ARM MPAM), a resctrl group.
Runtimes write it into the spec: containerd and CRI-O from the pod's annotation `rdt.resources.beta.kubernetes.io/pod`,
or as an NRI plugin says.

Sources: the kernel's admin-guide/cgroup-v1/memory.rst, admin-guide/cgroup-v2.rst "Threads"; systemd.scope(5); OCI
runtime-spec, config-linux.md, "IntelRdt".
"""

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from pyshim.model.config import Config
from pyshim.model.confinement import CgroupPlan, Group, Member, Role, Scope
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import CgroupMode, HostFacts
from pyshim.model.ids import SandboxId

OVERHEAD_PARENT = "/kata_overhead"
_RELATIVE_PARENT = "/vc"
_DEFAULT_SLICE = "system.slice"
_MAX_NAME_BYTES = 255
"""NAME_MAX: an element of a path in the cgroup file systems."""
# What systemd takes as the name of a unit; systemd.unit(5).
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]+", re.ASCII)


def cgroup_plan(*, sandbox_id: SandboxId, cgroups_path: str, config: Config, host: HostFacts) -> CgroupPlan:
    """The plan. Raises InvalidArgument naming `cgroupsPath` when it has none of the field's forms."""
    path, scope = sandbox_cgroup(cgroups_path, sandbox_id)
    only = config.runtime.sandbox_cgroup_only
    notes: list[str] = []
    if host.cgroup_mode is CgroupMode.NONE:
        return CgroupPlan(
            mode=host.cgroup_mode, groups=(), members={}, scope=None, notes=("this host has no cgroups mounted",)
        )
    if scope is not None and not (host.systemd and only):
        why = "sandbox_cgroup_only is false" if host.systemd else "systemd does not run"
        notes.append(f"no systemd unit, only the directory of '{scope.unit}': {why}")
        scope = None
    v2 = host.cgroup_mode is CgroupMode.V2
    groups = [Group(role=Role.SANDBOX, path=path)]
    if not only:
        groups.append(Group(role=Role.OVERHEAD, path=f"{OVERHEAD_PARENT}/{sandbox_id}"))
        if not v2:
            notes.append("cgroup v1 charges memory to whole processes: guest RAM counts in the overhead cgroup")
    holder = groups[-1]
    members = dict.fromkeys(Member, holder.role)
    if v2 and not config.is_remote:
        groups.append(Group(role=Role.DEVICES, path=f"{holder.path}/vmm", threaded=True))
        groups.append(Group(role=Role.VCPUS, path=f"{path}/vcpus", threaded=True))
        members |= {Member.VMM: Role.SANDBOX, Member.VCPUS: Role.VCPUS}
    elif not config.is_remote:
        groups.append(Group(role=Role.DEVICES, path=f"{holder.path}/vmm", controllers=("devices",)))
        members[Member.VCPUS] = Role.SANDBOX
    return CgroupPlan(mode=host.cgroup_mode, groups=tuple(groups), members=members, scope=scope, notes=tuple(notes))


def sandbox_cgroup(cgroups_path: str, sandbox_id: str) -> tuple[str, Scope | None]:
    """The sandbox's own cgroup from the root of a hierarchy, and the systemd unit when the path has that form.

    A path, absolute or not (then below /vc), or `slice:prefix:name`. Raises InvalidArgument.
    """
    if ":" in cgroups_path and not cgroups_path.startswith("/"):
        return _scope(cgroups_path)
    if not cgroups_path:
        return f"{_RELATIVE_PARENT}/{sandbox_id}", None
    absolute = cgroups_path.startswith("/")
    # Normalised as an absolute path: no `..` leads out of the hierarchy.
    path = posixpath.normpath("/" + cgroups_path.lstrip("/"))
    if path == "/":
        raise _wrong(cgroups_path, "it names the root of the hierarchy")
    if not absolute:
        path = _RELATIVE_PARENT + path
    if "\n" in path:
        raise _wrong(cgroups_path, "a cgroup's name has no line breaks")
    if any(len(element.encode()) > _MAX_NAME_BYTES for element in path.split("/")):
        raise _wrong(cgroups_path, f"an element of it is longer than {_MAX_NAME_BYTES} bytes")
    return path, None


def parent_cgroup(cgroups_path: str) -> str:
    """The cgroup above a sandbox's own, from the root of a hierarchy: a pod's. Raises InvalidArgument."""
    return posixpath.dirname(sandbox_cgroup(cgroups_path, "any")[0])


def _scope(cgroups_path: str) -> tuple[str, Scope]:
    parts = cgroups_path.split(":")
    if len(parts) != 3 or not all(parts[1:]):
        raise _wrong(cgroups_path, "it is neither a path nor slice:prefix:name")
    slice_name, prefix, name = parts[0] or _DEFAULT_SLICE, parts[1], parts[2]
    unit = f"{prefix}-{name}.scope"
    if not _is_slice(slice_name):
        raise _wrong(cgroups_path, f"{slice_name!r} is not a slice name")
    if not _UNIT.fullmatch(unit) or len(unit) > _MAX_NAME_BYTES:
        raise _wrong(cgroups_path, f"{unit!r} is not a unit name")
    path = f"{slice_directory(slice_name)}/{unit}"
    return path, Scope(unit=unit, slice=slice_name, description=f"virtual machine of {name}")


def _is_slice(name: str) -> bool:
    if name == "-.slice":
        return True
    stem = name.removesuffix(".slice")
    return stem != name and _UNIT.fullmatch(stem) is not None and ":" not in stem and all(stem.split("-"))


def slice_directory(name: str) -> str:
    """`/a.slice/a-b.slice` for `a-b.slice`, empty for the root slice. Source: systemd.slice(5)."""
    if name == "-.slice":
        return ""
    words = name.removesuffix(".slice").split("-")
    return "".join("/" + "-".join(words[: count + 1]) + ".slice" for count in range(len(words)))


def _wrong(cgroups_path: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"read spec: linux.cgroupsPath {cgroups_path[:300]!r}: {why}")


ROOT_CLASS = "/"
"""The group that every process begins in."""
_ROOT_CLASSES = (ROOT_CLASS, "system/default")
"""Its names: OCI's, and that of goresctrl, which containerd and CRI-O read annotations with."""


def rdt_class(linux: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The class in a spec's `linux`, empty for none, and the names of its other members, which a VM ignores.

    Raises InvalidArgument for an invalid name.
    """
    wanted = linux.get("intelRdt")
    if wanted is None:
        return "", ()
    if not isinstance(wanted, Mapping):
        raise InvalidArgument(f"read linux.intelRdt: not an object: {str(wanted)[:100]!r}")
    name = wanted.get("closID") or ""
    if not isinstance(name, str):
        raise InvalidArgument(f"read linux.intelRdt.closID: not a name: {str(name)[:100]!r}")
    if name in _ROOT_CLASSES:
        name = ROOT_CLASS
    elif name in (".", "..") or "/" in name or not name.isprintable():
        raise InvalidArgument(f"read linux.intelRdt.closID: {name[:100]!r} is not a directory name")
    return name, tuple(sorted(key for key, value in wanted.items() if value and key != "closID"))
