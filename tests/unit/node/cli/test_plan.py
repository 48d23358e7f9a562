"""`pyshim plan`: the plans of a bundle or a manifest, and nothing touched."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pyshim.node.cli.command import run

CONFIGURATION = """\
[hypervisor.qemu]
path = "/usr/bin/qemu"
kernel = "/boot/vmlinuz"
initrd = "/boot/initrd"
virtio_fs_daemon = "/usr/libexec/virtiofsd"
accelerator = "tcg"
agent_channel = "auto"
enable_annotations = ["default_vcpus"]
default_memory = 256
[runtime]
static_sandbox_resource_mgmt = true
"""
POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: web
  annotations:
    io.katacontainers.config.hypervisor.default_vcpus: "{vcpus}"
    io.kubernetes.cri.container-type: "nonsense"
spec:
  {more}
  containers:
    - name: main
      image: busybox
      resources: {{limits: {{cpu: "1", memory: 256Mi}}}}
"""


@pytest.fixture
def config(tmp_path: Path) -> list[str]:
    path = tmp_path / "c.toml"
    path.write_text(CONFIGURATION)
    return ["--config", str(path)]


def pod(directory: Path, *, vcpus: str = "1", more: str = "restartPolicy: Never") -> str:
    path = directory / "pod.yaml"
    path.write_text(POD.format(vcpus=vcpus, more=more))
    return str(path)


