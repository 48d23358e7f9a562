"""SEV's launch: measured, told to the hook, answered with a secret; a real hook program and a scripted QEMU."""

import asyncio
import base64
import json
import stat
from pathlib import Path
from typing import Any

import pytest

from hypervisors.qemu.guards.launch import attest, secret_of
from hypervisors.qemu.qmp import QmpError
from pyshim.host.processes.children import Children
from pyshim.model.confidential import SevGuard
from pyshim.model.errors import FailedPrecondition, ShimError

SECRET = {"packet-header": base64.b64encode(b"header").decode(), "secret": base64.b64encode(b"secret").decode()}
LAUNCH = {
    "enabled": True,
    "api-major": 1,
    "api-minor": 55,
    "build-id": 24,
    "policy": 5,
    "handle": 3,
    "state": "launch-secret",
}


class ScriptedMonitor:
    """Answers the three commands of a launch; `asked` is what it was asked."""

    def __init__(self, measurement: object) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._answers = {"query-sev-launch-measure": measurement, "query-sev": LAUNCH, "sev-inject-launch-secret": {}}

    async def execute(self, command: str, arguments: Any = None) -> object:
        self.asked.append((command, arguments))
        return self._answers[command]


def hook_in(directory: Path, body: str) -> str:
    path = directory / "hook"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(stat.S_IRWXU)
    return str(path)


def launched(hook: str, measurement: object = "bWVhc3VyZQ==") -> ScriptedMonitor:
    monitor = ScriptedMonitor({"data": measurement})
    guard = SevGuard(cbitpos=51, reduced_phys_bits=1, policy=5, launch_hook=hook)
    asyncio.run(attest(monitor, Children(), guard, "pod1"))  # type: ignore[arg-type]
    return monitor


def test_the_hook_is_told_the_measurement_and_its_secret_is_injected(tmp_path: Path) -> None:
    hook = hook_in(tmp_path, f"env | grep ^PYSHIM_ | sort > {tmp_path}/told; echo '{json.dumps(SECRET)}'")

    monitor = launched(hook)

    assert (tmp_path / "told").read_text().splitlines() == [
        "PYSHIM_SANDBOX=pod1",
        "PYSHIM_SEV_API_MAJOR=1",
        "PYSHIM_SEV_API_MINOR=55",
        "PYSHIM_SEV_BUILD_ID=24",
        "PYSHIM_SEV_HANDLE=3",
        "PYSHIM_SEV_MEASUREMENT=bWVhc3VyZQ==",
        "PYSHIM_SEV_POLICY=5",
        "PYSHIM_SEV_STATE=launch-secret",
    ]
    assert monitor.asked[-1] == ("sev-inject-launch-secret", SECRET)


def test_a_hook_without_an_answer_lets_the_guest_run_without_a_secret(tmp_path: Path) -> None:
    monitor = launched(hook_in(tmp_path, "true"))

    assert [command for command, _ in monitor.asked] == ["query-sev-launch-measure", "query-sev"]


def test_without_a_hook_the_launch_is_only_measured() -> None:
    assert [command for command, _ in launched("").asked] == ["query-sev-launch-measure"]


@pytest.mark.parametrize("body", ["exit 3", "kill -9 $$"])
def test_a_hook_that_fails_keeps_the_guest_from_running(tmp_path: Path, body: str) -> None:
    with pytest.raises(FailedPrecondition, match="the guest may not run"):
        launched(hook_in(tmp_path, body))


def test_a_hook_that_is_not_there_keeps_the_guest_from_running(tmp_path: Path) -> None:
    with pytest.raises(ShimError, match="no such file"):
        launched(str(tmp_path / "absent"))


def test_a_measurement_that_is_none_is_qemus_error() -> None:
    with pytest.raises(QmpError, match="lacks the text 'data'"):
        launched("", measurement=3)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (b"{", "not JSON"),
        (b"[]", "not an object"),
        (b"{}", "not an object"),
        (json.dumps({**SECRET, "more": 1}).encode(), "not an object"),
        (json.dumps({**SECRET, "secret": "%"}).encode(), "secret is not base64"),
        (json.dumps({**SECRET, "secret": 3}).encode(), "secret is not base64"),
        (json.dumps({**SECRET, "secret": ""}).encode(), "secret is 0 bytes"),
        (json.dumps({**SECRET, "gpa": "1"}).encode(), "gpa is not an address"),
        (b" " * (65 << 10) + b"x", "more than"),
    ],
)
def test_an_answer_that_is_none_is_refused_by_name(answer: bytes, named: str) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        secret_of(answer, "/hook")

    assert named in str(caught.value)
    assert "'/hook'" in str(caught.value)
