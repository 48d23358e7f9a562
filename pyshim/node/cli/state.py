"""`pyshim status SANDBOX`: what is recorded about a sandbox, and its host cgroups, without asking its shim."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from pyshim.model.decoding import damaged, decoded, json_value
from pyshim.model.errors import FailedPrecondition, Internal, NotFound
from pyshim.model.units import MIB
from pyshim.model.vm import GuestNode
from pyshim.node.cli.output import print_json
from pyshim.node.cli.sandboxes import sandbox_id, snapshot_of
from pyshim.resources.cgroups.host import usage as cgroup_usage
from pyshim.resources.sizing.plan.numa import node_text
from pyshim.state.store import FILE_NAME

_MEANING = {
    "sandbox": "counts as the pod's",
    "overhead": "outside the pod's cgroup",
    "vcpus": "threads of the VMM",
    "devices": "device rules of the VMM",
}


def print_record(sandbox: str, state_dir: str, *, as_json: bool) -> None:
    """`pyshim status SANDBOX`: what is recorded of the sandbox, as JSON as it is on disk."""
    record = _record(state_dir, sandbox_id(sandbox, state_dir))
    if as_json:
        print_json(record)
    else:
        print("\n".join(summary(record)))


def print_cgroups(sandbox: str, state_dir: str, *, as_json: bool) -> None:
    """`pyshim status --cgroups SANDBOX`: its host cgroups, with their processes, limits and usage.

    Raises FailedPrecondition before they are recorded.
    """
    found = sandbox_id(sandbox, state_dir)
    record: Mapping[str, Any] = snapshot_of(found, state_dir).cgroups
    if not record:
        raise FailedPrecondition(f"show cgroups of sandbox '{found}': none are recorded yet")
    live = {**record, "Groups": [_live(group, record) for group in record.get("Groups", [])]}
    if as_json:
        print_json(live)
    else:
        print("\n".join(_lines(found, live)))


def _record(state_dir: str, found: str) -> dict[str, Any]:
    """The persist.json of the sandbox, another runtime's and a damaged one, too.

    Raises NotFound without such a file, Internal when it is not a JSON object.
    """
    path = os.path.join(state_dir, found, FILE_NAME)
    try:
        with open(path, "rb") as file:
            record = json_value(file.read(), lambda problem: Internal(f"parse state {path!r}: {problem}"))
    except FileNotFoundError as error:
        raise NotFound(f"read state {path!r}: no sandbox of this id is recorded") from error
    if not isinstance(record, dict):
        raise Internal(f"parse state {path!r}: not a JSON object")
    return record


def summary(record: dict[str, Any], indent: str = "") -> list[str]:
    """One line per fact, nested by indentation; empty values are left out."""
    lines = []
    for key, value in record.items():
        if value in (None, "", [], {}):
            continue
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *summary(value, indent + "  ")]
        elif isinstance(value, list):
            lines.append(f"{indent}{key}:")
            for item in value:
                nested = summary(item, indent + "    ") if isinstance(item, dict) else [f"{indent}    {item}"]
                lines += [f"{indent}  -{nested[0][len(indent) + 3 :]}", *nested[1:]] if nested else []
        else:
            lines.append(f"{indent}{key}: {value}")
    return lines


def _live(group: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a cgroup, with the kernel's present figures."""
    path, roots = str(group["Path"]), tuple(group["Roots"])
    vmm = record.get("Pids", {}).get("vmm", 0)
    threads = cgroup_usage.threads_of(vmm)
    placed = {tid: name for tid, name in threads.items() if cgroup_usage.cgroup_of_thread(vmm, tid) == path}
    vcpus = {tid: number for number, tid in enumerate(record.get("VcpuThreads", []))}
    workers = dict.fromkeys(cgroup_usage.vhost_workers(vmm), "vhost") if vmm else {}
    workers = {tid: name for tid, name in workers.items() if cgroup_usage.cgroup_of_thread(tid, tid) == path}
    return {
        **group,
        "There": cgroup_usage.is_there(path, roots),
        "Usage": dict(cgroup_usage.usage(path)) if group["Role"] != "devices" else {},
        "Processes": {str(pid): cgroup_usage.name_of(pid) for pid in cgroup_usage.processes(path, roots)},
        "VmmThreads": {
            str(tid): f"vCPU {vcpus[tid]}" if tid in vcpus else name for tid, name in {**placed, **workers}.items()
        },
    }


