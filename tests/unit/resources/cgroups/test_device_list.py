"""The device list on this kernel's cgroup v1, around a real virtiofsd that forked before it was moved."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.host.processes.children import Children
from pyshim.host.processes.identity import family
from pyshim.model.cgroups import Group, GroupSetting, Role
from pyshim.model.host_facts import CgroupMode
from pyshim.resources.cgroups.host.hierarchies import Hierarchy, members, mounted
from pyshim.resources.cgroups.host.sandbox_cgroups import LinuxCgroups
from tests.fakes.ledger import FakeLedger
from tests.unit.pod.conftest import until
from tests.unit.resources.volumes.test_virtiofsd import REAL_C, needs_c, plan, serving_rights, start, unlink

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


@needs_c
@pytest.mark.root
async def test_the_virtiofsd_that_serves_is_in_the_list_and_opens_no_device_of_the_host(
    tmp_path: Path, devices: Hierarchy
) -> None:
    directory = f"{devices.mount_point}{group().path}"
    wanted = plan(binary=REAL_C, shared_dir=str(tmp_path), listen_path=str(tmp_path / "fs.sock"))
    deny = GroupSetting(role=Role.DEVICES, controller="devices", file="devices.deny", value="a", source="all")

    cgroups = LinuxCgroups(CgroupMode.V1, (devices,))
    await cgroups.make((group(),))
    assert await cgroups.apply(group(), (deny,)) == {}
    virtiofsd = await start(wanted, FakeLedger(unlink), Children(), tmp_path)
    with socket.socket(socket.AF_UNIX) as vmm:
        vmm.connect(wanted.listen_path)
        await until(lambda: serving_rights(virtiofsd.pid))
        assert len(list(family((virtiofsd.pid,)))) > 1, "it has forked"

        await cgroups.join_family(group(), (virtiofsd.pid,))

        assert set(members(directory)) == set(family((virtiofsd.pid,)))
        assert not opens(directory)
    await virtiofsd.stop()
    await until(lambda: not members(directory))
