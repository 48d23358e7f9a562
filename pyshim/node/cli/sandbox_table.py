"""A sandbox as a row of `pyshim list` and `top`, and as JSON."""

from pyshim.node.cli.sandboxes import SandboxRow
from pyshim.node.cli.usage import Usage

HEADINGS = ("ID", "POD", "AGE", "CONTAINERS", "ASKED", "VM", "START", "CPU", "MEMORY", "AGENT", "HEALTH")
NUMBERS = ("AGE", "CONTAINERS", "ASKED", "VM", "CPU", "MEMORY", "AGENT")
_SHORT_ID = 13
"""Characters of an id on a terminal. Every verb accepts the beginning of an id."""


def cells(sandbox: SandboxRow, usage: Usage, *, now_ns: int, whole_ids: bool) -> tuple[str, ...]:
    return (
        sandbox.id if whole_ids else sandbox.id[:_SHORT_ID],
        sandbox.pod or "-",
        age_text((now_ns - sandbox.started_ns) // 10**9) if sandbox.started_ns else "-",
        str(sandbox.containers),
        f"{sandbox.requested_vcpus:g} / {sandbox.requested_memory_mib:.0f}Mi" if sandbox.vcpus else "-",
        f"{sandbox.vcpus} / {sandbox.memory_mib}Mi" if sandbox.vcpus else "-",
        "clone" if sandbox.origin.startswith("cloned") else "boot" if sandbox.origin else "-",
        f"{usage.cpu_percent:.1f}%" if sandbox.processes else "-",
        f"{usage.memory_mib}Mi" if sandbox.processes else "-",
        "-" if sandbox.agent_age_s is None else age_text(int(sandbox.agent_age_s)),
        sandbox.health,
    )


def as_document(sandbox: SandboxRow, usage: Usage, *, now_ns: int) -> dict[str, object]:
    """The sandbox as a JSON object."""
    return {
        "id": sandbox.id,
        "pod": sandbox.pod,
        "containers": sandbox.containers,
        "age_s": max(now_ns - sandbox.started_ns, 0) // 10**9 if sandbox.started_ns else None,
        "requested": {"vcpus": sandbox.requested_vcpus, "memory_mib": sandbox.requested_memory_mib},
        "vm": {"vcpus": sandbox.vcpus, "memory_mib": sandbox.memory_mib},
        "release": sandbox.release,
        "origin": sandbox.origin,
        "used": {"cpu_percent": usage.cpu_percent, "memory_mib": usage.memory_mib},
        "agent_age_s": sandbox.agent_age_s,
        "health": sandbox.health,
    }


def age_text(seconds: int) -> str:
    """An age with one unit, in the form of kubectl: `42s`, `7m`, `3h`, `12d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{max(seconds, 0)}s"
