"""A run with a given kata-agent in the guest: its image, the configuration for it, and the tests that expect otherwise.

`KATA_AGENT=/path scripts/integration` has built the image. The run's files, ours and the tests', name the guest's and
the shipped configuration by their ordinary paths: within the enclosure others are mounted over these.
`KATA_GUEST=/path/guest.toml` gives a whole guest of Kata's: the file has keys of the table `hypervisor.qemu`, which the
run's configuration has, too.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from . import shim_config

CHOICE, GUEST_CHOICE = "KATA_AGENT", "KATA_GUEST"
PROJECT = Path(__file__).resolve().parents[2]
GUEST, OUR_GUEST = PROJECT / ".build" / "guest-kata", PROJECT / ".build" / "guest"
DIFFERENCES = Path(__file__).with_suffix(".toml")
KERNEL_PARAMS = "cgroup_no_v1=all systemd.unified_cgroup_hierarchy=1"
"""As in Kata's own files: without them kata-agent as process 1 mounts cgroups of version 1."""


class Difference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tests that do not pass with kata-agent, and why that is so."""

    reason: str
    tests: tuple[str, ...]
    """`FILE`, `FILE::test_name` or `FILE::test_name[parameters]`, below `integration`."""
    runs: bool = True
    """False: not even run, as there is nothing of kata-agent in it, or it would wait for long."""
    guest: dict[str, object] | None = None
    """Only with a whole guest of Kata's that has these keys."""


def differences(path: Path = DIFFERENCES) -> tuple[Difference, ...]:
    """Those in the list. Raises ValueError naming the fault."""
    with path.open("rb") as file:
        return msgspec.convert(tomllib.load(file)["difference"], tuple[Difference, ...])


def is_chosen() -> bool:
    return any(os.environ.get(choice) for choice in (CHOICE, GUEST_CHOICE))


def given_guest() -> dict[str, object]:
    """The keys of the whole guest that is given; none without one. Raises OSError, ValueError."""
    path = os.environ.get(GUEST_CHOICE, "")
    return tomllib.loads(Path(path).read_text()) if path else {}


def mark(items: Sequence[pytest.Item], listed: Sequence[Difference]) -> None:
    """A listed test is expected to fail: one that passes fails the run, and so does one that fails without being
    listed.
    """
    given = given_guest()
    for difference in listed:
        if difference.guest is not None and not (given and difference.guest.items() <= given.items()):
            continue
        for item in items:
            if any(_is_meant(item.nodeid, name) for name in difference.tests):
                item.add_marker(
                    pytest.mark.xfail(reason=difference.reason, strict=True)
                    if difference.runs
                    else pytest.mark.skip(reason=difference.reason)
                )


def _is_meant(node: str, name: str) -> bool:
    own = node.removeprefix("integration/")
    return own == name or own.startswith((f"{name}::", f"{name}["))


def put_in_place(scratch: Path) -> None:
    """Within this enclosure the guest's files and the shipped configuration are those for kata-agent."""
    scratch.mkdir(parents=True, exist_ok=True)
    keys = {"kernel_params": KERNEL_PARAMS, **given_guest()}
    if len(keys) == 1:
        for name in json.loads((GUEST / "manifest.json").read_text())["artefacts"]:
            shim_config.bind(GUEST / name, OUR_GUEST / name)
    shim_config.bind(shim_config.with_hypervisor_keys(scratch, keys), shim_config.SHIPPED)
