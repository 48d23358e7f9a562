"""The figures of a pod at one moment, for metrics."""

from collections.abc import Mapping

import msgspec

from pyshim.model.trace import Span

MONITOR_SOCKET = "shim-monitor.sock"
"""The name of the socket in a sandbox's directory of state, by which Kata's own programs find it."""
METRICS_DIRECTORY = "/run/pyshim/metrics"
"""Each sandbox has a socket of its id here, which only answers questions: a monitor needs no other access."""
MAX_MONITOR_BODY_BYTES = 2 << 20
"""Bytes of a request's body: a policy or a table of iptables rules, which has to fit into one ttrpc message."""


FRESH_S = 30.0
"""Seconds for which an agent's answer says that it is well."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The shim's answer at `/health`."""

    agent_age_s: float | None
    """Since the agent last answered; None when it never did."""
    problem: str
    """Why it did not answer now; empty when it did, or was not asked again."""


class SizeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension of a VM: vCPUs, or MiB of memory."""

    requested: float
    """Requested by the pod, with the configuration's base."""
    booted: int
    current: int
    limit: int
    """The most it may grow to."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    vmm_pid: int
    """0 where no VMM runs on this host."""
    virtiofsd_pid: int
    """0 without one."""
    vcpus: SizeFigures
    memory_mib: SizeFigures
    is_cloned: bool
    """Its guest did not boot: it continued from a template."""
    containers: int
    ledger: Mapping[str, int]
    """Entries by kind."""
    spans: tuple[Span, ...]
    streams: Mapping[tuple[str, str], int]
    """Bytes that a container's processes have moved, by container and stream."""
    oom_kills: Mapping[str, int]
    """Count of each container."""
    missed_checks: int
    """Health checks that the guest's agent did not pass."""
