"""Translates the API's spec message to the config.json that crun reads. Pure, but for the names of users.

Source of names and shapes: opencontainers/runtime-spec config.md, config-linux.md. The API's scalars have no presence:
zero means "not given" where the runtime spec has an optional value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from protos.agent import oci_pb2 as pb
from protos.agent.agent_pb2 import StringUser
from protos.agent.oci_pb2 import User

from guest.agent.errors import InvalidArgument
from guest.agent.files import opened
from guest.agent.syscalls import open_beneath

Json: TypeAlias = dict[str, Any]

# The version of every config.json, which the guest's crun supports: crun 1.8 (Debian 12) refuses 1.2.0, which
# containerd 2.0 sends, and later ones. All that this agent writes is in the specification since 1.0.2.
OCI_VERSION = "1.0.2"
_MAX_ID_BYTES = 1024
_NAMESPACES_OF_THE_POD = ("network", "uts", "ipc")
_NOT_CRUNS = ("apparmorProfile", "selinuxLabel", "noStdin")
_OF_LINUX = ("uidMappings", "gidMappings", "devices", "seccomp", "rootfsPropagation", "maskedPaths", "readonlyPaths")
_LIMITS = {
    "memory": ("limit", "reservation", "swap"),
    "cpu": ("shares", "quota", "period", "cpus", "mems"),
    "pids": ("limit",),
    "blockIO": (
        *("weight", "weightDevice", "throttleReadBpsDevice", "throttleWriteBpsDevice"),
        *("throttleReadIOPSDevice", "throttleWriteIOPSDevice"),
    ),
}
_NUMBERS = (
    *(FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64),
    *(FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64),
)
_HOOK_KINDS = ("prestart", "poststart", "poststop", "createRuntime", "createContainer", "startContainer")


def check_id(value: str, what: str) -> str:
    """`value`, if it may be a file name: letters, digits, `_.-`, a letter or digit first. Else InvalidArgument."""
    plain = value.replace("_", "").replace(".", "").replace("-", "")
    if not (value and len(value) <= _MAX_ID_BYTES and value.isascii() and plain.isalnum() and value[0].isalnum()):
        raise InvalidArgument(
            f"{what} {value[:80]!r}: must be letters, digits, '_', '.' or '-', and begin with a letter or digit"
        )
    return value


def check_spec(spec: pb.Spec, cid: str) -> None:
    """InvalidArgument names a part that is missing or malformed."""
    for field, inside in (("Process", "process"), ("Root", "root"), ("Linux", "linux")):
        if not spec.HasField(field):
            raise InvalidArgument(f"create container {cid!r}: spec has no {inside}")
    if not spec.Root.Path.startswith("/"):
        raise InvalidArgument(f"create container {cid!r}: root path {spec.Root.Path!r} is not absolute")
    check_process(spec.Process, f"create container {cid!r}")
    for mount in spec.Mounts:
        if not mount.destination.startswith("/"):
            raise InvalidArgument(f"create container {cid!r}: mount destination {mount.destination!r} is not absolute")
    for device in spec.Linux.Devices:
        if device.Type not in ("c", "b", "u", "p"):
            raise InvalidArgument(
                f"create container {cid!r}: device {device.Path!r} has type {device.Type!r}, want c, b, u or p"
            )


def check_process(process: pb.Process, doing: str) -> None:
    if not process.Args:
        raise InvalidArgument(f"{doing}: process has no args")
    for name, words in (("args", process.Args), ("env", process.Env), ("cwd", [process.Cwd])):
        if any("\0" in word for word in words):
            raise InvalidArgument(f"{doing}: NUL byte in process {name}")


class Node(NamedTuple):
    """A device node's numbers: `kind` is `b` or `c`."""

    kind: str
    major: int
    minor: int


