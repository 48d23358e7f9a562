"""A spec's OCI hooks: each runs at its point of the container's life, and a network made by one reaches the guest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .framework import oci
from .framework.ctr import Ctr, Result
from .framework.runtime import Runtime

_ENV = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
_RECORD = 'state=$(cat); echo "$KIND $state" >> "$OUT"\n'
_MAKE_LINK = r"""
pid=$(echo "$state" | sed 's/.*"pid": *\([0-9]*\).*/\1/')
ip link add ithook0 type veth peer name eth0 address 02:00:00:00:99:02 netns "$pid"
nsenter -t "$pid" -n ip addr add 10.99.0.2/24 dev eth0
nsenter -t "$pid" -n ip link set eth0 up
ip link set ithook0 up
"""


def _hooks(out: Path, **scripts: str) -> dict[str, Any]:
    return {
        kind: [{"path": "/bin/sh", "args": ["hook", "-ec", script], "env": [*_ENV, f"KIND={kind}", f"OUT={out}"]}]
        for kind, script in scripts.items()
    }


def _run(ctr: Ctr, name: str, spec: oci.Spec, scratch: Path) -> Result:
    return ctr(*ctr.run_words("--rm", "--config", oci.write(spec, scratch)), name, check=False)


def test_four_of_four_hooks_run_and_the_link_that_one_makes_is_the_guests(
    ctr: Ctr, runtime: Runtime, name: str, plain_rootfs: Path, scratch: Path
) -> None:
    out = scratch / "hooks"
    spec = oci.spec("sh", "-c", "cat /sys/class/net/eth0/address; ip addr show eth0", name=name, rootfs=plain_rootfs)
    spec["hooks"] = _hooks(
        out, prestart=_RECORD, createRuntime=_RECORD + _MAKE_LINK, poststart=_RECORD, poststop=_RECORD
    )

    result = _run(ctr, name, spec, scratch)

    assert result.code == 0, result
    assert result.lines[0] == "02:00:00:00:99:02"
    assert "10.99.0.2/24" in result.out
    ran = [line.split(" ", 1) for line in out.read_text().splitlines()]
    states = {kind: json.loads(state) for kind, state in ran}
    assert [kind for kind, _state in ran] == ["prestart", "createRuntime", "poststart", "poststop"]
    # runc's start has let the process go, and may not see it run yet.
    started = "running" if runtime.has_vm else states["poststart"]["status"]
    assert [state["status"] for state in states.values()] == ["creating", "creating", started, "stopped"]
    assert {(state["id"], state["ociVersion"]) for state in states.values()} == {(name, spec["ociVersion"])}
    assert not Path(f"/run/netns/pyshim-{name}").exists()


@pytest.mark.parametrize("kind", ["prestart", "createRuntime"])
def test_a_failing_hook_fails_the_create_with_its_words_and_poststop_runs(
    ctr: Ctr, name: str, plain_rootfs: Path, scratch: Path, kind: str
) -> None:
    out = scratch / "hooks"
    spec = oci.spec("true", name=name, rootfs=plain_rootfs)
    spec["hooks"] = _hooks(out, **{kind: "echo no bridge >&2; exit 3", "poststop": _RECORD})

    result = _run(ctr, name, spec, scratch)

    assert result.code != 0
    assert "no bridge" in result.err
    assert out.read_text().startswith("poststop ")


@pytest.mark.vm
def test_a_hook_of_the_container_runs_in_the_guest(ctr: Ctr, name: str, plain_rootfs: Path, scratch: Path) -> None:
    spec = oci.spec("cat", "/tmp/hook", name=name, rootfs=plain_rootfs)
    spec["hooks"] = {
        "startContainer": [{"path": "/bin/sh", "args": ["sh", "-c", "uname -r > /tmp/hook"], "env": ["PATH=/bin"]}]
    }

    result = _run(ctr, name, spec, scratch)

    assert result.code == 0, result
    assert result.lines != [Path("/proc/sys/kernel/osrelease").read_text().strip()]


@pytest.mark.vm
def test_a_hook_of_the_container_whose_program_the_guest_lacks_fails_by_name(
    ctr: Ctr, name: str, plain_rootfs: Path, scratch: Path
) -> None:
    spec = oci.spec("true", name=name, rootfs=plain_rootfs)
    spec["hooks"] = {"createContainer": [{"path": "/nowhere/program"}]}

    result = _run(ctr, name, spec, scratch)

    assert result.code != 0
    assert "create container" in result.err
    assert "/nowhere/program" in result.err
