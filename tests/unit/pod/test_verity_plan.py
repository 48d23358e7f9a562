"""dm-verity of the root disk on the kernel's command line."""

import pytest
from msgspec.structs import replace

from hypervisors.qemu.cmdline import kernel_command_line
from pyshim.model.errors import InvalidArgument
from pyshim.pod.plan.verity import root_device
from tests.fakes.inputs import config, host, spec
from tests.fakes.sandbox_plans import planned

PARTS = {
    "root_hash": "ab" * 32,
    "salt": "cd" * 32,
    "data_blocks": "100",
    "data_block_size": "4096",
    "hash_block_size": "4096",
}


def text(**changes: str) -> str:
    return ",".join(f"{key}={value}" for key, value in {**PARTS, **changes}.items() if value)


def test_the_root_is_checked_block_by_block_and_the_line_can_be_parsed() -> None:
    keys = {"kernel_verity_params": text(), "disable_image_nvdimm": True, "rootfs_type": "ext4"}

    params = planned(config(**keys), host(), spec()).vm.boot.kernel_params

    line = kernel_command_line(params)
    wanted = (
        'dm-mod.create="dm-verity,,,ro,0 800 verity 1 /dev/vda1 /dev/vda2 4096 4096 100 0 sha256 '
        f'{PARTS["root_hash"]} {PARTS["salt"]}" '
        "root=/dev/dm-0 rootfstype=ext4 rootflags=data=ordered,errors=remount-ro ro"
    )
    assert wanted in line
    assert "dax" not in line


def test_a_root_in_persistent_memory_has_its_own_device_names() -> None:
    line = kernel_command_line(planned(config(kernel_verity_params=text()), host(), spec()).vm.boot.kernel_params)

    assert "verity 1 /dev/pmem0p1 /dev/pmem0p2" in line
    assert "dax" not in line


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (text(salt=""), "salt is missing"),
        (text(root_hash="xy"), "root_hash = 'xy' is not hexadecimal"),
        (text(root_hash="abc"), "root_hash = 'abc' is not hexadecimal"),
        (text(data_blocks="0"), "data_blocks = '0'"),
        (text(data_blocks="-1"), "data_blocks = '-1'"),
        (text(data_block_size="1000"), "data_block_size = 1000 is not a multiple of 512"),
        (text(data_blocks="9" * 18, data_block_size="9" * 15 + "000"), "data_block_size"),
        (text() + ",salt=00", "salt is given twice"),
        ("nonsense", "'nonsense' is not one of"),
        (text() + ",x=1", "'x=1' is not one of"),
    ],
)
def test_what_the_kernel_would_fail_on_silently_is_refused_by_name(params: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match="read kernel_verity_params: ") as caught:
        root_device(params, data="/dev/a", hashes="/dev/b")

    assert named in str(caught.value)


def extension(**changes: str) -> dict[str, str]:
    return {"name": "coco", "path": "/images/coco.img", "verity_params": "", **changes}


def test_an_extension_is_a_disk_by_its_name_and_a_parameter_that_has_the_guest_mount_it() -> None:
    images = [extension(verity_params=text()), extension(name="gpu", path="/images/gpu.img")]

    vm = planned(config(guest_extension_images=images), host(), spec()).vm

    assert [(disk.name, disk.path) for disk in vm.extensions] == [
        ("coco", "/images/coco.img"),
        ("gpu", "/images/gpu.img"),
    ]
    params = vm.boot.kernel_params
    assert f"kata.extension.coco.verity_params={text()}" in params
    assert "kata.extension.gpu.verity_params" in params


def test_a_mistake_in_an_extensions_verity_is_named() -> None:
    images = [extension(verity_params="root_hash=12")]

    with pytest.raises(InvalidArgument, match="verity_params in guest_extension_images of 'coco': salt is missing"):
        planned(config(guest_extension_images=images), host(), spec())


@pytest.mark.parametrize(
    ("cdh_s", "launch_s", "params"),
    [(50.0, 6.0, set()), (0.5, 15.0, {"agent.cdh_api_timeout=1", "agent.launch_process_timeout=15"})],
)
def test_the_agent_is_told_timeouts_that_are_not_its_own(cdh_s: float, launch_s: float, params: set[str]) -> None:
    asked = config()
    agent = replace(asked.agent, cdh_api_timeout_s=cdh_s, launch_process_timeout_s=launch_s)

    params_of_kernel = planned(replace(asked, agent=agent), host(), spec()).vm.boot.kernel_params

    assert {param for param in params_of_kernel if "_timeout=" in param and "hotplug" not in param} == params
