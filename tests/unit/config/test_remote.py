"""Files with [hypervisor.remote]: what their keys mean, and what pods may choose there."""

from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import pytest

from pyshim.config.effective import Level
from pyshim.config.keys import Table, Verdict
from pyshim.config.load import load_config, warnings
from pyshim.model.errors import FailedPrecondition, InvalidArgument

from .documents import examined, options, write

H = "io.katacontainers.config.hypervisor."
CHOOSER = "io.katacontainers.config.runtime.hypervisor_name"
OPEN = "[hypervisor.remote]\nenable_annotations = ['machine_type', 'image', 'default_', 'gpu_model', 'shared_fs']\n"


def test_keys_default_to_their_only_permitted_value(tmp_path: Path) -> None:
    config = load_config(options(write(tmp_path / "c.toml", "[hypervisor.remote]\n")), {}, {})

    assert config.hypervisor.shared_fs == "none"
    assert config.runtime.internetworking_model == "none"
    assert config.runtime.static_sandbox_resource_mgmt
    assert config.runtime.experimental_force_guest_pull
    assert (config.hypervisor.machine_type, config.hypervisor.image) == ("", "")
    assert config.hypervisor.remote_hypervisor_socket == "/run/peerpod/hypervisor.sock"


@pytest.mark.parametrize(
    ("hypervisor", "request_s", "set_up_s"), [("remote", 60, 300), ("remote", 400, 400), ("qemu", 60, 60)]
)
def test_only_the_set_up_of_a_remote_sandbox_has_more_time_than_other_requests(
    tmp_path: Path, hypervisor: str, request_s: int, set_up_s: int
) -> None:
    text = f"[hypervisor.{hypervisor}]\n[agent.kata]\nrequest_timeout = {request_s}\n"
    config = load_config(options(write(tmp_path / "c.toml", text)), {}, {})

    assert (config.agent.request_timeout_s, config.set_up_timeout_s) == (request_s, set_up_s)


FIXED = [
    ("[hypervisor.remote]\nshared_fs = 'virtio-fs'", "shares no files"),
    ("[hypervisor.remote]\n[runtime]\ninternetworking_model = 'tcfilter'", "connects the pod's network"),
    ("[hypervisor.remote]\n[runtime]\nstatic_sandbox_resource_mgmt = false", "keeps its size"),
    ("[hypervisor.remote]\n[runtime]\nemptydir_mode = 'block-plain'", "no disks of this host"),
]


@pytest.mark.parametrize(("text", "why"), FIXED, ids=[why for _, why in FIXED])
def test_another_value_is_an_error_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    path = write(tmp_path / "c.toml", text)

    with pytest.raises(InvalidArgument, match=why) as caught:
        load_config(options(path), {}, {})

    assert f"line {len(text.splitlines())}" in str(caught.value)


def test_machine_type_and_image_are_names_of_the_service(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "[hypervisor.remote]\nimage = './podvm:7'\nmachine_type = 'Standard_B2s'\n")

    config = load_config(options(path), {}, {})

    assert (config.hypervisor.image, config.hypervisor.machine_type) == ("./podvm:7", "Standard_B2s")


def test_a_pod_may_choose_type_image_size_and_gpus(tmp_path: Path) -> None:
    annotations = {
        H + "machine_type": "p5.48xlarge",
        H + "image": "ami-1234",
        H + "default_vcpus": "1.5",
        H + "default_memory": "4096",
        H + "default_gpus": "8",
        H + "default_gpu_model": "H100",
    }

    found = load_config(options(write(tmp_path / "c.toml", OPEN)), annotations, {}).hypervisor

    assert (found.machine_type, found.image) == ("p5.48xlarge", "ami-1234")
    assert (found.default_vcpus, found.default_memory_mib) == (Fraction(3, 2), 4096)
    assert (found.default_gpus, found.default_gpu_model) == (8, "H100")


