"""What is installed on nodes and clusters: it parses, and the files agree with each other and with the program."""

import configparser
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pyshim.operator.command import SUBCOMMANDS
from pyshim.plan.sizing.capacity import HOST_SIDE_MIB

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SECTIONS = {
    "containerd-1.x-pykata.toml": (2, "io.containerd.grpc.v1.cri"),
    "containerd-2.x-pykata.toml": (3, "io.containerd.cri.v1.runtime"),
}


def handlers(name: str) -> dict[str, Any]:
    version, plugin = SECTIONS[name]
    document = tomllib.loads((CONFIGS / "containerd" / name).read_text())
    assert document["version"] == version
    found: dict[str, Any] = document["plugins"][plugin]["containerd"]["runtimes"]
    return found


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CONFIGS / "kubernetes" / name).read_text()))


def test_every_drop_in_is_known_here() -> None:
    assert {path.name for path in (CONFIGS / "containerd").iterdir()} == SECTIONS.keys()


@pytest.mark.parametrize("name", SECTIONS)
def test_handlers_name_the_shims_runtime_type(name: str) -> None:
    for handler in handlers(name).values():
        assert handler["runtime_type"] == "io.containerd.pykata.v2"
        assert handler["privileged_without_host_devices"]


def test_both_generations_have_the_same_handlers() -> None:
    old, new = (handlers(name) for name in SECTIONS)
    for handler in new.values():
        assert handler.pop("sandboxer") == "podsandbox"  # a key that 1.x does not have

    assert old == new


def test_every_runtime_class_has_its_handler() -> None:
    classes = [item for path in (CONFIGS / "kubernetes").glob("runtimeclass-*.yaml") for item in manifests(path.name)]

    assert classes
    assert {item["handler"] for item in classes} <= handlers("containerd-1.x-pykata.toml").keys()


def test_the_overhead_is_the_shipped_base_and_the_host_side() -> None:
    shipped = tomllib.loads((CONFIGS / "configuration-qemu.toml").read_text())["hypervisor"]["qemu"]
    (runtime_class,) = manifests("runtimeclass-pykata.yaml")

    fixed = runtime_class["overhead"]["podFixed"]
    assert fixed["memory"] == f"{shipped['default_memory'] + HOST_SIDE_MIB}Mi"
    assert fixed["cpu"] == str(shipped["default_vcpus"])


@pytest.mark.parametrize("name", ["pyshim-zygote.service", "containerd-pyshim.conf"])
def test_a_unit_has_only_sections_and_settings(name: str) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((CONFIGS / "systemd" / name).read_text())

    assert set(parser.sections()) <= {"Unit", "Service", "Install"}
    if name.endswith(".service"):
        assert parser["Service"]["ExecStart"].endswith("pyshim zygote")
        assert parser["Service"]["KillMode"] == "process"


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (CONFIGS / "systemd" / "pyshim-zygote.service").read_text()
    unit = tmp_path / "pyshim-zygote.service"
    unit.write_text(text.replace("/opt/pyshim/bin/pyshim", "/bin/true"))

    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60, check=False
    )

    assert [line for line in (done.stdout + done.stderr).splitlines() if "pyshim-zygote" in line] == []


def test_the_example_uses_the_class() -> None:
    (pod,) = manifests("pod-example.yaml")

    assert pod["spec"]["runtimeClassName"] == manifests("runtimeclass-pykata.yaml")[0]["metadata"]["name"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    program = tmp_path / "pyshim"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for path in (*(CONFIGS / "systemd").glob("*.service"), *(CONFIGS / "systemd").glob("*.timer")):
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/pyshim/bin/pyshim", str(program)))

    units = sorted(path for path in tmp_path.iterdir() if path != program)
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )

    # Other units of this machine are loaded too, and complained about.
    assert [line for line in result.stderr.splitlines() if "pyshim" in line] == []
    assert units


def test_what_the_units_start_is_a_command_of_ours() -> None:
    services, timers = (sorted((CONFIGS / "systemd").glob(f"*.{kind}")) for kind in ("service", "timer"))
    assert services
    for path in services:
        unit = configparser.ConfigParser(strict=False)
        unit.read(path)
        program, subcommand, *_ = unit["Service"]["ExecStart"].split()
        assert program == "/opt/pyshim/bin/pyshim"
        assert subcommand in SUBCOMMANDS
    for path in timers:
        assert path.with_suffix(".service").exists()
