"""A small part of `make peers WHAT=soak`: pods that lose a part at a random moment."""

from __future__ import annotations

import random
import threading
from collections import Counter
from functools import partial
from itertools import cycle

import pytest

from .framework import cri_losses, soak
from .framework.cri import Cri
from .framework.runtime import Runtime
from .framework.waiting import eventually

# One of them needs CRI's containerd, which is to be there before the file's first look at the host.
pytestmark = pytest.mark.usefixtures("cri")

LOSSES = {"shim": 2, "frozen": 1, "agent": 1}
SEED = 20_240_607


@pytest.mark.vm
@pytest.mark.timeout(900)
def test_pods_that_lose_a_part_at_a_random_moment_leave_nothing(soak_ground: soak.Ground) -> None:
    found = list(soak.losses(soak_ground, LOSSES, seed=SEED, life_s=soak.undisturbed(soak_ground)))

    assert len(found) == sum(LOSSES.values())
    assert any(loss.met for loss in found if loss.victim == "shim")
    assert not [str(loss) for loss in found if loss.problem]


@pytest.mark.vm
@pytest.mark.timeout(600)
def test_what_is_left_of_a_kubelets_pod_that_lost_a_part_can_be_removed(cri: Cri, runtime: Runtime) -> None:
    chance, there_s = random.Random(SEED), cri_losses.undisturbed(cri, runtime)

    found = [
        cri_losses.lose(cri, runtime, victim, chance.uniform(0, there_s[victim]))
        for victim in ("shim", "vmm", "containerd")
    ]

    assert any(loss.met for loss in found)
    assert not [str(loss) for loss in found if loss.problem]


@pytest.mark.vm
def test_parts_that_are_stopped_again_and_again_cost_a_pod_time_only(
    soak_ground: soak.Ground, runtime: Runtime
) -> None:
    """A busy host, a debugger or a suspended VM: every wait on a part goes on once it does."""
    with soak_ground.pod() as pod:
        driver = threading.Thread(target=pod.live, name=f"drive {pod.name}")
        driver.start()

        def stopped(part: str) -> bool:
            """As soon as it is there; False when the pod's life is over."""
            find = partial(soak.VICTIMS[part], runtime, pod.name)
            eventually(lambda: find() or not driver.is_alive(), what=f"the {part} is there", every_s=0.01)
            return soak.stand_still(find(), for_s=1.5)

        stops = Counter[str]()
        for part in cycle(("shim", "vmm", "virtiofsd")):
            stops[part] += stopped(part)
            driver.join(0.5 if len(stops) == 3 else 0)  # its life may be shorter than three of these
            if not driver.is_alive():
                break

        assert len(stops) == 3, stops
        assert all(stops.values()), stops
        assert pod.error == ""
        pod.clean_up()
        pod.assert_nothing_left()
