"""Shims that have served much are no larger than those that have served little: executed ones, in every run.

A forked shim's own memory also grows by what it has shared with the zygote and writes to for the first time, which two
looks at it cannot distinguish from growth.
"""

from __future__ import annotations

import pytest

from .framework import cri_soak, soak
from .framework.cri import Cri
from .framework.leaks import HostState, assert_nothing_left
from .framework.runtime import Runtime

pytestmark = pytest.mark.vm
ROUNDS = 12
_PODS, _CONTAINERS = 1, 2


def test_pods_created_and_removed_twice_leave_nothing_and_no_shim_grows(cri: Cri, runtime: Runtime) -> None:
    """The full size is `python -m integration.framework.cri_soak 20 3 2`; the sizes here fit an emulated guest."""
    first = cri_soak.one_round(cri, runtime, pods=_PODS, containers=_CONTAINERS)
    before = HostState.look()  # the first pods of all also leave what CNI and containerd keep from then on
    second = cri_soak.one_round(cri, runtime, pods=_PODS, containers=_CONTAINERS)

    assert_nothing_left(before, (cri.daemon.directories.root,))
    cri_soak.assert_flat([first, second])


def test_a_shim_does_not_grow_with_the_containers_it_has_served(cri: Cri, runtime: Runtime) -> None:
    with cri.pod() as pod:
        (shim,) = runtime.shims(pod.id)

        def serve(count: int) -> int:
            for _ in range(count):
                container = pod.start("true")
                assert container.exit_code() == 0
            pod.remove_containers()
            return cri_soak.private_kib(shim.pid)

        serve(3)
        early = serve(6)
        late = serve(6)

    assert late <= early + cri_soak.NOISE_KIB


@pytest.mark.timeout(600)
def test_rounds_of_a_container_in_one_pod_keep_no_descriptor_and_no_memory(soak_ground: soak.Ground) -> None:
    warm, last = soak.rounds(soak_ground, ROUNDS)

    soak.assert_flat(warm, last, ROUNDS)
