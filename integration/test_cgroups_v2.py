"""cgroup v2 for real: the host code runs inside a guest, whose kernel has it with all controllers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jeepney
import msgspec
import pytest

from pyshim.model.units import MIB

from .conftest import GROUND, own_name
from .framework import shim_config
from .framework.ctr import Ctr
from .framework.loop_devices import loop_device

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]
_WITHIN_S = 500
"""Of the programs in the guest, which import much of the shim over virtio-fs."""
PROJECT = Path(__file__).resolve().parents[1]
PYTHON = f"{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"


def bind(source: Path | str, target: str) -> tuple[str, str]:
    return "--mount", f"type=bind,src={source},dst={target},options=rbind:ro"


def package(module: ModuleType) -> tuple[str, str]:
    """Packages that the guest's distribution lacks, below /packages."""
    assert module.__file__ is not None
    return bind(Path(module.__file__).parent, f"/packages/{module.__name__}")


MOUNTS = (
    *(*bind("/usr", "/usr"), *bind("/usr/lib", "/lib"), *bind("/usr/lib64", "/lib64")),
    *(*bind(PROJECT, "/project"), *package(jeepney), *package(msgspec)),
)


@pytest.fixture(scope="module")
def kernel(ctr: Ctr, module_leaves_nothing: None) -> Any:
    """The guest kernel's answers in each scene."""
    directory = GROUND / "scratch" / "cgroups-v2"
    directory.mkdir(parents=True)
    config = shim_config.variant(directory, default_vcpus=min(2, os.cpu_count() or 1), default_memory=2048)
    disk = directory / "disk"
    disk.write_bytes(bytes(MIB))
    with loop_device(disk) as device, own_name(ctr) as name:
        options = ["--cap-add", "CAP_SYS_ADMIN", "--device", device, *MOUNTS]
        program = ("/project/integration/inside/cgroups_v2.py", "/project", "/packages", device)
        command = (PYTHON, "-I", *program)
        done = ctr.run(name, *command, options=options, config=config, check=False, within_s=_WITHIN_S)
    assert done.code == 0, str(done)
    return json.loads(done.lines[-1])


def test_all_of_a_sandbox_is_in_its_cgroup_and_vcpu_threads_are_in_a_threaded_one(kernel: Any) -> None:
    found = kernel["all in one"]

    assert (found["shim"], found["vmm"]) == ("/pods/pod1/c1", "/pods/pod1/c1/vmm")
    assert found["vcpus"] == ["/pods/pod1/c1/vcpus"]
    assert (found["cgroup.type"], found["vcpus/cgroup.type"]) == ("domain threaded", "threaded")
    # 1 vCPU and 1 CPU for the VMM; 64 MiB of RAM and 206 MiB, or twice that, for the host side.
    assert (found["cpu.max"], found["vcpus/cpu.max"]) == ("200000 100000", "100000 100000")
    assert (found["memory.high"], found["memory.max"]) == (str(270 * MIB), str(476 * MIB))
    assert found["cpu.weight"] == "79"
    assert found["cpuset"] == ["0", "0"]
    assert found["no cpuset"][0] == found["no cpuset"][1]
    assert found["swap"] == ["4096", "max"]


def test_nothing_is_left_after_the_end(kernel: Any) -> None:
    found = kernel["all in one"]

    assert (found["left"], found["ledger"], found["shim after"]) == ([], 0, "/runner")
    assert kernel["overhead apart"]["left"] is False


def test_with_an_overhead_cgroup_the_shim_is_there_and_the_vmm_with_its_memory_is_the_pods(kernel: Any) -> None:
    found = kernel["overhead apart"]

    assert (found["shim"], found["vmm"]) == ("/kata_overhead/s1", "/pods/pod1/c1")
    assert found["vcpus"] == ["/pods/pod1/c1/vcpus"]
    assert found["overhead limit"] == "100000 100000"