def bundle(directory: Path, annotations: dict[str, str] | None = None, **changes: Any) -> str:
    path = directory / "c1"
    path.mkdir()
    spec = {
        "ociVersion": "1.1.0",
        "process": {"args": ["sh"], "cwd": "/", "env": ["PASSWORD=secret", "HOME=/"]},
        "root": {"path": "rootfs"},
        "mounts": [{"destination": "/data", "type": "bind", "source": str(directory), "options": ["rbind", "ro"]}],
        "annotations": annotations or {},
        "linux": {"namespaces": [{"type": "mount"}, {"type": "network"}]},
    }
    (path / "config.json").write_text(json.dumps({**spec, **changes}))
    return str(path)


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert run(["plan", *words, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_pod_has_the_vm_of_its_limits_and_annotations(
    tmp_path: Path, config: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = planned([pod(tmp_path, vcpus="1"), *config], capsys)

    assert found["title"] == "Pod default/web"
    assert found["config"]["hypervisor"]["path"] == "/usr/bin/qemu"
    assert found["sandbox"]["vm"]["cpu"]["boot_vcpus"] == found["sandbox"]["sizing"]["vcpus"]["granted"]
    assert found["sandbox"]["sizing"]["memory_mib"]["granted"] == 512
    assert found["argv"][0] == "/usr/bin/qemu"
    assert "size=512M" in found["argv"][found["argv"].index("-object") + 1]
    assert found["container"] is None


def test_people_see_size_mounts_and_command_line(
    tmp_path: Path, config: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", pod(tmp_path), *config]) == 0

    shown = capsys.readouterr().out
    assert shown.startswith("Pod default/web\nconfiguration  ")
    assert "\nmemory         512 MiB, up to 512 MiB" in shown
    assert "  bind /run/kata-containers/shared/sandboxes/pod/mounts on " in shown
    assert "\n  /usr/bin/qemu \\\n    -name sandbox-pod" in shown
    assert "network cards: they come from the pod's network namespace" in shown


def test_a_container_of_its_own_has_sandbox_and_mounts(
    tmp_path: Path, config: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = planned([bundle(tmp_path), *config], capsys)

    assert found["title"] == "single_container 'c1'"
    assert str(tmp_path) in [bind["mount"]["source"] for bind in found["container"]["binds"]]
    assert found["argv"]


def test_values_of_the_environment_are_not_shown(
    tmp_path: Path, config: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = planned([bundle(tmp_path), *config], capsys)

    assert found["container"]["guest"]["spec"]["process"]["env"] == ["PASSWORD", "HOME"]
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize(
    ("annotations", "title", "has_sandbox", "has_container"),
    [
        ({"io.kubernetes.cri.container-type": "sandbox"}, "pod_sandbox 'c1'", True, False),
        (
            {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "pod1"},
            *("pod_container 'c1'", False, True),
        ),
    ],
)
def test_a_container_of_a_pod_has_no_vm_of_its_own(
    tmp_path: Path,
    config: list[str],
    annotations: dict[str, str],
    title: str,
    has_sandbox: bool,
    has_container: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (found,) = planned([bundle(tmp_path, annotations), *config], capsys)

    assert found["title"] == title
    assert (found["sandbox"] is not None, found["container"] is not None) == (has_sandbox, has_container)


def test_a_plan_touches_no_file(tmp_path: Path, config: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = bundle(tmp_path)
    before = sorted(str(each) for each in tmp_path.rglob("*"))
    there = {each: os.path.exists(each) for each in ("/run/vc/vm/c1", "/run/kata-containers/shared/sandboxes/c1")}

    planned([path, *config], capsys)

    assert sorted(str(each) for each in tmp_path.rglob("*")) == before
    assert {each: os.path.exists(each) for each in there} == there


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, "pyshim: read manifest '{path}'"),
        (POD.format(vcpus="two", more="x: 1"), "io.katacontainers.config.hypervisor.default_vcpus"),
        (POD.format(vcpus="1", more="hostNetwork: true"), "hostNetwork is true"),
    ],
)
def test_a_manifest_that_cannot_run_is_one_line(
    tmp_path: Path, config: list[str], text: str | None, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.yaml"
    if text is not None:
        path.write_text(text)

    assert run(["plan", str(path), *config]) == 1

    shown = capsys.readouterr()
    assert error.format(path=path) in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "config.json': ENOENT (no such file or directory)"),
        ("{", "pyshim: parse spec '"),
        ('{"process": {"args": []}, "root": {"path": "r"}}', "process.args is empty"),
    ],
)
def test_a_bundle_that_is_none_is_one_line(
    tmp_path: Path, config: list[str], content: str | None, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b").mkdir()
    if content is not None:
        (tmp_path / "b" / "config.json").write_text(content)

    assert run(["plan", f"{tmp_path}/b", *config]) == 1

    shown = capsys.readouterr()
    assert error in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)


INSTANCES = """\
[device.l4]
kind = "nvidia.com/gpu"
count = 4

[[type]]
name = "g-small"
vcpus = 4
memory_mib = 16384
device = "l4"
devices = 1

[[type]]
name = "g-large"
vcpus = 8
memory_mib = 65536
device = "l4"
devices = 2
"""


@pytest.fixture
def remote(tmp_path: Path) -> list[str]:
    (tmp_path / "instances.toml").write_text(INSTANCES)
    path = tmp_path / "remote.toml"
    enabled = 'enable_annotations = ["default_vcpus"]\n'
    table = f'[runtime]\ninstance_types = "{tmp_path}/instances.toml"\n'
    path.write_text(f'[hypervisor.remote]\nremote_hypervisor_socket = "/run/none.sock"\n{enabled}{table}')
    return ["--config", str(path)]


@pytest.mark.parametrize(("claimed", "chosen"), [("l4=1", "g-small"), ("l4=2", "g-large")])
def test_the_type_of_a_remote_vm_follows_from_the_devices_of_its_claims(
    tmp_path: Path, remote: list[str], capsys: pytest.CaptureFixture[str], claimed: str, chosen: str
) -> None:
    (found,) = planned([pod(tmp_path), *remote, "--claimed", claimed], capsys)

    assert found["sandbox"]["vm"]["machine_type"] == chosen


def test_a_pod_with_claims_is_said_to_have_a_type_that_the_scheduler_decides(
    tmp_path: Path, remote: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = planned([pod(tmp_path, more="resourceClaims: [{name: gpu}]"), *remote], capsys)

    assert found["sandbox"]["vm"]["machine_type"] == ""
    assert [line for line in found["left_out"] if "the scheduler chooses them" in line]


@pytest.mark.parametrize(
    ("claimed", "said"),
    [
        ("l4", "'l4': expected PRODUCT=NUMBER"),
        ("l4=0", "'l4=0': expected PRODUCT=NUMBER"),
        ("l4=3", "no type of the table has all of it"),
        ("h100=1", "choose instance type for 1 h100"),
    ],
)
def test_claimed_devices_that_no_type_has_are_refused(
    tmp_path: Path, remote: list[str], capsys: pytest.CaptureFixture[str], claimed: str, said: str
) -> None:
    assert run(["plan", pod(tmp_path), *remote, "--claimed", claimed]) == 1

    assert said in capsys.readouterr().err


def test_a_warning_of_the_configuration_is_one_line_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(CONFIGURATION.replace("default_memory", "my_key = 1\ndefault_memory"))
    manifest = Path(pod(tmp_path))
    manifest.write_text(f"{manifest.read_text()}---\n{manifest.read_text().replace('name: web', 'name: two')}")

    assert run(["plan", "--config", str(file), str(manifest)]) == 0
    line = f"pyshim: warning: {file}:9: hypervisor.qemu.my_key is not a known key\n"
    assert capsys.readouterr().err == line
