"""Pods as Kubernetes has them, on the stand-ins of `stubs.py`: a sandbox and two containers with output streams."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from google.protobuf.any_pb2 import Any as PbAny

from bench.measures import PYKATA, Ground
from integration.framework import oci
from integration.framework.direct import DirectShim, direct_shim, wait_until_gone
from protos.containerd import runtimeoptions_pb2
from pyshim.ttrpc import TtrpcError

_numbers = itertools.count(1)
_WITHIN_S = 120.0
_CONTAINERS = ("one", "two")
_ZYGOTE_WITHIN = {"PYSHIM_ZYGOTE_WITHIN_S": "60"}
"""A crowded machine must not turn a forked shim into an executed one: this is about memory."""


@contextmanager
def running(ground: Ground, count: int, watch: Callable[[str, int], None] | None = None) -> Iterator[list[int]]:
    """Pids of `count` shims, each with an idle pod of two containers.

    `watch` is told of the first one's phases, as each is over: its name and the pid.
    """
    with ExitStack() as end:
        pids: list[int] = []
        for _ in range(count):
            pids.append(end.enter_context(_pod(ground, watch if not pids else None)))
        yield pids


@contextmanager
def _pod(ground: Ground, watch: Callable[[str, int], None] | None) -> Iterator[int]:
    name = f"pod{next(_numbers)}"
    options = PbAny(
        type_url="runtimeoptions.v1.Options",
        value=runtimeoptions_pb2.Options(config_path=str(ground.config)).SerializeToString(),
    )
    with ExitStack() as end:
        shim = end.enter_context(
            direct_shim(PYKATA, ground.binaries, name, ground.directory / name, _spec(name, name, "sandbox"))
        )
        shim.environment.update(_ZYGOTE_WITHIN)
        shim.start()
        (daemon,) = PYKATA.shims(name)

        def over(phase: str) -> None:
            if watch is not None:
                watch(phase, daemon.pid)

        with suppress(TtrpcError):  # it knows no such container, so it is up
            shim.call("State")
        over("serves, asked once")
        shim.call("Create", None, _WITHIN_S, bundle=str(shim.bundle), options=options)
        shim.call("Start", None, _WITHIN_S)
        over("sandbox runs")
        for short in _CONTAINERS:
            end.enter_context(_container(ground, shim, f"{name}-{short}", options))
            over(f"container {short} runs")
        yield daemon.pid
    wait_until_gone(shim)


@contextmanager
def _container(ground: Ground, shim: DirectShim, name: str, options: PbAny) -> Iterator[None]:
    """Runs until the end, which is the pod's: both streams have a reader meanwhile."""
    bundle = ground.directory / name
    (bundle / "rootfs").mkdir(parents=True)
    oci.write(_spec(name, shim.container, "container"), bundle)
    with ExitStack() as end:
        streams = {}
        for stream in ("stdout", "stderr"):
            streams[stream] = str(bundle / stream)
            os.mkfifo(streams[stream])
            end.callback(os.close, os.open(streams[stream], os.O_RDWR))
        shim.call("Create", None, _WITHIN_S, id=name, bundle=str(bundle), options=options, **streams)
        shim.call("Start", None, _WITHIN_S, id=name)
        try:
            yield
        finally:
            shim.call("Kill", None, _WITHIN_S, id=name, signal=9, all=True)
            shim.call("Wait", None, _WITHIN_S, id=name)
            shim.call("Delete", None, _WITHIN_S, id=name)


def _spec(name: str, sandbox: str, kind: str) -> oci.Spec:
    spec = oci.spec("sleep", "100000", name=name, rootfs="rootfs")
    spec["linux"]["namespaces"] = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
    keys = {"container-type": kind, "sandbox-id": sandbox, "sandbox-name": "web", "sandbox-namespace": "shop"}
    if kind == "container":
        keys["container-name"] = name
    spec["annotations"] = {f"io.kubernetes.cri.{key}": value for key, value in keys.items()}
    return spec
