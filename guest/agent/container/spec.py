"""From the API's spec message to the config.json that crun reads. Pure: no file is opened here.

Source of names and shapes: opencontainers/runtime-spec config.md, config-linux.md. The API has no presence for scalars:
zero means "not given" wherever the runtime spec has an optional value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from protos.agent import oci_pb2 as pb

from guest.agent.errors import InvalidArgument

Json: TypeAlias = dict[str, Any]

# A version that the guest's crun supports, whatever the caller's spec says: crun 1.8 (Debian 12) refuses 1.2.0, which
# containerd 2.0 sends, and all later ones. What this agent writes has been in the specification since 1.0.2.
OCI_VERSION = "1.0.2"
_MAX_ID_BYTES = 1024
_NAMESPACES_OF_THE_POD = ("network", "uts", "ipc")
_HOOK_KINDS = ("prestart", "poststart", "poststop", "createRuntime", "createContainer", "startContainer")


def check_id(value: str, what: str) -> str:
    """`value` when it may become a file name: letters, digits, `_.-`, and a letter or digit first. InvalidArgument
    otherwise.
    """
    plain = value.replace("_", "").replace(".", "").replace("-", "")
    if not (value and len(value) <= _MAX_ID_BYTES and value.isascii() and plain.isalnum() and value[0].isalnum()):
        raise InvalidArgument(
            f"{what} {value[:80]!r}: must be letters, digits, '_', '.' or '-', and begin with a letter or digit"
        )
    return value


def check_spec(spec: pb.Spec, cid: str) -> None:
    """InvalidArgument names what a container cannot do without."""
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


def oci_config(
    spec: pb.Spec,
    *,
    rootfs: str,
    cgroup: str,
    pid_namespace: str,
    hooks: Mapping[str, Iterable[pb.Hook]],
    online_cpus: str,
    limits_devices: bool,
) -> Json:
    """config.json of a container.

    `rootfs` and `cgroup` replace the spec's paths. `pid_namespace` is the path of the one to join, "" for a new one;
    network, UTS and IPC namespace are crun's own. `hooks` are the guest's own, after the spec's. `online_cpus` limits
    the cpuset, if the spec has one, which the host may mean for its own CPUs. `limits_devices` says whether device
    rules can be enforced at all.
    """
    config: Json = {
        "ociVersion": OCI_VERSION,
        "process": oci_process(spec.Process),
        "root": {"path": rootfs, "readonly": spec.Root.Readonly},
        "mounts": [_mount(mount) for mount in spec.Mounts],
        # crun takes orders from these; the pod's author has no business giving them.
        "annotations": {key: value for key, value in spec.Annotations.items() if not key.startswith("run.oci.")},
        "linux": _linux(spec.Linux, cgroup, pid_namespace),
    }
    resources = config["linux"]["resources"] = oci_resources(spec.Linux.Resources, online_cpus)
    if limits_devices:
        resources["devices"] = _device_rules(spec.Linux)
    all_hooks = _hooks(spec.Hooks, hooks)
    if all_hooks:
        config["hooks"] = all_hooks
    return config


def oci_process(process: pb.Process) -> Json:
    """The process object, of config.json and of `crun exec --process`."""
    user: Json = {"uid": process.User.UID, "gid": process.User.GID}
    if process.User.AdditionalGids:
        user["additionalGids"] = list(process.User.AdditionalGids)
    out: Json = {
        "terminal": process.Terminal,
        "user": user,
        "args": list(process.Args),
        "env": list(process.Env),
        "cwd": process.Cwd or "/",
        "noNewPrivileges": process.NoNewPrivileges,
    }
    if process.ConsoleSize.Height and process.ConsoleSize.Width:
        out["consoleSize"] = {"height": process.ConsoleSize.Height, "width": process.ConsoleSize.Width}
    if process.HasField("Capabilities"):
        caps = process.Capabilities
        sets = (caps.Bounding, caps.Effective, caps.Inheritable, caps.Permitted, caps.Ambient)
        names = ("bounding", "effective", "inheritable", "permitted", "ambient")
        out["capabilities"] = {name: list(found) for name, found in zip(names, sets, strict=True)}
    if process.Rlimits:
        out["rlimits"] = [{"type": limit.Type, "hard": limit.Hard, "soft": limit.Soft} for limit in process.Rlimits]
    if process.OOMScoreAdj:
        out["oomScoreAdj"] = process.OOMScoreAdj
    # AppArmor profiles and SELinux labels are the host's: the guest has no such policy loaded and crun would
    # refuse the process.
    return out


def guest_cgroup(path: str, cid: str) -> str:
    """The cgroup below the guest's root for a spec's cgroupsPath: a path, or systemd's `slice:prefix:name`. Never leads
    out by `..`.
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


