"""Pods as Kubernetes has them: a sandbox and two containers with output streams, on stand-ins.

The stand-ins are those of `integration/framework/stubs.py`.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from bench.measures import PYKATA, Ground
from bench.stub_pods import WITHIN_S, options, sleeping, warm
from integration.framework import oci
from integration.framework.direct import DirectShim, direct_shim, wait_until_gone

_numbers = itertools.count(1)
_CONTAINERS = ("one", "two")
_ZYGOTE_WITHIN = {"PYSHIM_ZYGOTE_WITHIN_S": "60"}
"""A crowded machine must not turn a forked shim into an executed one: this is about memory."""


class Pod(NamedTuple):
    """One shim and its pod, whose sandbox runs."""

    ground: Ground
    shim: DirectShim
    pid: int

    @contextmanager
    def container(self, name: str) -> Iterator[None]:
        """A container of the pod runs meanwhile, with a reader for both of its output streams."""
        bundle = self.ground.directory / name
        (bundle / "rootfs").mkdir(parents=True)
        oci.write(spec_of(name, self.shim.container, "container"), bundle)
        with ExitStack() as end:
            end.callback(shutil.rmtree, bundle)
            streams = {}
            for stream in ("stdout", "stderr"):
                streams[stream] = str(bundle / stream)
                os.mkfifo(streams[stream])
                end.callback(os.close, os.open(streams[stream], os.O_RDWR))
            self.call("Create", id=name, bundle=str(bundle), options=options(self.ground.config), **streams)
            self.call("Start", id=name)
            try:
                yield
            finally:
                self.call("Kill", id=name, signal=9, all=True)
                self.call("Wait", id=name)
                self.call("Delete", id=name)

    def exec(self, container: str) -> None:
        """A process was added to the container, and has ended."""
        self.call("Exec", id=container, exec_id="e1", spec=oci.process("true"))
        for method in ("Start", "Wait", "Delete"):
            self.call(method, id=container, exec_id="e1")

    def call(self, method: str, **fields: Any) -> None:
        """A call of the Task API has been answered well."""
        self.shim.call(method, None, WITHIN_S, **fields)


@contextmanager
def running(ground: Ground, count: int) -> Iterator[list[int]]:
    """Pids of `count` shims, each with an idle pod of two containers."""
    with ExitStack() as end:
        pids: list[int] = []
        for _ in range(count):
            one = end.enter_context(pod(ground))
            for short in _CONTAINERS:
                end.enter_context(one.container(f"{one.shim.container}-{short}"))
            pids.append(one.pid)
        yield pids


@contextmanager
def pod(ground: Ground) -> Iterator[Pod]:
    """A pod without containers."""
    name = f"pod{next(_numbers)}"
    bundle = ground.directory / name
    with direct_shim(PYKATA, ground.binaries, name, bundle, spec_of(name, name, "sandbox")) as shim:
        shim.environment.update(_ZYGOTE_WITHIN)
        shim.start(options(ground.config))
        warm(shim)
        (daemon,) = PYKATA.shims(name)
        one = Pod(ground, shim, daemon.pid)
        one.call("Create", bundle=str(bundle), options=options(ground.config))
        one.call("Start")
        yield one
    wait_until_gone(shim)


def spec_of(name: str, sandbox: str, kind: str) -> oci.Spec:
    """The spec of a `kind` ("sandbox" or "container") of a pod, as the CRI plugin annotates it."""
    spec = sleeping(name)
    keys = {"container-type": kind, "sandbox-id": sandbox, "sandbox-name": "web", "sandbox-namespace": "shop"}
    if kind == "container":
        keys["container-name"] = name
    spec["annotations"] = {f"io.kubernetes.cri.{key}": value for key, value in keys.items()}
    return spec