def _lines(sandbox_id: str, record: Mapping[str, Any]) -> Iterator[str]:
    only = "sandbox_cgroup_only" if record.get("SandboxCgroupOnly") else "vCPUs and overhead apart"
    unit = f", unit {record['Unit']}" if record.get("Unit") else ""
    yield f"sandbox {sandbox_id}: cgroup {record['Mode']}, {only}{unit}"
    known = {str(pid): name for name, pid in record.get("Pids", {}).items()}
    for group in record.get("Groups", []):
        gone = "" if group["There"] else "   (is gone)"
        yield f"{group['Role']:<9} {group['Path']}   {_MEANING.get(group['Role'], '')}{gone}"
        if group["Usage"]:
            yield f"    used      {_usage(group['Usage'])}"
        for pid, name in group["Processes"].items():
            if group["Role"] != "sandbox" or record.get("SandboxCgroupOnly") or record["Mode"] == "v2":
                yield f"    process   {pid} {known.get(pid, name)}" + (f" ({name})" if pid in known else "")
        if group["VmmThreads"] and group["Role"] != "devices":
            threads = ", ".join(f"{tid} {name}" for tid, name in group["VmmThreads"].items())
            yield f"    threads   of the vmm: {threads}"
        settings = [each for each in record.get("Settings", []) if each["Role"] == group["Role"]]
        allowed = [each for each in settings if each["File"] == "devices.allow"]
        for each in settings:
            if each not in allowed:
                yield f"    set       {each['File']} = {each['Value'] or '(as above)'}   {each['Source']}"
        if allowed:
            yield "    allowed   " + ", ".join(f"{each['Value']} ({each['Source']})" for each in allowed)
    if record.get("Groups"):
        yield from _outside(record)
    if name := record.get("RdtClass"):
        yield f"rdt       class '{name}'"
    for note in record.get("Notes", []):
        yield f"note      {note}"


def _outside(record: Mapping[str, Any]) -> Iterator[str]:
    pinned = ", ".join(f"vCPU {vcpu} on CPU {cpu}" for vcpu, cpu in record.get("Pinned", {}).items())
    yield f"pinning   {pinned or record.get('Pinning', '')}"
    if numa := record.get("Numa"):
        yield f"numa      {numa['Why']}"
        for number, node in enumerate(
            decoded(numa["Nodes"], tuple[GuestNode, ...], damaged("record of NUMA nodes", Internal))
        ):
            yield f"    node {number:<4} {node_text(node)}"
    outside = [member for member, role in record["Members"].items() if role == "overhead"]
    if outside:
        yield f"outside   {', '.join(outside)}: with sandbox_cgroup_only = false they count as the node's"


def _usage(found: Mapping[str, int]) -> str:
    parts = []
    if "cpu_ns" in found:
        parts.append(f"cpu {found['cpu_ns'] / 1e9:.2f} s")
    if "memory_bytes" in found:
        peak = f" (at most {found['memory_peak_bytes'] // MIB})" if "memory_peak_bytes" in found else ""
        parts.append(f"memory {found['memory_bytes'] // MIB} MiB{peak}")
    if "processes" in found:
        parts.append(f"tasks {found['processes']}")
    parts += [
        f"{text} {found[name]}"
        for name, text in (("throttled_periods", "throttled periods"), ("oom_kills", "OOM kills"))
        if found.get(name)
    ]
    return ", ".join(parts) or "nothing"
