"""The operator's verbs, asked of one running pod, and of what is not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .framework import releases
from .framework.cri import Pod
from .framework.runtime import Runtime
from .framework.waiting import eventually

PROJECT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.vm


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(PROJECT / "bin" / "pyshim"), *words]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


def printed(*words: str) -> Any:
    done = ask(*words, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    return json.loads(done.stdout)


def test_list_shows_the_pod_with_name_size_use_and_health(pod: Pod) -> None:
    pod.start()

    (found,) = [each for each in printed("list") if each["id"] == pod.id]

    metadata = pod.config.metadata
    assert found["pod"] == f"{metadata.namespace}/{metadata.name}"
    assert found["health"] == "ok"
    assert 0 <= found["agent_age_s"] < 30
    assert found["containers"] == (1 if releases.sandboxer() == "shim" else 2)
    assert found["vm"]["vcpus"] >= 1
    assert found["used"]["memory_mib"] > 50
    assert found["age_s"] is not None


@pytest.mark.parametrize("stopped", ["shim", "vmm"])
def test_a_stopped_process_is_named_until_it_continues(pod: Pod, stopped: str) -> None:
    runtime = Runtime.chosen()
    (process,) = runtime.shims(pod.id) if stopped == "shim" else runtime.vmms(pod.id)

    def health() -> str:
        (found,) = [each for each in printed("list") if each["id"] == pod.id]
        return str(found["health"])

    os.kill(process.pid, signal.SIGSTOP)
    try:
        eventually(lambda: "is stopped" in health(), what=health)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: health() == "ok", what=health)


def test_logs_are_those_of_containerds_file_and_of_the_console(pod: Pod) -> None:
    found = printed("logs", pod.id, "--file", str(pod.cri.daemon.directories.log))

    shim = [each["message"] for each in found if each["source"] == "shim"]
    assert "shim started" in shim
    assert any(each["source"] == "console" for each in found)


@pytest.mark.skipif(releases.sandboxer() == "shim", reason="the bundle has no spec")
def test_the_plan_of_the_running_bundle_is_its_command_line(pod: Pod) -> None:
    bundle = pod.cri.daemon.directories.bundle(pod.id, "k8s.io")

    (plan,) = printed("plan", str(bundle))

    (found,) = [each for each in printed("list") if each["id"] == pod.id]
    vmm = printed("status", pod.id)["HypervisorState"]["Pid"]
    running = Path(f"/proc/{vmm}/cmdline").read_bytes().decode().split("\0")
    assert plan["title"] == f"pod_sandbox '{pod.id}'"
    assert plan["sandbox"]["vm"]["cpu"]["boot_vcpus"] <= found["vm"]["vcpus"]
    for option in ("-name", "-machine", "-cpu", "-kernel"):
        assert plan["argv"][plan["argv"].index(option) + 1] == running[running.index(option) + 1]


def test_env_and_check_judge_the_node_that_runs_the_pod(pod: Pod) -> None:
    state = printed("status", pod.id)
    env = printed("check", "--env")
    verdicts = {each["subject"]: each for each in json.loads(ask("check", "--json").stdout)["verdicts"]}

    assert env["Runtime"]["Config"]["Path"] == state["Pyshim"]["Snapshot"]["ConfigSource"]
    for subject in ("cpu", "configuration", "qemu"):
        assert verdicts[subject]["level"] == "ok", verdicts[subject]
    for subject in ("kvm", "virtiofsd", "guest"):  # emulation; groups that the file server or the guest's kernel lacks
        assert verdicts[subject]["level"] in ("ok", "warning"), verdicts[subject]