def _mount(mount: pb.Mount) -> Json:
    out: Json = {"destination": mount.destination, "options": list(mount.options)}
    if mount.type:
        out["type"] = mount.type
    if mount.source:
        out["source"] = mount.source
    return out


def _hooks(hooks: pb.Hooks, guest_hooks: Mapping[str, Iterable[pb.Hook]]) -> Json:
    out: Json = {}
    for kind in _HOOK_KINDS:
        found = [*getattr(hooks, kind[0].upper() + kind[1:]), *guest_hooks.get(kind, ())]
        if found:
            out[kind] = [_hook(hook) for hook in found]
    return out


def _hook(hook: pb.Hook) -> Json:
    out: Json = {"path": hook.Path, "args": list(hook.Args), "env": list(hook.Env)}
    if hook.Timeout:
        out["timeout"] = hook.Timeout
    return out


def _linux(linux: pb.Linux, cgroup: str, pid_namespace: str) -> Json:
    out: Json = {
        "cgroupsPath": cgroup,
        "namespaces": _namespaces(linux, pid_namespace),
        "maskedPaths": list(linux.MaskedPaths),
        "readonlyPaths": list(linux.ReadonlyPaths),
    }
    for key, mappings in (("uidMappings", linux.UIDMappings), ("gidMappings", linux.GIDMappings)):
        if mappings:
            out[key] = [{"hostID": one.HostID, "containerID": one.ContainerID, "size": one.Size} for one in mappings]
    if linux.Devices:
        out["devices"] = [_device(device) for device in linux.Devices]
    if linux.RootfsPropagation:
        out["rootfsPropagation"] = linux.RootfsPropagation
    if linux.HasField("Seccomp"):
        out["seccomp"] = _seccomp(linux.Seccomp)
    return out


def _namespaces(linux: pb.Linux, pid_namespace: str) -> list[Json]:
    # The pod's network, hostname and IPC are the guest's own; its pid namespace is this agent's decision; host paths
    # mean nothing here.
    # A cgroup namespace of its own makes /sys/fs/cgroup show the container's limits, which the shim's trimming drops.
    pid = {"type": "pid", "path": pid_namespace} if pid_namespace else {"type": "pid"}
    out: list[Json] = [{"type": "mount"}, pid, {"type": "cgroup"}]
    others = dict.fromkeys(one.Type for one in linux.Namespaces if one.Type not in _NAMESPACES_OF_THE_POD)
    return out + [{"type": kind} for kind in others if kind not in ("mount", "pid", "cgroup")]


def _device(device: pb.LinuxDevice) -> Json:
    return {
        "path": device.Path,
        "type": device.Type,
        "major": device.Major,
        "minor": device.Minor,
        "fileMode": device.FileMode or 0o666,
        "uid": device.UID,
        "gid": device.GID,
    }


