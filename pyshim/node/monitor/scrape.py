"""Scrapes all shims of the node at the same time, each with a deadline, into one text."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pyshim.model.errors import NotFound, ShimError
from pyshim.model.observation import Durations
from pyshim.model.oci import PodName
from pyshim.monitor.exposition import Family, Sample, TextFamily, filtered, gauge, text_of
from pyshim.monitor.shim_metrics import durations_family, listener_is_stopped, own_families
from pyshim.node.monitor.merge import Merge, SandboxMetrics
from pyshim.node.monitor.shims import shim_answer

SHIM_S = 5.0
"""Seconds for one shim: it gives its guest two, Prometheus gives a scrape ten."""
MAX_SAMPLES = 20_000
"""Samples of one shim: the guest's 10,000 and a few hundred of its own."""
NODE_SAMPLES = 200_000
"""Samples of all shims together, which take the monitor 200 MiB while it makes its answer. Each has an equal share."""
USUAL_SAMPLES = 1_500
"""Samples that each shim may have on any node: those of a shim and of kata-agent, which has about 1,000."""
PREFIXES = ("kata_shim_", "kata_hypervisor_", "kata_virtiofsd_", "kata_agent_", "kata_guest_", "pyshim_")


class _Scraped(NamedTuple):
    families: Mapping[str, TextFamily]
    took_s: float
    is_up: bool
    is_stopped: bool = False
    is_whole: bool = True


class Scrapes:
    """Scrapes all shims, and counts scrapes and failures under kata-monitor's names."""

    def __init__(self) -> None:
        self._count = 0
        self._failed = 0
        self._durations = Durations()
        self._merge = Merge()

    async def text(self, sockets: Mapping[str, str], names: Mapping[str, PodName]) -> str:
        """The metrics of the monitor and of all shims. A shim's samples have labels that name its sandbox."""
        begin_s = time.monotonic()
        self._count += 1
        most = min(MAX_SAMPLES, max(USUAL_SAMPLES, NODE_SAMPLES // max(len(sockets), 1)))
        results = await asyncio.gather(*(self._scraped(path, most) for path in sockets.values()))
        labels = {
            sandbox_id: {
                "sandbox_id": sandbox_id,
                "cri_uid": names[sandbox_id].uid,
                "cri_name": names[sandbox_id].name,
                "cri_namespace": names[sandbox_id].namespace,
            }
            for sandbox_id in sockets
        }
        found = {sandbox_id: one for sandbox_id, one in zip(sockets, results, strict=True) if one is not None}
        self._failed += sum(not one.is_up for one in found.values())
        shims = await asyncio.to_thread(
            self._merge.text,
            [SandboxMetrics(sandbox_id, labels[sandbox_id], one.families) for sandbox_id, one in found.items()],
        )
        self._durations.took("", time.monotonic() - begin_s)
        return text_of(self._own(labels, found)) + shims

    def _own(self, labels: Mapping[str, Mapping[str, str]], found: Mapping[str, _Scraped]) -> list[Family]:
        def of_each(name: str, help_text: str, value: Callable[[_Scraped], float]) -> Family:
            samples = (Sample(labels[sandbox_id], value(one)) for sandbox_id, one in found.items())
            return Family(name, "gauge", help_text, tuple(samples))

        def count(name: str, help_text: str, value: int) -> Family:
            return Family(name, "counter", help_text, (Sample({}, value),))

        return [
            gauge("kata_monitor_running_shim_count", "Sandboxes of this node.", len(found)),
            count("kata_monitor_scrape_count", "Scrapes.", self._count),
            count("kata_monitor_scrape_failed_count", "Shims that did not answer a scrape.", self._failed),
            durations_family(
                "kata_monitor_scrape_durations_histogram_milliseconds",
                "Time of a scrape of all shims.",
                self._durations.all(),
            ),
            *own_families("kata_monitor"),
            of_each(
                "pyshim_monitor_shim_up", "1 when the shim of the sandbox has answered.", lambda one: int(one.is_up)
            ),
            of_each(
                "pyshim_monitor_shim_stopped",
                "1 when the shim did not answer because it is stopped, by SIGSTOP or a debugger.",
                lambda one: int(one.is_stopped),
            ),
            of_each(
                "pyshim_monitor_shim_whole",
                "1 when all that the shim has answered is in this answer.",
                lambda one: int(one.is_whole),
            ),
            of_each(
                "pyshim_monitor_shim_scrape_seconds", "Time of the shim's answer.", lambda one: round(one.took_s, 6)
            ),
        ]

    async def _scraped(self, path: str, most: int) -> _Scraped | None:
        """With `most` samples, the shim's own first. None for a sandbox that has ended meanwhile."""
        begin_s = time.monotonic()
        try:
            text = await shim_answer(path, "/metrics", within_s=SHIM_S)
        except NotFound:
            return None
        except ShimError:
            return _Scraped({}, time.monotonic() - begin_s, False, listener_is_stopped(path))
        took_s = time.monotonic() - begin_s
        answer = await asyncio.to_thread(filtered, text, PREFIXES, composed=True, most=most)
        return _Scraped(answer.families, took_s, True, is_whole=not answer.problem)
