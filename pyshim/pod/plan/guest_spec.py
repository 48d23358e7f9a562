"""The OCI spec for the guest, without the members that mean something on the host only.

Source: Kata's runtime removes the same before CreateContainer. kata-agent refuses or misreads some of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pyshim.model.errors import InvalidArgument
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
MAX_DEPTH = 100
"""Levels of nested objects and lists; the OCI runtime-spec needs about ten."""


def guest_spec(
    spec: OciSpec,
    *,
    root_path: str,
    mounts: Sequence[OciMount],
    seccomp: bool,
    hostname: str,
    sysctls: Mapping[str, str],
    terminal: bool,
    devices: Sequence[Mapping[str, Any]],
    nodes: Sequence[GuestNode] = (),
) -> dict[str, Any]:
    """A new JSON object for the agent. `root_path` and `mounts` are guest paths, `sysctls` the pod's.

    It keeps limits on CPU time, memory and processes, which hold inside the guest. Cpusets, block I/O, network and
    device rules are left out, since they name host objects, and namespace paths as well. Memory nodes become those of
    the guest's `nodes`, if it has several.
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
    raw["process"] = guest_process(raw["process"], terminal=terminal)
    linux = dict(raw.get("linux") or {})
    if not seccomp:
        linux.pop("seccomp", None)
    for key in ("intelRdt", "mountLabel", "uidMappings", "gidMappings"):
        linux.pop(key, None)
    linux["namespaces"] = [
        {"type": kind}
        for kind in dict.fromkeys((*(namespace.type for namespace in spec.namespaces), *_THE_PODS))
        if kind not in _LEFT_TO_THE_AGENT
    ]
    if sysctls:
        linux["sysctl"] = {**sysctls, **(linux.get("sysctl") or {})}
    linux["resources"] = guest_resources(with_swap(linux.get("resources") or {}, spec.annotations), nodes)
    linux["devices"] = [dict(device) for device in devices]
    raw["linux"] = linux
    return raw


def guest_process(process: Mapping[str, Any], *, terminal: bool) -> dict[str, Any]:
    """The `process` of an init or exec for the agent. The client's `terminal` replaces that of the spec.

    Labels and profiles of the host's security modules are left out: kata-agent refuses a label that its kernel cannot
    use. Resource limits that the spec does not name are those that runc's containers have.
    """
    kept = {key: value for key, value in process.items() if key not in ("apparmorProfile", "selinuxLabel")}
    process = {**_copied(kept), "terminal": terminal}
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
