"""The OCI spec for the guest, without the members that mean something on the host only.

Source: Kata's runtime removes the same before CreateContainer. kata-agent refuses or misreads some of it.
"""

import re
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from pyshim.model.errors import InvalidArgument, Unimplemented
from pyshim.model.oci import OciMount, OciSpec
from pyshim.model.vm import GuestNode
from pyshim.pod.plan.hooks import guest_hooks
from pyshim.resources.sizing.plan.numa import guest_memory_nodes
from pyshim.resources.sizing.plan.swap import with_swap

_LEFT_TO_THE_AGENT = frozenset({"cgroup", "network", "time", "user", "pid"})
"""Namespaces of the host, and pid, which kata-agent adds itself: the sandbox's or a new one."""
_THE_PODS = ("ipc", "uts")
"""Namespaces that the agent makes for the pod, even if the spec asks for the host's: a guest cannot have those, and its
own have no host name."""
_CDI_PREFIX = "cdi.k8s.io/"
_INFINITY = (1 << 64) - 1
_DEFAULT_RLIMITS = (("RLIMIT_NOFILE", 1 << 20), ("RLIMIT_NPROC", _INFINITY), ("RLIMIT_CORE", _INFINITY))
"""Both limits of a process whose spec names none: those of containerd's systemd unit, which runc's containers inherit.
Open files have the number of its releases before 2.0, because the guest's kernel allows no more. In the guest the
process would inherit those of the guest's init."""
_OF_HOST_DEVICES = ("io.", "rdma.", "misc.", "cpuset.")
"""Prefixes of cgroup files whose content names devices or CPUs of the host."""
_ALIKE = (1, 5, 136)
"""Majors of character devices: memory, terminals, pseudo-terminals. Source: the kernel's admin-guide/devices.txt."""
_MISC, _MISC_ALIKE = 10, range(128, 255)
"""Of misc devices these minors are assigned (/dev/net/tun, /dev/fuse, /dev/kvm); others are given as drivers come."""
_EVERY_CONTAINERS = {
    "/dev/null": (1, 3),
    "/dev/zero": (1, 5),
    "/dev/full": (1, 7),
    "/dev/random": (1, 8),
    "/dev/urandom": (1, 9),
    "/dev/tty": (5, 0),
}
"""Character devices, of mode 0666, that a runtime makes in each container. Source: OCI runtime-spec, config-linux."""
_NOT_IN_A_GUEST = {
    "uidMappings": "a pod in a VM has no user namespace of the host (hint: leave out 'hostUsers: false')",
    "gidMappings": "a pod in a VM has no user namespace of the host (hint: leave out 'hostUsers: false')",
    "netDevices": "the guest cannot have network devices of the host (hint: put them into the pod's network namespace)",
    "memoryPolicy": "the memory nodes of the host are not the guest's",
}
"""Members of `linux` whose loss a container would notice, and why it would be one."""
MAX_DEPTH = 100
"""Levels of nested objects and lists; the OCI runtime-spec needs about ten."""


def refuse_host_members(spec: OciSpec, where: str) -> None:
    """Raises Unimplemented for a member that means the host and that must not be left out in silence."""
    linux = spec.raw.get("linux") or {}
    for name, reason in _NOT_IN_A_GUEST.items():
        if linux.get(name):
            raise Unimplemented(f"read spec '{where}': linux.{name}: {reason}")


def guest_spec(
    spec: OciSpec,
    *,
    root_path: str,
    mounts: Sequence[OciMount],
    seccomp: bool,
    hostname: str,
    sysctls: Mapping[str, str],
    terminal: bool,
    stdin: bool,
    devices: Sequence[Mapping[str, Any]],
    nodes: Sequence[GuestNode] = (),
) -> dict[str, Any]:
    """A new JSON object for the agent. `root_path` and `mounts` are guest paths, `sysctls` the pod's.

    It keeps limits on CPU time, memory and processes, which hold inside the guest. Cpusets, block I/O and network are
    left out, since they name host objects, as are rules for the host's devices and namespace paths. Memory nodes become
    those of the guest's `nodes`, if it has several.
    """
    raw: dict[str, Any] = _copied(dict(spec.raw))
    raw["root"] = {**raw["root"], "path": root_path}
    raw["mounts"] = [
        {"destination": m.destination, "type": m.type, "source": m.source, "options": list(m.options)} for m in mounts
    ]
    if hooks := guest_hooks(raw.pop("hooks", None)):
        raw["hooks"] = hooks
    raw["hostname"] = hostname
    raw["annotations"] = {
        key: value for key, value in (raw.get("annotations") or {}).items() if not key.startswith(_CDI_PREFIX)
    }
    raw["process"] = guest_process(raw["process"], terminal=terminal, stdin=stdin)
    linux = dict(raw.get("linux") or {})
    if not seccomp:
        linux.pop("seccomp", None)
    for key in ("intelRdt", "mountLabel", *_NOT_IN_A_GUEST):
        linux.pop(key, None)
    linux["namespaces"] = [
        {"type": kind}
        for kind in dict.fromkeys((*(namespace.type for namespace in spec.namespaces), *_THE_PODS))
        if kind not in _LEFT_TO_THE_AGENT
    ]
    if sysctls:
        linux["sysctl"] = {**sysctls, **(linux.get("sysctl") or {})}
    given = linux.get("resources") or {}
    linux["resources"] = guest_resources(with_swap(given, spec.annotations), nodes)
    linux["devices"] = [dict(device) for device in devices if not _is_in_every_container(device)]
    rules = given.get("devices") or []
    if isinstance(rules, list):  # the agent's client refuses anything else
        rules = [rule for rule in rules if _is_of_the_guest(rule, linux["devices"])]
    if rules:
        linux["resources"]["devices"] = rules
    raw["linux"] = linux
    return raw