_TUN = Node("c", 10, 200)
_OF_PRIVILEGED = frozenset({"CAP_SYS_ADMIN", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_MKNOD"})
"""Of these capabilities a container has at most the last one, unless it is privileged."""


class GuestFacts(NamedTuple):
    """The guest's CPUs and huge pages, to which a host's limits are reduced."""

    online_cpus: str
    page_sizes: frozenset[str]
    """Of huge pages, as cgroups name them: `2MB`, `1GB`."""


def oci_config(
    spec: pb.Spec,
    *,
    rootfs: str,
    cgroup: str,
    pid_namespace: str,
    hooks: Mapping[str, Iterable[pb.Hook]],
    guest: GuestFacts,
    nodes: Iterable[Node] = (),
    limits_devices: bool,
) -> Json:
    """config.json of a container.

    `rootfs` and `cgroup` replace the spec's paths. `pid_namespace` is the path of the one to join, "" for a new one;
    network, UTS and IPC namespaces are crun's own. `hooks` are the guest's own, after the spec's. `nodes` are the
    devices that its mounts show it. `limits_devices`: device rules can be enforced.
    """
    linux = _linux(spec.Linux, cgroup, pid_namespace)
    resources = linux["resources"] = oci_resources(spec.Linux.Resources, guest)
    if limits_devices:
        resources["devices"] = _device_rules(spec, nodes)
    config: Json = {
        "ociVersion": OCI_VERSION,
        "process": oci_process(spec.Process),
        "root": {"path": rootfs, "readonly": spec.Root.Readonly},
        "mounts": [_object(mount) for mount in spec.Mounts],
        # These change what crun does; a pod's author must not set them.
        "annotations": {key: value for key, value in spec.Annotations.items() if not key.startswith("run.oci.")},
        "linux": linux,
    }
    if all_hooks := _hooks(spec.Hooks, hooks):
        config["hooks"] = all_hooks
    return config


def oci_process(process: pb.Process) -> Json:
    """The process object, of config.json and of `crun exec --process`."""
    # AppArmor profiles and SELinux labels are the host's: the guest has no such policy loaded and crun would
    # refuse the process.
    out = {name: value for name, value in _object(process).items() if name not in _NOT_CRUNS}
    if len(out.get("consoleSize", {})) < 2:
        out.pop("consoleSize", None)
    user = {"uid": process.User.UID, "gid": process.User.GID, "additionalGids": list(process.User.AdditionalGids)}
    return {"cwd": "/", **out, "user": user}


# ---- the API's messages under the runtime spec's names

_RENAMED = {"Pagesize": "pageSize", "errnoret": "errnoRet"}
_CAPITALS = re.compile("^[A-Z]+(?=[A-Z][a-z]|$)|^[A-Z]")


def _name(field: str) -> str:
    """`OOMScoreAdj` is `oomScoreAdj`, `UIDMappings` is `uidMappings`, `CPU` is `cpu`."""
    return _RENAMED.get(field) or _CAPITALS.sub(lambda found: found[0].lower(), field)


def _object(message: Message) -> Json:
    """The fields that are not zero or empty, which the caller gave."""
    return {_name(field.name): _value(value) for field, value in message.ListFields()}


def _item(message: Message) -> Json:
    """An item of a list: its numbers count even if they are zero."""
    numbers = {
        _name(field.name): getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
        if field.cpp_type in _NUMBERS and not field.has_presence
    }
    return {**numbers, **_object(message)}


def _value(value: Any) -> Any:
    if isinstance(value, Message):
        return _object(value)
    if isinstance(value, str | int):
        return value
    return [_item(each) if isinstance(each, Message) else each for each in value]


def guest_cgroup(path: str, cid: str) -> str:
    """The cgroup below the guest's root for a spec's cgroupsPath: a path, or systemd's `slice:prefix:name`, without
    `..`.
    """
    if path.count(":") == 2 and "/" not in path:
        slice_name, prefix, name = path.split(":")
        path = "/".join((*_slice_folders(slice_name), f"{prefix}-{name}.scope" if prefix else name))
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    return "/" + "/".join(parts or [cid])


def _slice_folders(slice_name: str) -> list[str]:
    stem = slice_name.removesuffix(".slice")
    if not stem or stem == "-":
        return []
    parts = stem.split("-")
    return ["-".join(parts[: count + 1]) + ".slice" for count in range(len(parts))]


def _hooks(hooks: pb.Hooks, guest_hooks: Mapping[str, Iterable[pb.Hook]]) -> Json:
    out: Json = {}
    for kind in _HOOK_KINDS:
        found = [*getattr(hooks, kind[0].upper() + kind[1:]), *guest_hooks.get(kind, ())]
        if found:
            out[kind] = [_object(hook) for hook in found]
    return out


def _linux(linux: pb.Linux, cgroup: str, pid_namespace: str) -> Json:
    given = _object(linux)
    out = {name: given[name] for name in _OF_LINUX if name in given}
    for device in out.get("devices", ()):
        device["fileMode"] = device["fileMode"] or 0o666
    return {**out, "cgroupsPath": cgroup, "namespaces": _namespaces(linux, pid_namespace)}


def _namespaces(linux: pb.Linux, pid_namespace: str) -> list[Json]:
    # The pod's network, hostname and IPC are the guest's own; this agent decides on the pid namespace; host paths mean
    # nothing here. The cgroup namespace, which the shim has removed, makes /sys/fs/cgroup show the container's limits.
    pid = {"type": "pid", "path": pid_namespace} if pid_namespace else {"type": "pid"}
    out: list[Json] = [{"type": "mount"}, pid, {"type": "cgroup"}]
    others = dict.fromkeys(one.Type for one in linux.Namespaces if one.Type not in _NAMESPACES_OF_THE_POD)
    return out + [{"type": kind} for kind in others if kind not in ("mount", "pid", "cgroup")]


def _device_rules(spec: pb.Spec, nodes: Iterable[Node]) -> list[Json]:
    """Allowed are the devices that runc and kata-agent allow every container (crun adds /dev/null and the like), the
    spec's devices, those that its mounts show, and what its rules say, of which the last one that fits holds.

    A privileged container may open every device of the guest: it could leave its cgroup anyway.
    """
    if set(spec.Process.Capabilities.Bounding) >= _OF_PRIVILEGED:
        return [{"allow": True, "access": "rwm"}]
    given = [_device_rule(rule) for rule in spec.Linux.Resources.Devices]
    ruled = {(rule["type"], rule.get("major"), rule.get("minor")) for rule in given}
    devices = [
        Node("b" if device.Type == "b" else "c", device.Major, device.Minor)
        for device in spec.Linux.Devices
        if device.Type in ("c", "b", "u")
    ]
    allowed = [Node(*node) for node in dict.fromkeys((_TUN, *devices, *nodes)) if node not in ruled]
    return [
        {"allow": False, "access": "rwm"},
        *({"allow": True, "type": kind, "access": "m"} for kind in "cb"),
        *({"allow": True, "type": kind, "major": a, "minor": b, "access": "rwm"} for kind, a, b in allowed),
        *given,
    ]


def _device_rule(rule: pb.LinuxDeviceCgroup) -> Json:
    out: Json = {"allow": rule.Allow, "type": rule.Type or "a", "access": rule.Access or "rwm"}
    if out["type"] != "a":
        # A Go client writes "any" as -1, a missing number as 0; no device has major 0.
        if rule.Major > 0:
            out["major"] = rule.Major
        if rule.Minor >= 0 and not (rule.Major <= 0 and rule.Minor == 0):
            out["minor"] = rule.Minor
    return out


def oci_resources(resources: pb.LinuxResources, guest: GuestFacts) -> Json:
    """Limits as cgroup v2 has them. Left out are limits without a file in v2 (kernel memory, swappiness, realtime,
    network classes) and those that only make sense on the host: CPUs that the guest lacks, and the limit of 0 that a
    kubelet sets for each size of the host's huge pages.
    """
    given = _object(resources)
    out: Json = {}
    for name, kept in _LIMITS.items():
        if found := {key: value for key, value in given.get(name, {}).items() if key in kept}:
            out[name] = found
    cpu = out.get("cpu", {})
    if "cpus" in cpu:
        usable = cpu_set(cpu.pop("cpus")) & cpu_set(guest.online_cpus)
        if usable:
            cpu["cpus"] = ",".join(str(number) for number in sorted(usable))
        if not cpu:
            del out["cpu"]
    for device in out.get("blockIO", {}).get("weightDevice", ()):
        del device["leafWeight"]
    pages = [
        each for each in given.get("hugepageLimits", ()) if each.get("limit") or each["pageSize"] in guest.page_sizes
    ]
    if pages:
        out["hugepageLimits"] = pages
    if resources.Unified:
        out["unified"] = dict(resources.Unified)
    return out


def page_size_name(size_bytes: int) -> str:
    """As the kernel names the files of cgroups. Source: mem_fmt of mm/hugetlb_cgroup.c."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB")):
        if size_bytes >= unit:
            return f"{size_bytes // unit}{name}"
    return f"{size_bytes >> 10}KB"


def cpu_set(text: str) -> set[int]:
    """CPU numbers of a list such as `0-2,5`. InvalidArgument for anything else."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        if not first and not dash:
            continue
        if not (first.isdigit() and (last.isdigit() or not dash)) or len(first) > 6 or len(last) > 6:
            raise InvalidArgument(f"cpu list {text[:80]!r}: want numbers and ranges")
        if int(last or first) - int(first) > 65536:
            raise InvalidArgument(f"cpu list {text[:80]!r}: range too long")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


# -- names of users and groups -----------------------------------------------------------------------------------------

_MAX_FILE_BYTES = 4 << 20


def apply_string_user(user: User, wanted: StringUser, rootfs: str) -> None:
    """`user` (UID, GID, AdditionalGids) has the ids of the names or numbers in `wanted`; empty names change nothing.

    They are looked up in the container's own /etc/passwd and /etc/group; symlinks in the root file system cannot lead
    out of it. Without a group, a user found in passwd gets its primary group.
    """
    if not (wanted.uid or wanted.gid or wanted.additionalGids):
        return
    with opened(rootfs, os.O_PATH | os.O_DIRECTORY) as root:
        passwd, group = _table(root, "etc/passwd"), _table(root, "etc/group")
    found = User()
    found.CopyFrom(user)
    if wanted.uid:
        entry = _find(passwd, wanted.uid)
        if entry is None and not wanted.uid.isdigit():
            raise InvalidArgument(f"user {wanted.uid!r}: not in the container's /etc/passwd")
        found.UID = _id(entry[2] if entry else wanted.uid, "user")
        if entry and len(entry) > 3 and not wanted.gid:
            found.GID = _id(entry[3], "group")
    if wanted.gid:
        found.GID = _group_id(group, wanted.gid)
    found.AdditionalGids.extend(_group_id(group, name) for name in wanted.additionalGids)
    user.CopyFrom(found)


def _table(root: int, name: str) -> list[list[str]]:
    try:
        fd = open_beneath(root, name, os.O_RDONLY)
    except OSError:
        return []  # an image without the file has numbers only
    with os.fdopen(fd, "rb") as file:
        text = file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    return [fields for fields in (line.split(":") for line in text.splitlines()) if len(fields) > 2]


def _find(table: list[list[str]], name: str) -> list[str] | None:
    """The entry of that name, else the one of that number."""
    return next((fields for column in (0, 2) for fields in table if fields[column] == name), None)


def _group_id(table: list[list[str]], name: str) -> int:
    entry = _find(table, name)
    if entry is None and not name.isdigit():
        raise InvalidArgument(f"group {name!r}: not in the container's /etc/group")
    return _id(entry[2] if entry else name, "group")


def _id(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 32):
        raise InvalidArgument(f"{what} id {text!r}: not a number below 2^32")
    return int(text)