def _device_rules(linux: pb.Linux) -> list[Json]:
    """The spec's rules; without any, nothing but the spec's devices (crun itself adds /dev/null and its like)."""
    if linux.Resources.Devices:
        return [_device_rule(rule) for rule in linux.Resources.Devices]
    rules: list[Json] = [{"allow": False, "access": "rwm"}]
    for device in linux.Devices:
        if device.Type in ("c", "b", "u"):
            kind = "b" if device.Type == "b" else "c"
            rules.append({"allow": True, "type": kind, "major": device.Major, "minor": device.Minor, "access": "rwm"})
    return rules


def _device_rule(rule: pb.LinuxDeviceCgroup) -> Json:
    out: Json = {"allow": rule.Allow, "type": rule.Type or "a", "access": rule.Access or "rwm"}
    if out["type"] != "a":
        # A Go client writes "any" as -1, a missing number as 0; no device has major 0.
        if rule.Major > 0:
            out["major"] = rule.Major
        if rule.Minor >= 0 and not (rule.Major <= 0 and rule.Minor == 0):
            out["minor"] = rule.Minor
    return out


def _seccomp(seccomp: pb.LinuxSeccomp) -> Json:
    out: Json = {"defaultAction": seccomp.DefaultAction, "syscalls": [_syscall(rule) for rule in seccomp.Syscalls]}
    if seccomp.Architectures:
        out["architectures"] = list(seccomp.Architectures)
    if seccomp.Flags:
        out["flags"] = list(seccomp.Flags)
    return out


def _syscall(rule: pb.LinuxSyscall) -> Json:
    out: Json = {"names": list(rule.Names), "action": rule.Action}
    if rule.HasField("errnoret"):
        out["errnoRet"] = rule.errnoret
    if rule.Args:
        out["args"] = [
            {"index": one.Index, "value": one.Value, "valueTwo": one.ValueTwo, "op": one.Op} for one in rule.Args
        ]
    return out


def oci_resources(resources: pb.LinuxResources, online_cpus: str) -> Json:
    """Limits as cgroup v2 has them. What v2 has no file for (kernel memory, swappiness, realtime, network classes) is
    left out.
    """
    out: Json = {}
    memory = {
        key: value
        for key, value in (
            ("limit", resources.Memory.Limit),
            ("reservation", resources.Memory.Reservation),
            ("swap", resources.Memory.Swap),
        )
        if value
    }
    if memory:
        out["memory"] = memory
    cpu = _cpu(resources.CPU, online_cpus)
    if cpu:
        out["cpu"] = cpu
    if resources.Pids.Limit:
        out["pids"] = {"limit": resources.Pids.Limit}
    block_io = _block_io(resources.BlockIO)
    if block_io:
        out["blockIO"] = block_io
    if resources.HugepageLimits:
        out["hugepageLimits"] = [{"pageSize": one.Pagesize, "limit": one.Limit} for one in resources.HugepageLimits]
    return out


def _cpu(cpu: pb.LinuxCPU, online_cpus: str) -> Json:
    out: Json = {}
    for key, value in (("shares", cpu.Shares), ("quota", cpu.Quota), ("period", cpu.Period)):
        if value:
            out[key] = value
    if cpu.Cpus:
        usable = cpu_set(cpu.Cpus) & cpu_set(online_cpus)
        if usable:
            out["cpus"] = ",".join(str(number) for number in sorted(usable))
    if cpu.Mems:
        out["mems"] = cpu.Mems
    return out


def _block_io(block_io: pb.LinuxBlockIO) -> Json:
    out: Json = {}
    if block_io.Weight:
        out["weight"] = block_io.Weight
    if block_io.WeightDevice:
        out["weightDevice"] = [
            {"major": one.Major, "minor": one.Minor, "weight": one.Weight} for one in block_io.WeightDevice
        ]
    for field in (
        "ThrottleReadBpsDevice",
        "ThrottleWriteBpsDevice",
        "ThrottleReadIOPSDevice",
        "ThrottleWriteIOPSDevice",
    ):
        limits = getattr(block_io, field)
        if limits:
            out["t" + field[1:]] = [{"major": one.Major, "minor": one.Minor, "rate": one.Rate} for one in limits]
    return out


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
