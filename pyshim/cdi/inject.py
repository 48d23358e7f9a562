"""What a list of edits does to an OCI spec (a JSON object). The order of the edits is the order of their effects.

Environment variables and device nodes come out the same when the same edits are made twice; hooks are added each time.
Source: the CDI specification, "OCI Edits", and its Go library, whose results these are.
"""

import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from pyshim.cdi.errors import InjectionFailed
from pyshim.cdi.host_nodes import HostNode, host_node
from pyshim.cdi.spec import ContainerEdits, DeviceNode, Hook, IntelRdt, Mount

Json = dict[str, Any]
LookAt = Callable[[str], HostNode]


def inject(oci_spec: Json, edits: ContainerEdits, *, look_at: LookAt = host_node) -> None:
    """`oci_spec` has the edits. Raises InjectionFailed before anything is changed."""
    for path in ("process", "process.user", "linux", "linux.resources", "linux.netDevices", "hooks"):
        _check_object(oci_spec, path)
    user = (oci_spec.get("process") or {}).get("user") or {}
    devices = [_complete(node, look_at, user) for node in edits.device_nodes]
    if edits.env:
        process = _child(oci_spec, "process")
        process["env"] = with_env(process.get("env") or [], edits.env)
    for device, permissions in devices:
        _add_device(_child(oci_spec, "linux"), device, permissions)
    if edits.net_devices:
        _child(_child(oci_spec, "linux"), "netDevices").update(
            {device.host_interface_name: {"name": device.name} for device in edits.net_devices}
        )
    if edits.mounts:
        oci_spec["mounts"] = _with_mounts(oci_spec.get("mounts") or [], edits.mounts)
    for hook in edits.hooks:
        hooks = _child(oci_spec, "hooks")
        hooks[hook.hook_name] = [*(hooks.get(hook.hook_name) or []), _hook(hook)]
    if edits.intel_rdt is not None:
        _child(oci_spec, "linux")["intelRdt"] = _rdt(edits.intel_rdt)
    gids = [gid for gid in edits.additional_gids if gid]
    if gids:
        user = _child(_child(oci_spec, "process"), "user")
        user["additionalGids"] = list(dict.fromkeys([*(user.get("additionalGids") or []), *gids]))


def with_env(env: list[str], new: tuple[str, ...]) -> list[str]:
    """`env` with each of `new` in the place of the variable of its name, or at the end."""
    out = list(env)
    places = {text.partition("=")[0]: index for index, text in enumerate(env)}
    for text in new:
        place = places.setdefault(text.partition("=")[0], len(out))
        out[place : place + 1] = [text]
    return out


def _complete(node: DeviceNode, look_at: LookAt, user: Mapping[str, Any]) -> tuple[Json, str]:
    """(the OCI device, its cgroup permissions), what the spec leaves open filled in from the host."""
    is_complete = node.type == "p" or (bool(node.type) and bool(node.major))
    kind, major, minor, file_mode = node.type, node.major, node.minor, node.file_mode
    if not (is_complete and file_mode is not None):
        path = node.host_path or node.path
        try:
            found = look_at(path)
        except InjectionFailed:
            if not is_complete:
                raise
        else:
            # What the kernel calls `c` a spec may call `u`.
            if kind and {"u": "c"}.get(kind, kind) != found.type:
                raise InjectionFailed(f"add device '{node.path}': '{path}' is of type {found.type}, not {kind}")
            kind = kind or found.type
            if not major and kind != "p":
                major, minor = found.major, found.minor
            file_mode = found.file_mode if file_mode is None else file_mode
    device: Json = {"path": node.path, "type": kind}
    if kind != "p":
        device |= {"major": major or 0, "minor": minor or 0}
    if file_mode is not None:
        device["fileMode"] = file_mode
    for member, value in (("uid", node.uid), ("gid", node.gid)):
        own = value if value is not None else user.get(member) or None
        if own is not None:
            device[member] = own
    return device, node.permissions or "rwm"


def _add_device(linux: Json, device: Json, permissions: str) -> None:
    others = [other for other in linux.get("devices") or [] if other.get("path") != device["path"]]
    linux["devices"] = [*others, device]
    if device["type"] in ("b", "c"):
        resources = _child(linux, "resources")
        rule = {
            "allow": True,
            "type": device["type"],
            "major": device["major"],
            "minor": device["minor"],
            "access": permissions,
        }
        # The last rule that matches decides, so an equal one further up has nothing more to say.
        resources["devices"] = [*(other for other in resources.get("devices") or [] if other != rule), rule]


def _with_mounts(mounts: list[Json], new: tuple[Mount, ...]) -> list[Json]:
    """Outer mounts before those inside them; otherwise in the order they came."""
    for mount in new:
        added: Json = {"destination": mount.container_path, "source": mount.host_path}
        if mount.type:
            added["type"] = mount.type
        if mount.options:
            added["options"] = list(mount.options)
        mounts = [*(other for other in mounts if other.get("destination") != mount.container_path), added]
    return sorted(mounts, key=lambda mount: _depth(str(mount.get("destination", ""))))


def _depth(path: str) -> int:
    """Separators in the clean path; POSIX lets two leading ones stay, which here are one."""
    return posixpath.normpath(path).replace("//", "/").count("/")


def _hook(hook: Hook) -> Json:
    out: Json = {"path": hook.path}
    if hook.args:
        out["args"] = list(hook.args)
    if hook.env:
        out["env"] = list(hook.env)
    if hook.timeout is not None:
        out["timeout"] = hook.timeout
    return out


def _rdt(rdt: IntelRdt) -> Json:
    members: Json = {
        "closID": rdt.clos_id,
        "l3CacheSchema": rdt.l3_cache_schema,
        "memBwSchema": rdt.mem_bw_schema,
        "schemata": list(rdt.schemata),
        "enableMonitoring": rdt.enable_monitoring,
        "enableCMT": rdt.enable_cmt,
        "enableMBM": rdt.enable_mbm,
    }
    return {name: value for name, value in members.items() if value}


def _check_object(oci_spec: Json, path: str) -> None:
    found: object = oci_spec
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    if found is not None and not isinstance(found, dict):
        raise InjectionFailed(f"inject devices: member {path!r} of the spec is not an object")


def _child(parent: Json, name: str) -> Json:
    """The object `name` of `parent`, made if need be."""
    if parent.get(name) is None:
        parent[name] = {}
    child: Json = parent[name]
    return child
