"""The device list on this kernel: on cgroup v1 around processes that were forked before they were moved, and on v2."""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.host.processes.children import Children
from pyshim.host.processes.identity import family
from pyshim.model.confinement import Group, GroupSetting, Role
from pyshim.model.host_facts import CgroupMode
from pyshim.resources.cgroups.host.device_program import DeviceList, program
from pyshim.resources.cgroups.host.hierarchies import Hierarchy, members, mounted
from pyshim.resources.cgroups.host.sandbox_cgroups import LinuxCgroups
from pyshim.resources.cgroups.host.v2 import CgroupsV2
from pyshim.resources.cgroups.plan.settings import allowed_devices, device_settings
from tests.unit.pod.conftest import until

DEVICE = "/dev/loop0"
_OPEN = """
import os, sys
cgroup, device = sys.argv[1:]
if cgroup:
    with open(f"{cgroup}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
try:
    os.close(os.open(device, os.O_RDONLY))
except PermissionError:
    sys.exit(1)
"""


def opens(cgroup: str = "") -> bool:
    """A root process, in the cgroup, opens the host's device."""
    return subprocess.run((sys.executable, "-c", _OPEN, cgroup, DEVICE), check=False, timeout=60).returncode == 0


@pytest.fixture
def devices() -> Iterator[Hierarchy]:
    found = [each for each in mounted() if "devices" in each.controllers]
    if not found or not os.access(found[0].mount_point, os.W_OK) or not os.path.exists(DEVICE) or not opens():
        pytest.skip(f"needs a devices hierarchy of cgroup v1, and {DEVICE} open to root")
    yield found[0]
    for directory in (
        f"{found[0].mount_point}{group().path}",
        f"{found[0].mount_point}{os.path.dirname(group().path)}",
    ):
        os.rmdir(directory)


def group() -> Group:
    return Group(role=Role.DEVICES, path=f"/pyshim-test-{os.getpid()}/vmm", controllers=("devices",))


@pytest.mark.root
async def test_processes_forked_before_the_move_are_in_the_list_and_open_no_device_of_the_host(
    devices: Hierarchy,
) -> None:
    """As the Rust virtiofsd does, whose second process serves the guest."""
    directory = f"{devices.mount_point}{group().path}"
    deny = GroupSetting(role=Role.DEVICES, controller="devices", file="devices.deny", value="a", source="all")

    cgroups = LinuxCgroups(CgroupMode.V1, (devices,))
    await cgroups.make((group(),))
    assert await cgroups.apply(group(), (deny,)) == {}
    program = await Children().spawn(("/bin/sh", "-c", "sleep 600 & wait"))
    await until(lambda: len(list(family((program.pid,)))) > 1)

    await cgroups.join_family(group(), (program.pid,))

    assert set(members(directory)) == set(family((program.pid,)))
    assert not opens(directory)
    for pid in [*family((program.pid,))]:  # found before the first is killed, whose children get another parent
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not members(directory))


@pytest.fixture
def v2_cgroup() -> Iterator[str]:
    """The directory of a cgroup v2, of a hierarchy that may have no controllers: the program needs none."""
    found = [each for each in mounted() if not each.controllers]
    if not found or not os.access(found[0].mount_point, os.W_OK) or not os.path.exists(DEVICE) or not opens():
        pytest.skip(f"needs a cgroup v2 hierarchy, and {DEVICE} open to root")
    directory = f"{found[0].mount_point}/pyshim-test-{os.getpid()}"
    os.mkdir(directory)
    yield directory
    os.rmdir(directory)


DEVICE_RULE = "b 7:0"
"""The numbers of DEVICE."""


@pytest.mark.root
@pytest.mark.parametrize(
    ("rules", "allowed"),
    [
        ([], False),
        (["c 7:0 rwm"], False),
        ([f"{DEVICE_RULE} m"], False),
        ([f"{DEVICE_RULE} w"], False),
        (["b 7:1 rwm"], False),
        (["b 8:0 rwm", "c *:* m", "b *:* m"], False),
        ([f"{DEVICE_RULE} rwm"], True),
        ([f"{DEVICE_RULE} r"], True),
        (["b 7:* rwm"], True),
        (["b *:* rm"], True),
        (["c 1:3 rwm", "b 8:0 rwm", f"{DEVICE_RULE} rwm"], True),
    ],
    ids=str,
)
def test_a_program_of_v2_allows_what_its_rules_say(v2_cgroup: str, rules: list[str], allowed: bool) -> None:
    devices = DeviceList(v2_cgroup)
    devices.allow(*rules)
    devices.close()

    assert opens(), "the control: outside the cgroup"
    assert opens(v2_cgroup) is allowed


@pytest.mark.root
def test_a_program_of_v2_takes_a_rule_more_and_never_lets_go_of_the_list(v2_cgroup: str) -> None:
    devices = DeviceList(v2_cgroup)
    devices.allow()
    before = opens(v2_cgroup)
    devices.allow(f"{DEVICE_RULE} rwm")

    assert (before, opens(v2_cgroup)) == (False, True)
    devices.close()


@pytest.mark.root
async def test_the_settings_of_v1_become_a_program_of_v2(v2_cgroup: str) -> None:
    root, _, name = v2_cgroup.rpartition("/")
    group = Group(role=Role.SANDBOX, path=f"/{name}")
    settings = device_settings(Role.SANDBOX, [("b 8:0 rwm", "a disk")])

    cgroups = LinuxCgroups(CgroupMode.V2, (Hierarchy(root, ()),))
    assert await cgroups.apply(group, settings) == {}
    assert not opens(v2_cgroup)
    assert await cgroups.apply(group, allowed_devices(Role.SANDBOX, [(f"{DEVICE_RULE} rwm", DEVICE)])) == {}
    assert opens(v2_cgroup)
    await cgroups.leave((group,))


def test_a_cgroup_that_takes_no_program_is_a_problem_with_its_cause(tmp_path: Path) -> None:
    tree = CgroupsV2((Hierarchy(str(tmp_path), ()),))
    group = Group(role=Role.SANDBOX, path="/missing")
    settings = device_settings(Role.SANDBOX, [])

    failed = tree.apply_all(group, settings)

    assert failed.keys() == set(settings)
    assert len(set(failed.values())) == 1
    assert failed[settings[0]].startswith("attach program: E")


def test_a_program_is_the_size_of_its_rules() -> None:
    """An instruction has 8 bytes, and no jump leaves the program."""
    code = program(["c *:* m", "b *:* m", "c 1:3 rwm", "c 10:200 rw"])

    assert len(code) % 8 == 0
    jumps = [(at, struct.unpack_from("<h", code, at + 2)[0]) for at in range(0, len(code), 8) if code[at] == 0x55]
    assert all(offset > 0 and at // 8 + offset < len(code) // 8 - 1 for at, offset in jumps)
