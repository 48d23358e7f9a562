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
from .framework.pod_overhead import pss_mib
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


def test_top_and_list_show_people_the_same_pod(pod: Pod) -> None:
    for words in (["list"], ["top", "--interval", "0.2", "--count", "1"]):
        done = ask(*words)

        assert (done.returncode, done.stderr) == (0, "")
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(pod.id)]
        assert line.endswith("ok")


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


def test_podfixed_counts_what_the_pod_takes_beside_guest_ram(pod: Pod) -> None:
    runtime = Runtime.chosen()
    *_base, host_side = printed("sizing", "podfixed")["summands"]

    parts = (runtime.vmms(pod.id), runtime.virtiofsds(pod.id), runtime.shims(pod.id))
    own_mib = sum(pss_mib(process.pid)[0] for found in parts for process in found)
    assert host_side["source"] == "measured: the one sandbox here"
    assert int(host_side["memory"].removesuffix("Mi")) == pytest.approx(own_mib, rel=0.2)


@pytest.mark.parametrize(
    "verb", [("state",), ("trace",), ("cgroups",), ("sizing", "show")], ids=lambda words: " ".join(words)
)
def test_a_unique_prefix_names_the_sandbox(pod: Pod, verb: tuple[str, ...]) -> None:
    whole, short = ask(*verb, pod.id), ask(*verb, pod.id[:12])

    assert (whole.returncode, short.returncode) == (0, 0), (whole, short)
    assert whole.stdout.splitlines()[0] == short.stdout.splitlines()[0]


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
    vmm = printed("state", pod.id)["HypervisorState"]["Pid"]
    running = Path(f"/proc/{vmm}/cmdline").read_bytes().decode().split("\0")
    assert plan["title"] == f"pod_sandbox '{pod.id}'"
    assert plan["sandbox"]["vm"]["cpu"]["boot_vcpus"] <= found["vm"]["vcpus"]
    for option in ("-name", "-machine", "-cpu", "-kernel"):
        assert plan["argv"][plan["argv"].index(option) + 1] == running[running.index(option) + 1]


def test_env_and_check_judge_the_node_that_runs_the_pod(pod: Pod) -> None:
    state = printed("state", pod.id)
    env = printed("env")
    verdicts = {each["subject"]: each for each in json.loads(ask("check", "--json").stdout)["verdicts"]}

    assert env["Runtime"]["Config"]["Path"] == state["Pyshim"]["Snapshot"]["ConfigSource"]
    for subject in ("cpu", "configuration", "qemu", "virtiofsd", "guest"):
        assert verdicts[subject]["level"] == "ok", verdicts[subject]
    assert verdicts["kvm"]["level"] in ("ok", "warning")


def test_a_shell_needs_a_console_and_says_so(pod: Pod) -> None:
    done = ask("exec", pod.id, "true")

    assert done.returncode == 1
    assert done.stderr.startswith(("pyshim: exec in sandbox ", "pyshim: connect debug console of sandbox "))
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("state", "{unknown}"),
        ("trace", "{unknown}"),
        ("cgroups", "{unknown}"),
        ("sizing", "show", "{unknown}"),
        ("exec", "{unknown}"),
        ("logs", "{unknown}", "--file", "/dev/null"),
        ("iptables", "get", "{unknown}"),
        ("policy", "set", "{unknown}", "/etc/hostname"),
        ("state", "../{unknown}"),
        ("plan", "/none"),
        ("env", "--config", "/none"),
        ("env", "--config", "/etc/hostname"),
        ("config", "check", "/none"),
        ("check", "--runtimeclass", "/none"),
    ],
    ids=" ".join,
)
def test_what_is_not_there_is_one_line_and_an_exit_code(words: tuple[str, ...]) -> None:
    done = ask(*(word.replace("{unknown}", "f" * 64) for word in words))

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("pyshim: ")
    assert (done.stderr.count("\n"), "Traceback" in done.stderr) == (1, False)


def test_a_user_without_rights_is_told_to_be_root(pod: Pod) -> None:
    done = subprocess.run(
        [str(PROJECT / "bin" / "pyshim"), "state", pod.id],
        user=65534,
        group=65534,
        extra_groups=[],
        env={**os.environ, "HOME": "/"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 1
    assert "EACCES (permission denied)" in done.stderr
    assert done.stderr.endswith("(hint: run it as root)\n")
