"""Pods on stand-ins, made by calls of the Task API: what is left is the shim's own share.

The stand-ins are those of `integration/framework/stubs.py`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from google.protobuf.any_pb2 import Any as PbAny

from bench.measures import PYKATA, Ground, cpu_s
from integration.framework import oci
from integration.framework.direct import DirectShim, direct_shim, wait_until_gone
from protos.containerd import runtimeoptions_pb2

_numbers = itertools.count(1)
WITHIN_S = 120.0
_IDLE_S = 0.1
"""A process that uses no CPU time for so long has nothing left to do."""


@contextmanager
def started_shim(ground: Ground) -> Iterator[DirectShim]:
    """A shim that serves and has nothing yet; its pods use the configuration of `ground`."""
    name = f"stub{next(_numbers)}"
    bundle = ground.directory / name
    with direct_shim(PYKATA, ground.binaries, name, bundle, config=sleeping(name)) as shim:
        shim.start(options(ground.config))
        yield shim
    wait_until_gone(shim)


def sleeping(name: str) -> oci.Spec:
    """The spec of a container that sleeps, in a network namespace that nothing is connected to."""
    spec = oci.spec("sleep", "100000", name=name, rootfs="rootfs")
    spec["linux"]["namespaces"] = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]
    return spec


def options(config: Path) -> PbAny:
    """The options of Create that name the configuration, as containerd encodes them."""
    chosen = runtimeoptions_pb2.Options(config_path=str(config))
    return PbAny(type_url="runtimeoptions.v1.Options", value=chosen.SerializeToString())


async def create_and_start(shim: DirectShim, config: Path) -> float:
    """Seconds from the call of Create to the reply of Start."""
    encoded = options(config)
    started = time.monotonic()
    await shim.ask("Create", None, WITHIN_S, bundle=str(shim.bundle), options=encoded)
    await shim.ask("Start", None, WITHIN_S)
    return time.monotonic() - started


def create_s(ground: Ground) -> float:
    """Create and Start of one sandbox, by a shim that is up and has answered a call."""
    with started_shim(ground) as shim:
        warm(shim)
        (wall_s,) = shim.together(lambda: create_and_start(shim, ground.config))
        return float(wall_s)


def together_s(ground: Ground, count: int) -> float:
    """Seconds for Create and Start of `count` sandboxes, each with its own shim, all called at the same moment."""
    with ExitStack() as end:
        shims = [end.enter_context(started_shim(ground)) for _ in range(count)]
        for shim in shims:
            warm(shim)

        # Each shim's client has its own loop.
        with ThreadPoolExecutor(count) as pool:
            started = time.monotonic()
            list(pool.map(lambda shim: shim.together(lambda: create_and_start(shim, ground.config)), shims))
            return time.monotonic() - started


@contextmanager
def running(ground: Ground, count: int) -> Iterator[list[int]]:
    """Pids of `count` shims, each with a pod that sleeps."""
    with ExitStack() as end:
        pids = []
        for _ in range(count):
            shim = end.enter_context(started_shim(ground))
            shim.together(lambda shim=shim: create_and_start(shim, ground.config))  # type: ignore[misc]
            (daemon,) = PYKATA.shims(shim.container)
            pids.append(daemon.pid)
        yield pids


def warm(shim: DirectShim) -> None:
    """The shim is up: it has answered NotFound for a container, and it uses no more CPU time."""
    try:
        shim.call("State")
    except Exception as error:
        if "no such" not in str(error):
            raise
    (daemon,) = PYKATA.shims(shim.container)
    wait_until_idle(daemon.pid)


def wait_until_idle(pid: int, during_s: float = _IDLE_S) -> None:
    """The process has used no CPU time for `during_s`."""
    before_s, used_s = -1.0, cpu_s(pid)
    while used_s != before_s:
        time.sleep(during_s)
        before_s, used_s = used_s, cpu_s(pid)


def wakeups(pid: int, during_s: float) -> int:
    """How often the process's threads went to sleep again within `during_s`, so how often something woke them."""
    before = _switches(pid)
    time.sleep(during_s)
    return _switches(pid) - before


def _switches(pid: int) -> int:
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total
