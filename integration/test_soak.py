"""A small part of `make soak`: pods that lose a part at a random moment, and rounds of a container in one pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from .framework import soak
from .framework.containerd import Containerd
from .framework.runtime import Runtime

LOSSES = {"shim": 10, "vmm": 2, "virtiofsd": 1, "frozen": 1, "agent": 1}
SEED = 20_240_607
ROUNDS = 12


@pytest.fixture
def ground(runtime: Runtime, containerd: Containerd, scratch: Path, plain_rootfs: Path) -> soak.Ground:
    return soak.Ground(runtime=runtime, directory=scratch, rootfs=plain_rootfs)


@pytest.mark.vm
@pytest.mark.timeout(900)
def test_pods_that_lose_a_part_at_a_random_moment_leave_nothing(ground: soak.Ground) -> None:
    found = list(soak.losses(ground, LOSSES, seed=SEED, life_s=soak.undisturbed(ground)))

    assert len(found) == sum(LOSSES.values())
    assert any(loss.met for loss in found if loss.victim == "shim")
    assert not [str(loss) for loss in found if loss.problem]


@pytest.mark.vm
@pytest.mark.timeout(600)
def test_rounds_of_a_container_in_one_pod_keep_no_descriptor_and_no_memory(ground: soak.Ground) -> None:
    warm, last = soak.rounds(ground, ROUNDS)

    soak.assert_flat(warm, last, ROUNDS)
