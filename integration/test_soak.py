"""A small part of `make soak`: pods that lose a part at a random moment."""

from __future__ import annotations

import pytest

from .framework import soak

LOSSES = {"shim": 10, "vmm": 2, "virtiofsd": 1, "frozen": 1, "agent": 1}
SEED = 20_240_607


@pytest.mark.vm
@pytest.mark.timeout(900)
def test_pods_that_lose_a_part_at_a_random_moment_leave_nothing(soak_ground: soak.Ground) -> None:
    found = list(soak.losses(soak_ground, LOSSES, seed=SEED, life_s=soak.undisturbed(soak_ground)))

    assert len(found) == sum(LOSSES.values())
    assert any(loss.met for loss in found if loss.victim == "shim")
    assert not [str(loss) for loss in found if loss.problem]
