"""`/metrics` of one shim."""

import asyncio
import os
import signal
import subprocess
import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pyshim import __version__
from pyshim.model.errors import DeadlineExceeded, ResourceExhausted, ShimError
from pyshim.model.observation import BOUNDS_MS, AgentCalls, Durations, Health
from pyshim.monitor.answers import ShimAnswers
from pyshim.monitor.shim_metrics import durations_family, process_families
from pyshim.monitor.socket import HttpRequest
from tests.unit.monitor.monitored import FakePod, got

ITEMS = {
    "proc_status": {
        *("hugetlbpages", "nonvoluntary_ctxt_switches", "rssanon", "rssfile", "rssshmem", "vmdata", "vmexe", "vmhwm"),
        *("vmlck", "vmlib", "vmpeak", "vmpin", "vmpmd", "vmpte", "vmrss", "vmsize", "vmstk", "vmswap"),
        "voluntary_ctxt_switches",
    },
    "proc_stat": {"cstime", "cutime", "stime", "utime"},
    "io_stat": {"cancelledwritebytes", "rchar", "readbytes", "syscr", "syscw", "wchar", "writebytes"},
}
"""Kata's, from its page on metrics."""


def scraped(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by sample name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


async def test_processes_have_katas_items(path: str, pod: FakePod) -> None:
    pod.pids = (os.getpid(), os.getpid())

    found = scraped(await got(path, "/metrics"))

    for part in ("shim", "hypervisor", "virtiofsd"):
        for name, items in ITEMS.items():
            assert {dict(labels)["item"] for labels in found[f"kata_{part}_{name}"]} == items
        assert found[f"kata_{part}_threads"][()] >= 1
        assert found[f"kata_{part}_fds"][()] >= 3
    assert found["kata_shim_proc_status"][("item", "vmrss"),] > 1 << 20, "bytes"
    assert found["kata_hypervisor_netdev"][("interface", "lo"), ("item", "recv_bytes")] >= 0


async def test_calls_are_counted_in_katas_buckets(path: str) -> None:
    found = scraped(await got(path, "/metrics"))

    buckets = found["kata_shim_rpc_durations_histogram_milliseconds_bucket"]
    by_bound = {dict(labels)["le"]: count for labels, count in buckets.items()}
    assert by_bound == {str(2**n): float(n >= 2) for n in range(10)} | {"+Inf": 1}
    (labels,) = found["kata_shim_agent_rpc_durations_histogram_milliseconds_count"]
    assert labels == (("action", "grpc.CheckRequest"),)


def test_a_call_counts_at_its_bound_and_above() -> None:
    durations = Durations()
    for milliseconds in (0.5, 1, 1.5, 512, 513):
        durations.took("x", milliseconds / 1000)

    family = durations_family("h", "Help.", durations.all())

    counts = [sample.value for sample in family.samples if sample.suffix == "_bucket"]
    assert counts == [2, 3, 3, 3, 3, 3, 3, 3, 3, 4, 5]
    assert len(BOUNDS_MS) == 10


async def test_the_shims_own_are_there(path: str) -> None:
    found = scraped(await got(path, "/metrics"))

    assert found["pyshim_vm_vcpus"] == {
        (("size", "requested"),): 1.5,
        (("size", "booted"),): 1,
        (("size", "current"),): 2,
        (("size", "limit"),): 8,
    }
    assert found["pyshim_vm_memory_bytes"][("size", "booted"),] == 256 << 20
    assert found["pyshim_start_phase_seconds"] == {(("phase", "create"),): 2.0, (("phase", "wait for agent"),): 1.5}
    assert found["pyshim_ledger_entries"] == {(("kind", "mount"),): 3}
    assert found["pyshim_stream_bytes_total"] == {(("container", "c1"), ("stream", "stdout")): 42}
    assert found["pyshim_build_info"] == {(("version", __version__),): 1}
    assert found["pyshim_guest_metrics_whole"] == {(): 1}
    assert found["kata_guest_load"] == {(("item", "load1"),): 0.5}


@pytest.mark.parametrize(
    ("guest", "named"),
    [
        (DeadlineExceeded("get metrics of guest: no reply within 2 s"), "no reply within 2 s"),
        (ResourceExhausted("get metrics of guest: 104857600 bytes\nare above the limit"), "104857600 bytes are above"),
        ("\x00\xff nonsense\nkata_guest_load 1\n", "1 lines are left out"),
        ('kata_shim_fds 1\npyshim_containers{x="y"} 99\n', "2 lines are left out"),
    ],
    ids=["hangs", "floods", "nonsense", "lies"],
)
async def test_a_bad_guest_is_named_and_the_others_answer(
    guest: str | ShimError, named: str, path: str, pod: FakePod
) -> None:
    pod.guest = guest

    text = await got(path, "/metrics")

    found = scraped(text)
    assert found["pyshim_guest_metrics_whole"] == {(): 0}
    assert found["pyshim_containers"] == {(): 2}
    assert found["kata_shim_fds"][()] > 1
    (comment,) = [line for line in text.splitlines() if line.startswith("# pyshim: ")]
    assert named in comment


def test_a_process_that_is_gone_has_no_metrics() -> None:
    assert process_families(1 << 30, "kata_hypervisor", "the VMM") == []


async def test_many_scrapes_at_a_time_are_answered(path: str) -> None:
    texts = await asyncio.gather(*(got(path, "/metrics") for _ in range(8)))

    assert all("pyshim_containers 2" in text for text in texts)


async def test_the_agent_is_asked_where_its_last_answer_is_not_new() -> None:
    now_s, pod = [100.0], FakePod()
    calls = AgentCalls(clock=lambda: now_s[0])
    answers = ShimAnswers(pod, calls=Durations(), agent_calls=calls)

    async def health() -> Health:
        reply = await answers.answer(HttpRequest(method="GET", target="/health", body=b""))
        return msgspec.json.decode(reply.body, type=Health)

    pod.guest = DeadlineExceeded("check agent: no reply within 1 s")
    assert await health() == Health(agent_age_s=None, problem="check agent: no reply within 1 s")
    calls.answered()
    now_s[0] += 20
    assert await health() == Health(agent_age_s=20, problem="")
    assert pod.checks == 1
    now_s[0] += 20
    assert await health() == Health(agent_age_s=40, problem="check agent: no reply within 1 s")


def test_a_slow_agent_is_seen_in_the_percentiles() -> None:
    calls = AgentCalls(time.monotonic)
    assert calls.percentiles() == {}
    for number in range(1, 101):
        calls.took("grpc.CheckRequest", number / 100)
        calls.took("grpc.CreateContainerRequest", 30)

    assert calls.percentiles() == {50: 0.5, 90: 0.9, 99: 0.99}


async def test_a_stopped_helper_is_a_metric(sleeper: "subprocess.Popen[bytes]") -> None:
    pod = FakePod()
    pod.pids = (sleeper.pid, os.getpid())
    sleeper.send_signal(signal.SIGSTOP)
    try:
        await asyncio.to_thread(os.waitid, os.P_PID, sleeper.pid, os.WSTOPPED)
        reply = await ShimAnswers(pod, calls=Durations(), agent_calls=AgentCalls(time.monotonic)).answer(
            HttpRequest(method="GET", target="/metrics", body=b"")
        )
    finally:
        sleeper.send_signal(signal.SIGCONT)

    assert scraped(reply.body.decode())["pyshim_process_stopped"] == {
        (("process", "vmm"),): 1.0,
        (("process", "virtiofsd"),): 0.0,
    }
