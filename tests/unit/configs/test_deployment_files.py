"""The files for nodes and clusters: they parse, and the files agree with each other and with the program."""

import configparser
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from integration.framework.containerd import DEBIAN
from pyshim.__main__ import operator_main
from pyshim.node.cli.command import PYSHIM
from pyshim.start.dialect import BINARY
from pyshim.start.invocation import parse

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SECTIONS = {
    "containerd-1.x-pykata.toml": (None, "io.containerd.grpc.v1.cri"),  # appended to a file that has its version
    "containerd-2.x-pykata.toml": (3, "io.containerd.cri.v1.runtime"),
}


def handlers(name: str) -> dict[str, Any]:
    version, plugin = SECTIONS[name]
    document = tomllib.loads((CONFIGS / "containerd" / name).read_text())
    assert document.get("version") == version
    found: dict[str, Any] = document["plugins"][plugin]["containerd"]["runtimes"]
    return {name: handler for name, handler in found.items() if name != "runc"}


def dumped(config: Path) -> dict[str, Any]:
    """containerd's whole configuration with `config` read."""
    done = subprocess.run(["containerd", "--config", str(config), "config", "dump"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tomllib.loads(done.stdout)


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CONFIGS / "kubernetes" / name).read_text()))


def test_every_drop_in_is_known_here() -> None:
    assert {path.name for path in (CONFIGS / "containerd").iterdir()} == SECTIONS.keys()


@pytest.mark.parametrize("name", SECTIONS)
def test_handlers_name_the_shims_runtime_type(name: str) -> None:
    for handler in handlers(name).values():
        assert handler["runtime_type"] == "io.containerd.pykata.v2"
        assert handler["privileged_without_host_devices"]


@pytest.mark.skipif(not shutil.which("containerd"), reason="no containerd")
def test_containerd_1_keeps_its_default_runtime_and_the_nodes_settings(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(DEBIAN + (CONFIGS / "containerd" / "containerd-1.x-pykata.toml").read_text())

    document = dumped(config)
    if document["version"] != 2:
        pytest.skip("containerd is not 1.x")

    cri = document["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["cni"]["bin_dir"] == "/usr/lib/cni"
    assert cri["containerd"]["default_runtime_name"] == "runc"
    types = {name: runtime["runtime_type"] for name, runtime in cri["containerd"]["runtimes"].items()}
    assert types == {"runc": "io.containerd.runc.v2", "pykata": "io.containerd.pykata.v2"}


def test_both_generations_have_the_same_handlers() -> None:
    old, new = (handlers(name) for name in SECTIONS)
    for handler in new.values():
        assert handler.pop("sandboxer") == "podsandbox"  # a key that 1.x does not have

    assert old == new


def test_every_runtime_class_has_its_handler() -> None:
    classes = [item for path in (CONFIGS / "kubernetes").glob("runtimeclass-*.yaml") for item in manifests(path.name)]

    assert classes
    assert {item["handler"] for item in classes} <= handlers("containerd-1.x-pykata.toml").keys()


@pytest.mark.parametrize("kvm", ["yes", "no"])
def test_the_shipped_overhead_agrees_with_the_shipped_configuration(
    capsys: pytest.CaptureFixture[str], kvm: str
) -> None:
    """The example pod on a node of 2 CPUs, with and without hardware virtualization."""
    pod, of_class = (CONFIGS / "kubernetes" / name for name in ("pod-example.yaml", "runtimeclass-pykata.yaml"))
    node = ["--node-cpus", "2", "--node-memory", "8192", "--node-kvm", kvm]
    words = ["sizing", "explain", str(pod), "--runtimeclass", str(of_class), *node, "--json"]

    assert operator_main([*words, "--config", str(CONFIGS / "configuration-qemu.toml")]) == 0

    document = json.loads(capsys.readouterr().out)
    assert document["kubernetes"]["overhead"] == {"cpu": "250m", "memory": str(320 << 20)}
    view = document["policies"][document["policy_in_force"]]
    assert view["disagreements"] == []
    assert (view["vcpus"]["granted"], view["memory_mib"]["granted"]) == (1, 368)
    assert view["class_fixed"]["cpu"] == "250m"
    assert int(view["class_fixed"]["memory"].removesuffix("Mi")) <= (320 if kvm == "yes" else 334)


def test_the_shipped_configuration_counts_a_sandbox_in_its_pods_cgroup() -> None:
    shipped = tomllib.loads((CONFIGS / "configuration-qemu.toml").read_text())

    assert shipped["runtime"]["sandbox_cgroup_only"] is True


def test_the_zygotes_unit_leaves_its_forks_alive() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((CONFIGS / "systemd" / "pyshim-zygote.service").read_text())

    assert set(parser.sections()) <= {"Unit", "Service", "Install"}
    assert parser["Service"]["ExecStart"].endswith(f"{BINARY} -idle 0 zygote")
    assert parser["Service"]["KillMode"] == "process"


def test_the_example_uses_the_class() -> None:
    (pod,) = manifests("pod-example.yaml")

    assert pod["spec"]["runtimeClassName"] == manifests("runtimeclass-pykata.yaml")[0]["metadata"]["name"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    program = tmp_path / "pyshim"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for path in (*(CONFIGS / "systemd").glob("*.service"), *(CONFIGS / "systemd").glob("*.timer")):
        text = re.sub(f"/opt/pyshim/bin/(pyshim|{BINARY})", str(program), path.read_text())
        (tmp_path / path.name).write_text(text)

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
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.read(path)
        program, *words = unit["Service"]["ExecStart"].replace("\\\n", " ").split()
        if program == f"/opt/pyshim/bin/{BINARY}":
            assert parse(words).action == "zygote"
            continue
        assert program == "/opt/pyshim/bin/pyshim"
        command: click.Command = PYSHIM
        while isinstance(command, click.Group):
            name, found, words = command.resolve_command(click.Context(command), words)
            assert found is not None, path.name
            command = found
        command.make_context(name, words)
    for path in timers:
        assert path.with_suffix(".service").exists()


def test_a_wheel_holds_every_shipped_file(tmp_path: Path) -> None:
    """Where the package is installed, the files are beside it, as `SHIPPED_PATH` has it. A node needs no chart."""
    pytest.importorskip("setuptools.build_meta")
    project = CONFIGS.parent
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(project / name, tmp_path)
    for name in ("configs", "pyshim/config"):
        shutil.copytree(project / name, tmp_path / name)
    shutil.copy(project / "pyshim" / "__init__.py", tmp_path / "pyshim")  # it has the version
    source = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"

    subprocess.run([sys.executable, "-c", source, "dist"], cwd=tmp_path, check=True, capture_output=True)

    (wheel,) = (tmp_path / "dist").glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("configs/")}
    shipped = {str(path.relative_to(project)) for path in CONFIGS.rglob("*") if path.is_file()}
    assert packed == {name for name in shipped if not name.startswith("configs/helm/")}
