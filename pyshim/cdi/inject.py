"""Applies a list of edits to an OCI spec (a JSON object), in the order of the list.

Environment variables and device nodes come out the same when the same edits are made twice; hooks are added each time.
Source: the CDI specification, "OCI Edits", and its Go library, whose results these are.
"""

import json
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .errors import InjectionFailed, os_cause
from .spec import NO_PERMISSIONS, ContainerEdits, DeviceNode, Hook, Mount, as_json


class HostNode(NamedTuple):
    type: str
    """`b`, `c` or `p`."""
    major: int
    minor: int
    file_mode: int


def host_node(path: str) -> HostNode:
    """The node at `path`, a link not followed. Raises InjectionFailed when it is missing or something else."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError) as error:
        cause = os_cause(error) if isinstance(error, OSError) else str(error)
        raise InjectionFailed(f"look at device node '{path}': {cause}") from error
    kinds = {stat.S_IFBLK: "b", stat.S_IFCHR: "c", stat.S_IFIFO: "p"}
    kind = kinds.get(stat.S_IFMT(found.st_mode))
    if kind is None:
        raise InjectionFailed(f"look at device node '{path}': it is neither a device nor a fifo")
    numbers = (0, 0) if kind == "p" else (os.major(found.st_rdev), os.minor(found.st_rdev))
    return HostNode(kind, *numbers, stat.S_IMODE(found.st_mode))


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
    if devices:
        _add_devices(_child(oci_spec, "linux"), devices)
    if edits.net_devices:
        _child(_child(oci_spec, "linux"), "netDevices").update(
            {device.host_interface_name: {"name": device.name} for device in edits.net_devices}
        )
    if edits.mounts:
        added = [_mount(mount, has_user_namespace=_has_user_namespace(oci_spec)) for mount in edits.mounts]
        oci_spec["mounts"] = _with_mounts(oci_spec.get("mounts") or [], added)
    for name in dict.fromkeys(hook.hook_name for hook in edits.hooks):
        hooks = _child(oci_spec, "hooks")
        hooks[name] = [*(hooks.get(name) or []), *(_hook(hook) for hook in edits.hooks if hook.hook_name == name)]
    if edits.intel_rdt is not None:
        _child(oci_spec, "linux")["intelRdt"] = as_json(edits.intel_rdt)
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
    """(the OCI device, its cgroup permissions); members that the spec leaves out come from the host.

    The host's node is compared with the spec only where type or number come from it. As in the Go library, `u` is then
    another type than the `c` of the kernel's nodes.
    """
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
            if not is_complete and kind and kind != found.type:
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
    return device, "" if node.permissions == NO_PERMISSIONS else node.permissions or "rwm"


def _add_devices(linux: Json, new: list[tuple[Json, str]]) -> None:
    added = [device for device, _ in new]
    linux["devices"] = _replaced(linux.get("devices") or [], added, lambda device: str(device.get("path")))
    rules = [
        {"allow": True, "type": kind, "major": device["major"], "minor": device["minor"], "access": permissions}
        for device, permissions in new
        if (kind := device["type"]) in ("b", "c")
    ]
    if rules:
        resources = _child(linux, "resources")
        # The last rule that matches decides, so an equal one before it has no effect.
        old = resources.get("devices") or []
        resources["devices"] = _replaced(old, rules, lambda rule: json.dumps(rule, sort_keys=True))


def _replaced(old: list[Json], new: Iterable[Json], key: Callable[[Json], str]) -> list[Json]:
    """`old` without elements whose key is in `new`, then `new`, where the last of equal key counts."""
    last: dict[str, Json] = {}
    for each in new:
        last.pop(key(each), None)
        last[key(each)] = each
    return [*(other for other in old if key(other) not in last), *last.values()]


def _with_mounts(old: list[Json], new: list[Json]) -> list[Json]:
    """Outer mounts before those inside them; otherwise in the order they came."""

    def depth(mount: Json) -> int:
        # POSIX leaves two leading separators as they are; here they are one.
        return posixpath.normpath(str(mount.get("destination", ""))).replace("//", "/").count("/")

    return sorted(_replaced(old, new, lambda mount: str(mount.get("destination"))), key=depth)


def _mount(mount: Mount, *, has_user_namespace: bool) -> Json:
    added: Json = {"destination": mount.container_path, "source": mount.host_path}
    if mount.type:
        added["type"] = mount.type
    options = [*mount.options, *(_id_mapping(mount) if has_user_namespace else ())]
    if options:
        added["options"] = options
    return added


def _id_mapping(mount: Mount) -> tuple[str, ...]:
    """The option by which a bind mount's owners are mapped, unless the mount has one: of both kinds of bind the last
    counts."""
    binds = {"bind": "idmap", "rbind": "ridmap"}
    if any(option in binds.values() for option in mount.options):
        return ()
    wanted = [binds["bind"]] if mount.type == "bind" else []
    wanted += [binds[option] for option in mount.options if option in binds]
    return tuple(wanted[-1:])


def _has_user_namespace(oci_spec: Json) -> bool:
    namespaces = (oci_spec.get("linux") or {}).get("namespaces") or []
    return any(isinstance(each, dict) and each.get("type") == "user" for each in namespaces)


def _hook(hook: Hook) -> Json:
    return {name: value for name, value in as_json(hook).items() if name != "hookName"}


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