@pytest.mark.parametrize("scene", ["all in one", "overhead apart"])
def test_the_vmm_opens_listed_devices_only_and_the_shim_opens_disks(kernel: Any, scene: str) -> None:
    """The first is /dev/null, the second a disk; what the shim opens is the control."""
    found = kernel[scene]

    assert found["shim opens"] == ["opened", "opened"]
    assert (found["vmm opens"], found["its vcpus open"]) == (["opened", "EPERM"], ["opened", "EPERM"])
    assert found["with a rule more"] == ["opened", "opened"]
    assert found["virtiofsd opens"] == ["opened", "EPERM"]


def test_a_host_oom_names_the_cgroup_whose_limit_was_met(kernel: Any) -> None:
    found = kernel["out of memory"]

    assert found["code"] == -9
    assert "the host's OOM killer ended the VMM, as cgroup '/pods/pod1' met its memory limit of 64 MiB" in found["told"]
    assert found["panic"] == "the guest's kernel panicked"


def test_a_quota_holds(kernel: Any) -> None:
    assert kernel["held to quota"]["throttled"] > 0
    assert kernel["held to quota"]["share"] < 0.3


@pytest.mark.parametrize(
    ("scene", "error"),
    [
        ("full", "make cgroup '/sys/fs/cgroup/full/c1': EAGAIN"),
        ("read-only", "make cgroup '/sys/fs/cgroup/fresh': EROFS"),
        ("no delegation, limits", "set cpu.max of '/occupied/c1' to '200000 100000': the cgroup has no controller cpu"),
    ],
)
def test_a_tree_that_takes_nothing_is_an_error_that_leaves_nothing(kernel: Any, scene: str, error: str) -> None:
    found = kernel[scene]

    assert error in found["error"]
    assert (found["left"], found["shim"]) == ([], "/runner")


def test_a_parent_without_delegation_is_a_note_where_no_limit_is_demanded(kernel: Any) -> None:
    found = kernel["no delegation"]

    assert found["error"] == "none"
    assert any("no controller memory below '/sys/fs/cgroup/occupied'" in note for note in found["notes"])
    assert (found["left"], found["shim"]) == ([], "/runner")


def test_a_cgroup_removed_under_us_fails_no_call(kernel: Any) -> None:
    assert kernel["removed under us"] == {"left": []}


@pytest.fixture(scope="module")
def systemd(ctr: Ctr, module_leaves_nothing: None) -> Any:
    """The answers of a systemd, pid 1 of a container in the guest, to the calls about a sandbox's scope."""
    directory = GROUND / "scratch" / "systemd"
    directory.mkdir(parents=True)
    result = ["--mount", f"type=bind,src={directory},dst=/result,options=rbind:rw"]
    with own_name(ctr) as name:
        options = ["--cap-add", "CAP_SYS_ADMIN", *MOUNTS, *result]
        program = ("/project/integration/inside/systemd_scope.py", "/project", "/packages", "/result/it")
        done = ctr.run(name, PYTHON, "-I", *program, options=options, check=False, within_s=_WITHIN_S)
    assert (directory / "it").exists(), str(done)
    text = (directory / "it").read_text()
    assert text.startswith("{"), f"{text}\n{done}"
    return json.loads(text)


def test_systemd_makes_the_scope_and_delegates_it(systemd: Any) -> None:
    path = "/kubepods.slice/kubepods-pod1.slice/cri-containerd-c1.scope"

    assert (systemd["shim"], systemd["vmm"], systemd["vcpus"]) == (path, f"{path}/vmm", [f"{path}/vcpus"])
    assert systemd["cpu.max"] == "200000 100000"
    unit = systemd["unit"]
    assert (unit["ControlGroup"], unit["Slice"]) == (path, "kubepods-pod1.slice")
    assert (unit["Delegate"], unit["DevicePolicy"], unit["MemoryAccounting"]) == ("yes", "auto", "yes")


def test_systemd_refuses_a_second_unit_of_the_name_and_forgets_the_first_when_it_ends(systemd: Any) -> None:
    assert "systemd refuses: org.freedesktop.systemd1.UnitExists" in systemd["twice"]
    assert (systemd["after"], systemd["left"]) == ("inactive", "FileNotFoundError")
    assert systemd["shim after"] == systemd["shim before"]
