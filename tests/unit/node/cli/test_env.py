"""`pyshim check --env`: the shape of `kata-runtime env`, whose readers are programs."""

import json
import tomllib
from pathlib import Path

import pytest

from pyshim.node.cli.command import run

CONFIGURATION = """\
[hypervisor.qemu]
path = "/bin/true"
kernel = "/boot/vmlinuz"
initrd = "/boot/initrd"
machine_type = "q35"
shared_fs = "none"
memory_slots = 7
enable_annotations = ["a\\"b"]
[agent.kata]
enable_debug = true
[runtime]
sandbox_cgroup_only = true
"""
# Kata's names, of kata-env.go's format 1.0.27; a dotted name is a table in a table.
MEMBERS = {
    "Kernel": "Path Parameters",
    "Meta": "Version",
    "Image": "Path",
    "Initrd": "Path",
    "Hypervisor": "MachineType Version Path BlockDeviceDriver EntropySource SharedFS VirtioFSDaemon SocketPath Msize9p"
    " MemorySlots HotPlugVFIO ColdPlugVFIO PCIeRootPort PCIeSwitchPort Debug SecurityInfo",
    "Hypervisor.SecurityInfo": "Rootless DisableSeccomp GuestHookPath EnableAnnotations ConfidentialGuest",
    "Runtime": "Config Path GuestSeLinuxLabel Experimental Version Debug Trace DisableGuestSeccomp DisableNewNetNs"
    " SandboxCgroupOnly",
    "Runtime.Config": "Path",
    "Runtime.Version": "OCI Version",
    "Runtime.Version.Version": "Semver Commit Major Minor Patch",
    "Host": "AvailableGuestProtections Kernel Architecture Distro CPU Memory VMContainerCapable SupportVSocks",
    "Host.Distro": "Name Version",
    "Host.CPU": "Vendor Model CPUs",
    "Host.Memory": "Total Free Available",
    "Agent": "Debug Trace",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(CONFIGURATION)
    return path


def test_toml_and_json_have_katas_members_and_say_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--env", "--config", str(file)]) == 0
    toml = tomllib.loads(capsys.readouterr().out)
    assert run(["check", "--env", "--config", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)

    for path, members in MEMBERS.items():
        table = toml
        for key in path.split("."):
            table = table[key]
        assert set(table) == set(members.split()), path
    changing = [each["Host"].pop("Memory") for each in (toml, document)]
    assert toml == document
    assert changing[0]["Total"] == changing[1]["Total"] > 1024


def test_values_are_those_of_the_configuration(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--env", "--config", str(file), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["Kernel"]["Path"] == "/boot/vmlinuz"
    assert "agent.log=debug" in found["Kernel"]["Parameters"].split()
    assert found["Hypervisor"]["MemorySlots"] == 7
    assert found["Hypervisor"]["SecurityInfo"]["EnableAnnotations"] == ['a"b']
    assert found["Runtime"]["Config"]["Path"] == str(file)
    assert (found["Runtime"]["SandboxCgroupOnly"], found["Agent"]["Debug"]) == (True, True)


def test_a_hypervisor_that_says_nothing_is_unknown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(CONFIGURATION.replace("/bin/true", "/bin/false"))

    assert run(["check", "--env", "--config", str(file), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["Hypervisor"]["Version"] == "unknown"
