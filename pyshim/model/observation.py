"""The figures of one pod for its metrics, and the constants of its monitor socket."""

from collections.abc import Mapping

import msgspec

from pyshim.model.trace import Span

MONITOR_SOCKET = "shim-monitor.sock"
"""The socket's name in a sandbox's state directory, where Kata's programs look for it."""
METRICS_DIRECTORY = "/run/pyshim/metrics"
"""Has a read-only socket for each sandbox, named after its id: a monitor needs no other access."""
MAX_MONITOR_BODY_BYTES = 2 << 20
"""The largest body of a request: a policy or iptables rules, which must fit into one ttrpc message."""
FRESH_S = 30.0
"""Seconds after an answer within which the agent counts as healthy."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/health`."""

    agent_age_s: float | None
    """Seconds since the agent's last answer; None before the first."""
    problem: str
    """Why the agent did not answer this time; empty if it did, or if it was not asked."""


class SizeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A VM's number of vCPUs, or its MiB of memory."""

    requested: float
    """The exact sum of the configuration's base and the pod's request."""
    booted: int
    current: int
    limit: int
    """The largest size that the VM can grow to."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    vmm_pid: int
    """0 if no VMM runs on this host."""
    virtiofsd_pid: int
    """0 without one."""
    vcpus: SizeFigures
    memory_mib: SizeFigures
    is_cloned: bool
    """The guest continued from a template instead of booting."""
    containers: int
    ledger: Mapping[str, int]
    """The number of entries by kind."""
    spans: tuple[Span, ...]
    streams: Mapping[tuple[str, str], int]
    """Bytes transferred, by container and stream."""
    oom_kills: Mapping[str, int]
    """The number of OOM kills, by container."""
    missed_checks: int
    """The number of health checks that the agent failed."""