@pytest.mark.parametrize(("memory", "is_taken"), [("1", True), ("63", True), ("0", False)])
def test_a_remote_vm_may_be_of_any_size(tmp_path: Path, memory: str, is_taken: bool) -> None:
    path = write(tmp_path / "c.toml", OPEN)

    with nullcontext() if is_taken else pytest.raises(InvalidArgument, match="default_memory"):
        found = load_config(options(path), {H + "default_memory": memory}, {}).hypervisor
        assert found.default_memory_mib == int(memory)


@pytest.mark.parametrize(
    ("annotation", "value", "why"),
    [
        ("default_gpus", "many", "expected a number, not 'many'"),
        ("default_gpus", "-1", "-1 is not between 0 and 1024"),
        ("shared_fs", "virtio-fs", "shares no files"),
        ("kernel", "/etc/passwd", "not enabled by enable_annotations"),
    ],
)
def test_what_a_pod_may_not_choose_is_refused(tmp_path: Path, annotation: str, value: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        load_config(options(write(tmp_path / "c.toml", OPEN)), {H + annotation: value}, {})


def test_keys_of_a_vmm_on_this_host_have_no_effect_and_are_named(tmp_path: Path) -> None:
    text = (
        "[hypervisor.remote]\nkernel = '/boot/vmlinuz'\nvirtio_fs_cache = 'always'\ndefault_vcpus = 2\n"
        "block_device_driver = 'virtio-blk-ccw'\nenable_hugepages = true\ndefault_maxmemory = 1\n"
    )

    effective = examined(tmp_path / "c.toml", text)

    assert warnings(effective) == (
        "hypervisor.remote.kernel has no effect: the service that makes remote VMs decides",
        "hypervisor.remote.virtio_fs_cache has no effect: the service that makes remote VMs decides",
        "hypervisor.remote.block_device_driver has no effect: the service that makes remote VMs decides",
        "hypervisor.remote.enable_hugepages has no effect: the service that makes remote VMs decides",
    )
    assert load_config(options(tmp_path / "c.toml"), {}, {}).hypervisor.default_maxmemory_mib == 1


def test_a_confidential_guest_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "[hypervisor.remote]\nconfidential_guest = true\n")

    with pytest.raises(FailedPrecondition, match=r"hypervisor\.remote\.confidential_guest = true"):
        load_config(options(path), {}, {})


def test_with_qemu_the_keys_of_remote_vms_have_no_effect(tmp_path: Path) -> None:
    effective = examined(tmp_path / "c.toml", "[hypervisor.qemu]\ndefault_gpus = 1\nremote_hypervisor_timeout = 9\n")

    assert [finding.verdict for finding in effective.findings] == [Verdict.NO_EFFECT, Verdict.NO_EFFECT]
    assert {finding.text for finding in effective.findings} == {"only remote VMs have it"}
    assert effective.of(Table.HYPERVISOR, "shared_fs").value == "virtio-fs"


def test_one_file_for_both_and_the_pod_chooses(tmp_path: Path) -> None:
    both = write(tmp_path / "c.toml", "[hypervisor.qemu]\n[hypervisor.remote]\n")

    assert load_config(options(both), {}, {}).hypervisor_name == "qemu"
    chosen = load_config(options(both), {CHOOSER: "remote"}, {})
    assert (chosen.hypervisor_name, chosen.hypervisor.shared_fs) == ("remote", "none")


def test_a_pod_cannot_choose_a_hypervisor_without_a_table(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"has no table hypervisor\.remote"):
        load_config(options(write(tmp_path / "c.toml", "[hypervisor.qemu]\n")), {CHOOSER: "remote"}, {})
    with pytest.raises(FailedPrecondition, match=r"has no table hypervisor\.qemu"):
        load_config(options(write(tmp_path / "d.toml", "[hypervisor.remote]\n")), {CHOOSER: "qemu"}, {})


def test_a_check_of_such_a_file_finds_nothing_wrong(tmp_path: Path) -> None:
    effective = examined(tmp_path / "c.toml", OPEN)

    assert max(finding.level for finding in effective.findings) is Level.FINE
