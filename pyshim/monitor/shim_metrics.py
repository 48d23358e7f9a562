"""One shim's `/metrics`: Kata's metrics of shim, VMM and virtiofsd, and pyshim's own."""

from collections.abc import Mapping

from pyshim.host.processes.stat import is_stopped
from pyshim.model.observation import BOUNDS_MS, AgentCalls, Duration, Observation, SizeFigures, Span
from pyshim.model.units import MIB
from pyshim.monitor.exposition import Family, Sample, gauge, gauges
from pyshim.monitor.processes import netdev_family, own_families, process_families


def shim_families(
    *,
    calls: Mapping[str, Duration],
    agent_calls: AgentCalls,
    pod: Observation,
    pid: int,
) -> list[Family]:
    """`calls` are containerd's to this shim, whose process is `pid`; `agent_calls` are the shim's to the agent."""
    found = [
        durations_family("kata_shim_rpc_durations_histogram_milliseconds", "Time of containerd's calls.", calls),
        *process_families(pid, "kata_shim", "the shim"),
        *own_families("kata_shim"),
        durations_family(
            "kata_shim_agent_rpc_durations_histogram_milliseconds", "Time of calls to the agent.", agent_calls.all()
        ),
        *_answers(agent_calls),
        gauges(
            "pyshim_process_stopped",
            "1 when the process is stopped, by SIGSTOP or a debugger.",
            "process",
            {name: int(is_stopped(pid)) for name, pid in _helpers(pod).items()},
        ),
    ]
    if pod.vmm_pid:
        found += process_families(pod.vmm_pid, "kata_hypervisor", "the VMM")
        found.append(netdev_family(pod.vmm_pid, "kata_hypervisor_netdev"))
    if pod.virtiofsd_pid:
        found += process_families(pod.virtiofsd_pid, "kata_virtiofsd", "virtiofsd")
    return found + _own(pod)


def _answers(calls: AgentCalls) -> list[Family]:
    found = [
        gauges(
            "pyshim_agent_answer_seconds",
            "Time that the agent's latest answers to health checks and scrapes took.",
            "percentile",
            {str(each): seconds for each, seconds in calls.percentiles().items()},
        )
    ]
    age_s = calls.age_s()
    if age_s is not None:
        found.append(gauge("pyshim_agent_answer_age_seconds", "Time since the agent's last answer.", age_s))
    return found


def _helpers(pod: Observation) -> dict[str, int]:
    pids = {"vmm": pod.vmm_pid, "virtiofsd": pod.virtiofsd_pid}
    return {name: pid for name, pid in pids.items() if pid}


def _own(pod: Observation) -> list[Family]:
    return [
        _size("pyshim_vm_vcpus", "vCPUs of the VM.", pod.vcpus, 1),
        _size("pyshim_vm_memory_bytes", "Memory of the VM in bytes.", pod.memory_mib, MIB),
        gauges(
            "pyshim_start_phase_seconds",
            "Time of each step from Create to the first output, of the pod's first container.",
            "phase",
            phases(pod.spans),
        ),
        gauge("pyshim_vm_cloned", "1 when the guest continued from a template, 0 when it booted.", int(pod.is_cloned)),
        gauge("pyshim_containers", "Containers of the pod, the sandbox's included.", pod.containers),
        gauges("pyshim_ledger_entries", "Host resources that the sandbox holds.", "kind", pod.ledger),
        Family(
            "pyshim_stream_bytes_total",
            "counter",
            "Bytes of a container's processes that have reached their reader.",
            tuple(
                Sample({"container": name, "stream": stream}, moved) for (name, stream), moved in pod.streams.items()
            ),
        ),
        Family(
            "pyshim_oom_kills_total",
            "counter",
            "Out-of-memory kills in a container.",
            tuple(Sample({"container": name}, kills) for name, kills in pod.oom_kills.items()),
        ),
        Family(
            "pyshim_health_checks_missed_total",
            "counter",
            "Health checks that the agent did not pass; after three in a row the sandbox ends.",
            (Sample({}, pod.missed_checks),),
        ),
    ]


def guest_family(is_whole: bool) -> Family:
    return gauge(
        "pyshim_guest_metrics_whole", "1 when the guest's metrics are all here, 0 when some are missing.", int(is_whole)
    )


def durations_family(name: str, help_text: str, calls: Mapping[str, Duration], *, in_seconds: bool = False) -> Family:
    """A histogram with Kata's buckets, one for each action, in ms or seconds; an action "" has no label."""
    unit_ms = 1000 if in_seconds else 1
    bounds = (*(f"{bound / unit_ms:g}" for bound in BOUNDS_MS), "+Inf")
    samples: list[Sample] = []
    for action, took in calls.items():
        labels = {"action": action} if action else {}
        total = 0
        for bound, count in zip(bounds, took.counts, strict=True):
            total += count
            samples.append(Sample({**labels, "le": bound}, total, "_bucket"))
        samples += [Sample(labels, took.sum_ms / unit_ms, "_sum"), Sample(labels, total, "_count")]
    return Family(name, "histogram", help_text, tuple(samples))


def phases(spans: tuple[Span, ...]) -> dict[str, float]:
    """Seconds by step, without the id in its name: the first step of each name that has ended."""
    found: dict[str, float] = {}
    for span in spans:
        if span.end_ns:
            name = span.name.partition(" ")[0] if span.parent < 0 else span.name
            found.setdefault(name, max(span.end_ns - span.start_ns, 0) / 1e9)
    return found


def _size(name: str, help_text: str, size: SizeFigures, unit: int) -> Family:
    return gauges(
        name,
        help_text,
        "size",
        {
            "requested": size.requested * unit,
            "booted": size.booted * unit,
            "current": size.current * unit,
            "limit": size.limit * unit,
        },
    )
