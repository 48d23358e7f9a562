"""Swap space in the guest: what containers ask for, the file that gives it, and the order of its making; on fakes."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pyshim.model.config import SWAP_IN_BYTES_ANNOTATION, SWAPPINESS_ANNOTATION
from pyshim.model.errors import InvalidArgument, ShimError
from pyshim.model.units import MIB
from pyshim.pod.plan.guest_spec import guest_resources
from pyshim.resources.sizing.plan.swap import swap_bytes, swap_file_bytes, swap_header, with_swap
from tests.unit.pod.conftest import Stack

from .resizable_pod import add, start_pod


def memory(**members: int) -> dict[str, Any]:
    return {"memory": members}


@pytest.mark.parametrize(
    ("containers", "mib"),
    [
        pytest.param([], 0, id="no-container"),
        pytest.param([memory(limit=100 * MIB, swap=300 * MIB)], 0, id="not-asked-for"),
        pytest.param([memory(swappiness=0, limit=100 * MIB)], 0, id="swappiness-0"),
        pytest.param([memory(swappiness=60, limit=100 * MIB)], 100, id="as-much-as-the-limit"),
        pytest.param([memory(swappiness=60, limit=100 * MIB, swap=300 * MIB)], 200, id="what-is-beyond-the-limit"),
        pytest.param([memory(swappiness=60, limit=100 * MIB, swap=100 * MIB)], 0, id="nothing-beyond-the-limit"),
        pytest.param([memory(swappiness=60)], 512, id="no-limit-as-much-as-the-vm"),
        pytest.param([memory(swappiness=1, limit=MIB), memory(swappiness=1, limit=MIB, swap=3 * MIB)], 3, id="sum"),
    ],
)
def test_each_container_that_asks_adds_its_share(containers: list[dict[str, Any]], mib: int) -> None:
    assert swap_bytes(containers, 512) == mib * MIB


def test_annotations_ask_like_the_spec_and_bad_ones_are_named() -> None:
    asked = {SWAPPINESS_ANNOTATION: "60", SWAP_IN_BYTES_ANNOTATION: "4096"}

    assert with_swap(memory(limit=1), asked) == memory(limit=1, swappiness=60, swap=4096)
    for text in ("", "-1", "201", "1e2", "٣", "9" * 30):
        with pytest.raises(InvalidArgument, match=SWAPPINESS_ANNOTATION):
            with_swap({}, {SWAPPINESS_ANNOTATION: text})


def test_the_guest_gets_the_limit_and_no_swappiness() -> None:
    """cgroup v2 has no file for it."""
    assert guest_resources(memory(limit=1, swap=2, swappiness=60)) == memory(limit=1, swap=2)


def test_the_file_is_a_swap_area_of_the_size_asked_for(tmp_path: Path) -> None:
    size = swap_file_bytes(5 * MIB + 1)
    path = tmp_path / "swap"
    path.write_bytes(swap_header(size))
    os.truncate(path, size)

    said = subprocess.run(["blkid", "-p", "-o", "export", path], capture_output=True, text=True, check=True).stdout

    assert size == 5 * MIB + 2 * 4096
    assert "TYPE=swap" in said.splitlines()
    assert swap_file_bytes(1) == 11 * 4096


async def test_the_guest_has_its_swap_before_the_container_is_made_and_more_when_more_is_asked(stack: Stack) -> None:
    await start_pod(stack, enable_guest_swap=True, guest_swap_path="/data/swap")
    assert stack.agent.swaps == []

    await add(stack, "a", memory(swappiness=60, limit=64 * MIB))
    await add(stack, "b", memory(limit=64 * MIB))
    await add(stack, "c", memory(swappiness=60, limit=32 * MIB))

    assert len(stack.agent.swaps) == 2
    calls = stack.agent.calls
    assert calls.index("AddSwap") < calls.index("CreateContainer")
    files = [path for path in stack.host.files if path.startswith("/data/swap/")]
    assert files == ["/data/swap/c1/swap0", "/data/swap/c1/swap1"]
    assert all(stack.host.files[path].endswith(b"SWAPSPACE2") for path in files)


async def test_without_the_key_nothing_is_made_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, stack: Stack
) -> None:
    await start_pod(stack)
    await add(stack, "a", memory(swappiness=60, limit=64 * MIB))
    assert stack.agent.swaps == []

    assert "no swap for container: enable_guest_swap is false" in caplog.messages


async def test_an_agent_that_cannot_swap_fails_the_container_by_name(stack: Stack) -> None:
    await start_pod(stack, enable_guest_swap=True)
    stack.agent.failures["AddSwap"] = (13, "no swapon here")

    with pytest.raises(ShimError, match=r"add swap .* in guest: no swapon here"):
        await add(stack, "a", memory(swappiness=60, limit=64 * MIB))

    assert "CreateContainer" not in stack.agent.calls
