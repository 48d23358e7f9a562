"""The plan of a VM that follows its containers: boots at the defaults, with room, and with what virtio-mem needs."""

from collections.abc import Callable
from typing import Any

import pytest

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.host_facts import HostFacts
from pyshim.model.oci import OciSpec
from pyshim.model.units import MIB
from pyshim.model.vm import LocalVm
from tests.fakes.inputs import host, spec
from tests.fakes.sandbox_plans import planned

ONLINE_AT_ONCE, MOVABLE = "memhp_default_state=online", "memory_hotplug.online_policy=auto-movable"


def vm_for(host: HostFacts, spec: Callable[..., OciSpec], *, static: bool = False, **qemu: Any) -> LocalVm:
    """The VM for one container of 1.5 CPUs and 300 MiB."""
    base = {"path": "/bin/qemu", "kernel": "/k", "image": "/i", "virtio_fs_daemon": "/v", "rootfs_type": "erofs"}
    tables = {
        "hypervisor": {"qemu": {**base, "default_memory": 512, **qemu}},
        "runtime": {"static_sandbox_resource_mgmt": static},
    }
    config = build_config(Source(path="/etc/test.toml", directory="/etc", document=tables))
    asked = {"cpu": {"quota": 150_000, "period": 100_000}, "memory": {"limit": 300 * MIB}}
    return planned(config, host, spec(linux={"resources": asked})).vm


@pytest.mark.parametrize(("kvm", "found"), [(False, (True, True)), (True, (False, False))], ids=["tcg", "kvm"])
def test_an_emulated_cpu_comes_online_without_calibrating_and_without_stopping_the_others(
    kvm: bool, found: tuple[bool, bool]
) -> None:
    vm = vm_for(host(kvm_usable=kvm), spec, kernel_hz=250)

    presets = [param for param in vm.boot.kernel_params if param.startswith("lpj=")]
    assert (len(presets) == 1, vm.cpu.model.endswith(",-mtrr")) == found


@pytest.mark.parametrize(
    ("hz", "khz", "preset"),
    [
        (100, 2_100_000, ["lpj=21000000"]),
        (250, 2_100_000, ["lpj=8400000"]),
        (1000, 2_100_000, ["lpj=2100000"]),
        (250, 0, ["lpj=20000000"]),
        (0, 2_100_000, []),
    ],
    ids=["slow tick", "ours", "fast tick", "rate not known", "kernel not known"],
)
def test_the_delay_loops_of_an_emulated_cpu_are_those_of_its_kernels_ticks(
    hz: int, khz: int, preset: list[str]
) -> None:
    vm = vm_for(host(kvm_usable=False, tsc_khz=khz), spec, kernel_hz=hz)

    assert [param for param in vm.boot.kernel_params if param.startswith("lpj=")] == preset


@pytest.mark.parametrize(
    ("kvm", "khz", "own", "said"),
    [
        (False, 2_100_000, "", ["tsc_early_khz=2100000"]),
        (False, 0, "", []),
        (True, 2_100_000, "", []),
        (False, 2_100_000, "tsc_early_khz=7", ["tsc_early_khz=7"]),
    ],
    ids=["known", "not known", "kvm", "the operator's"],
)
def test_an_emulated_cpu_is_told_the_rate_of_the_hosts_counter_which_is_its_own(
    kvm: bool, khz: int, own: str, said: list[str]
) -> None:
    vm = vm_for(host(kvm_usable=kvm, tsc_khz=khz), spec, kernel_params=own)

    assert [param for param in vm.boot.kernel_params if param.startswith("tsc_early_khz")] == said


@pytest.mark.parametrize(
    ("static", "qemu", "boot", "most"),
    [
        pytest.param(True, {}, (3, 812), (3, 812), id="static"),
        pytest.param(False, {}, (1, 512), (8, 16384), id="dynamic"),
        pytest.param(False, {"machine_type": "microvm"}, (3, 812), (3, 812), id="microvm-cannot-grow"),
    ],
)
def test_a_vm_boots_at_the_defaults_only_if_it_can_grow_later(
    static: bool, qemu: dict[str, Any], boot: tuple[int, int], most: tuple[int, int]
) -> None:
    vm = vm_for(host(), spec, static=static, **qemu)

    assert (vm.cpu.boot_vcpus, vm.memory.boot_mib) == boot
    assert (vm.cpu.max_vcpus, vm.memory.max_mib) == most


@pytest.mark.parametrize(
    ("static", "machine", "enabled", "used"),
    [
        pytest.param(False, "q35", True, True, id="asked-for"),
        pytest.param(False, "q35", False, False, id="not-asked-for"),
        pytest.param(True, "q35", True, False, id="never-resized"),
        pytest.param(False, "microvm", True, False, id="microvm"),
    ],
)
def test_virtio_mem_and_its_kernel_parameters_come_where_a_vm_is_resized_with_it(
    static: bool, machine: str, enabled: bool, used: bool
) -> None:
    vm = vm_for(host(), spec, static=static, machine_type=machine, enable_virtio_mem=enabled)

    assert vm.memory.virtio_mem is used
    follows = not static and machine == "q35"
    wanted = {*({ONLINE_AT_ONCE} if follows else ()), *({MOVABLE} if used else ())}
    assert {ONLINE_AT_ONCE, MOVABLE} & set(vm.boot.kernel_params) == wanted


def test_the_operators_own_parameter_for_added_memory_wins() -> None:
    vm = vm_for(host(), spec, enable_virtio_mem=True, kernel_params="memhp_default_state=online_movable")

    assert [param for param in vm.boot.kernel_params if param.startswith("memhp_")] == [
        "memhp_default_state=online_movable"
    ]
