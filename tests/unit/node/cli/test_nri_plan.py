"""`pyshim nri plan`: pods of manifests on a described machine."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from pyshim.config.sources import named_file, read_source
from pyshim.host.processes.identity import start_ticks
from pyshim.model.ids import SandboxId
from pyshim.model.sizing import PlacementRequest, SavedPlacement
from pyshim.node.cli.command import run
from pyshim.node.kubernetes.agreement import explain_pod
from pyshim.node.kubernetes.manifest import pod_sizing, pods_in, read_documents
from pyshim.node.kubernetes.pod_vm import boot_record, pod_config
from pyshim.node.nri.assignments import Assignments, place
from pyshim.resources.machine import read_machine
from pyshim.state.schema import SandboxState, ShimRecord
from pyshim.state.store import StateStore
from tests.fakes.facts import host_facts
from tests.unit.state.states import snapshot

MACHINE = "{sockets: 2, dies: 2, cores: 4, threads: 2, memory_mib: 65536}"
CONFIG = """
[hypervisor.qemu]
path = "/bin/qemu"
kernel = "/k"
image = "/i"
virtio_fs_daemon = "/v"
default_vcpus = 1
default_memory = 512
[agent.kata]
[runtime]
static_sandbox_resource_mgmt = true
"""
PODS = """
apiVersion: v1
kind: Pod
metadata: {name: db, namespace: prod}
spec:
  containers:
  - {name: a, resources: {limits: {cpu: "3", memory: 2Gi}}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  template:
    spec:
      containers:
      - {name: a, resources: {requests: {cpu: 500m}, limits: {cpu: "1", memory: 1Gi}}}
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    texts = {"pods.yaml": PODS, "machine.yaml": MACHINE, "config.toml": CONFIG}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in texts}


def words(files: dict[str, str], *more: str) -> list[str]:
    return [
        *("nri", "plan", files["pods.yaml"], "--machine", files["machine.yaml"], "--config", files["config.toml"]),
        *more,
    ]


def test_each_pod_is_placed_with_the_reason(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(files, "--json", "--reserved", "0,16")) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown == {
        "sharedCpus": "0,3-16,19-31",
        "running": [],
        "pods": [
            {
                "name": "prod/db",
                "vcpus": 4,
                "memoryMiB": 2560,
                "exclusive": True,
                "vcpuCpus": "1-2,17-18",
                "serviceCpus": "0,3-7,16,19-23",
                "cpuNodes": "0",
                "memoryNodes": "0",
                "why": "CPUs of its own: 2 whole cores in one L3 of node 0",
            },
            _web("default/web-1", "1", "8-15,24-31", "2 vCPUs on 16 CPUs"),
            _web("default/web-2", "0", "0,3-7,16,19-23", "2 vCPUs on 12 CPUs"),
        ],
    }


def _web(name: str, node: str, cpus: str, load: str) -> dict[str, object]:
    return {
        "name": name,
        "vcpus": 2,
        "memoryMiB": 1536,
        "exclusive": False,
        "vcpuCpus": cpus,
        "serviceCpus": cpus,
        "cpuNodes": node,
        "memoryNodes": node,
        "why": f"shared CPUs of node {node}: {load} with it",
    }


def test_the_vms_that_run_here_come_first(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need = PlacementRequest(sandbox_id="s1", name="prod/here", vcpus=1, memory_bytes=0, exclusive=False)
    placed = place(Assignments(machine=read_machine(), reserved=()), need).placements["s1"]
    store = StateStore(root=str(tmp_path / "sbs"))
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    shim = ShimRecord(pid=os.getpid(), start_ticks=ticks, socket="unix:///x", namespace="default")
    cgroups = {"Placed": msgspec.to_builtins(SavedPlacement(request=need, placement=placed))}
    taken = msgspec.structs.replace(snapshot(), cgroups=cgroups)
    store.save(SandboxState(sandbox_id=SandboxId("s1"), shim=shim, snapshot=taken, ledger=()))
    here = ["nri", "plan", files["pods.yaml"], "--config", files["config.toml"], "--state-dir", store.root, "--json"]

    assert run(here) == 0
    with_it = json.loads(capsys.readouterr().out)
    assert run([*here, "--empty"]) == 0
    without = json.loads(capsys.readouterr().out)

    assert [(pod["name"], pod["why"]) for pod in with_it["running"]] == [("prod/here", placed.why)]
    assert without["running"] == []


def test_a_table_is_for_people(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(files)) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["POD", "VCPUS", "MIB", "CPUS", "MEMORY", "NODES", "WHY"]
    assert lines[1].split()[:6] == ["prod/db", "4", "2560", "0-1,16-17", "own", "0"]
    assert lines[-1] == "shared CPUs: 2-15,18-31"


@pytest.mark.parametrize(
    ("change", "more", "problem"),
    [
        ({"pods.yaml": "kind: Service"}, [], "no pod and no pod template in it, only Service"),
        ({"pods.yaml": PODS.replace("replicas: 2", "replicas: many")}, [], "replicas: not a number: 'many'"),
        ({"pods.yaml": PODS.replace("replicas: 2", "replicas: 1000")}, [], "more than 1000 pods"),
        ({"pods.yaml": PODS + "---" + PODS}, [], "pod 'prod/db' is there twice"),
        ({"pods.yaml": PODS.replace('"3"', "three")}, [], "limits.cpu"),
        ({"machine.yaml": "{cores: none, memory_mib: 3}"}, [], "read machine '"),
        ({"machine.yaml": None}, [], "machine.yaml': ENOENT"),
        ({}, ["--reserved", "30-33"], "reserve CPUs 30-33: not online: 32-33"),
    ],
    ids=str,
)
def test_bad_input_is_named_in_one_line(
    files: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str | None],
    more: list[str],
    problem: str,
) -> None:
    for name, text in change.items():
        if text is None:
            Path(files[name]).unlink()
        else:
            Path(files[name]).write_text(text)

    assert run(words(files, *more)) == 1

    shown = capsys.readouterr()
    assert shown.out == ""
    assert problem in shown.err
    assert len(shown.err.splitlines()) == 1


def test_reserved_cpus_that_are_no_list_are_wrong_usage(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words(files, "--reserved", "some")) == 2
    assert "'some' is not a list of CPUs" in capsys.readouterr().err


def test_a_pod_with_a_remote_vm_has_no_place_here(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    Path(files["config.toml"]).write_text("[hypervisor.remote]\nremote_hypervisor_socket = '/s'\n[agent.kata]\n")

    assert run(words(files, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["pods"] == []


@pytest.mark.parametrize("policy", ["sum", "overhead"])
def test_the_size_is_that_of_sizing_explain(files: dict[str, str], policy: str) -> None:
    Path(files["config.toml"]).write_text(f'{CONFIG}sizing_policy = "{policy}"\n')
    source = read_source(named_file(files["config.toml"]), {})
    host = host_facts()
    for pod in pods_in(read_documents(files["pods.yaml"]), "pods.yaml"):
        sizing, config = pod_sizing(pod, "pods.yaml", None), pod_config(source, pod.annotations)
        explained = explain_pod(sizing, config, host, host_side_mib=0)

        assert explained.in_force == policy
        assert explained.view_in_force.record == boot_record(sizing, config, host)


def test_another_policy_decides_and_an_unknown_one_is_named(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words(files, "--policy", "spread", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["pods"]

    assert run(words(files, "--policy", "mine")) == 1
    assert "load policy 'mine': not installed (hint: there are packed, spread, topology)" in capsys.readouterr().err