def _is_in_every_container(device: Mapping[str, Any]) -> bool:
    """True for a node that the agent makes anyway. kata-agent fails when the spec has it, too, which lists all devices
    of the host for a privileged container.
    """
    return (
        device.get("type") in ("c", "u")
        and _EVERY_CONTAINERS.get(str(device.get("path"))) == (device.get("major"), device.get("minor"))
        and device.get("fileMode") in (None, 0o666, stat.S_IFCHR | 0o666)
    )


def _is_of_the_guest(rule: Any, devices: Sequence[Mapping[str, Any]]) -> bool:
    """True if a device rule means the same in the guest.

    It is for all devices, for one that every kernel numbers alike, or for one of `devices`, whose rules the agent
    renumbers with them. Denying all is left to the agent.
    """
    if not isinstance(rule, dict):
        return True
    kind, major, minor = rule.get("type") or "a", rule.get("major", -1), rule.get("minor", -1)
    if kind == "a":
        return rule.get("allow") is True
    if major == -1 and minor == -1:
        return True
    if kind in ("c", "u") and (major in _ALIKE or (major == _MISC and minor in _MISC_ALIKE)):
        return True
    return any((each.get("type"), each.get("major"), each.get("minor")) == (kind, major, minor) for each in devices)


def guest_process(process: Mapping[str, Any], *, terminal: bool, stdin: bool) -> dict[str, Any]:
    """The `process` of an init or exec for the agent. The client's `terminal` replaces that of the spec.

    Without a client for its `stdin`, our own agent gives it /dev/null, as runc's shim does.

    Labels and profiles of the host's security modules are left out: kata-agent refuses a label that its kernel cannot
    use. Resource limits that the spec does not name are those that runc's containers have.
    """
    kept = {key: value for key, value in process.items() if key not in ("apparmorProfile", "selinuxLabel")}
    process = {**_copied(kept), "terminal": terminal}
    if not (stdin or terminal):
        process["noStdin"] = True
    named = process.get("rlimits") or []
    if isinstance(named, list):  # the agent's client refuses anything else
        kinds = [limit.get("type") for limit in named if isinstance(limit, dict)]
        added = [{"type": kind, "hard": value, "soft": value} for kind, value in _DEFAULT_RLIMITS if kind not in kinds]
        process["rlimits"] = named + added
    return process


def guest_resources(resources: Mapping[str, Any], nodes: Sequence[GuestNode] = ()) -> dict[str, Any]:
    """The limits that hold inside the guest: CPU time and weight, memory, processes, huge pages, and `unified`.

    With several `nodes`, memory nodes are kept, too, under the guest's numbers. Swappiness is left out, since
    kata-agent fails under cgroup v2, which has no file for it. InvalidArgument names a file of `unified` that is about
    the host's devices or CPUs.
    """
    kept: dict[str, Any] = {}
    cpu = {key: value for key, value in (resources.get("cpu") or {}).items() if key not in ("cpus", "mems")}
    mems = (resources.get("cpu") or {}).get("mems")
    if nodes and mems and (own := guest_memory_nodes(mems, nodes)):
        cpu["mems"] = own
    if cpu:
        kept["cpu"] = cpu
    for key in ("memory", "pids", "hugepageLimits", "unified"):
        if resources.get(key):
            kept[key] = _copied(resources[key])
    if isinstance(kept.get("memory"), dict):
        kept["memory"].pop("swappiness", None)
    unified = kept.get("unified")
    for name in unified if isinstance(unified, dict) else ():
        if str(name).startswith(_OF_HOST_DEVICES):
            raise InvalidArgument(f"read linux.resources.unified: {str(name)[:80]!r} cannot be set in a guest")
    return kept


def _copied(value: Any, depth: int = MAX_DEPTH) -> Any:
    """A deep copy of a JSON value. `copy.deepcopy` is slower, since it looks for objects that occur twice.

    Raises InvalidArgument when it is nested deeper than `depth`.
    """
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise InvalidArgument(f"read spec: nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {key: _copied(below, depth - 1) for key, below in value.items()}
    return [_copied(below, depth - 1) for below in value]


_NOT_EXECUTABLE = "open executable: (Permission denied|Operation not permitted)"
"""crun's words for a file that nobody may execute, and for a directory."""


def refused_program(error: str, args: object) -> str:
    """What a caller looks for, if the agent's `error` is that the program, the first of `args`, is missing or that no
    such file can be executed; else empty.

    Docker takes the first half of the texts for a missing program for exit status 127 (runc has it from Go's
    exec.LookPath), Kata's tests look for the second half. `permission denied` is status 126.
    """
    program = args[0] if isinstance(args, list | tuple) and args else ""
    if not isinstance(program, str) or not program:
        return ""
    if re.search(_NOT_EXECUTABLE, error):
        return f'exec: "{program}": permission denied'
    if not re.search(rf"file ['\"`]?{re.escape(program)}['\"`]? (was )?not found", error):
        return ""
    problem = f"stat {program}: no such file or directory" if "/" in program else "executable file not found in $PATH"
    return f'exec: "{program}": {problem}: the file {program} was not found'
