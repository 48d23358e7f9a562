"""Devices behind every kind of port in a real guest: found where the plan said, given to containers by name, gone.

What QEMU has of its own stands in for hardware: `edu` devices and virtio disks. Containers run on the guest's own root
file system; one of them plays the driver that writes the guest's CDI specs.
"""

import asyncio
import os
import shlex
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.qemu.vm import QemuVm
from pyshim.agent.client import AgentClient
from pyshim.agent.connect import Connector
from pyshim.cleanup.undo import undo_entry
from pyshim.host.processes.children import Children
from pyshim.model.errors import AgentGone, DeadlineExceeded, FailedPrecondition, ShimError, Unavailable
from pyshim.model.guest import GuestContainer, GuestDevice, GuestSandbox
from pyshim.model.vm import EmulatedDevice, LocalVm, MemoryBacking, PciLayout, PortKind, VhostUserBackend
from pyshim.resources.devices.plan.pci_topology import pci_layout
from tests.fakes import inputs
from tests.fakes.disks import disk
from tests.fakes.ledger import FakeLedger
from tests.fakes.vm_config import OURS, vm_config

QEMU = "/usr/bin/qemu-system-x86_64"
STORAGE_DAEMON = "/usr/bin/qemu-storage-daemon"
GUEST = Path(__file__).parents[2] / ".build" / "guest"
PARAMS = tuple("console=hvc0 quiet panic=1 reboot=k cryptomgr.notests root=/dev/vda1 intel_iommu=on iommu=pt".split())
TIMEOUT_S = 150.0
"""For whatever is expected to happen, under emulation on a machine however busy."""
HOST_ADDRESS = "0000:65:00.0"
ENV = ("PATH=/usr/bin", f"PCIDEVICE_TOY_ORG_EDU={HOST_ADDRESS}")
"""With what a device plugin writes: an address of the host's."""

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(220),
    pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}"),
    pytest.mark.skipif(not (GUEST / "vmlinuz").exists(), reason=f"needs {GUEST} (hint: make guest)"),
]

# What a driver's tool does once its devices are there: one CDI device per function, counted in guest PCI order. YAML is
# what most of them write.
WRITE_SPEC = """
mkdir -p /run/cdi; n=0
printf 'cdiVersion: 0.5.0\\nkind: toy.org/edu\\ndevices:\\n' > /run/cdi/.new
for dev in $(ls -d /sys/bus/pci/devices/*); do
  [ "$(cat $dev/vendor)$(cat $dev/device)" = 0x12340x11e8 ] || continue
  cat >> /run/cdi/.new << END
- name: "$n"
  containerEdits:
    env:
    - TOY_$n=$(basename $dev)
    mounts:
    - hostPath: $(readlink -f $dev)
      containerPath: /mnt/$n
      options: [bind, ro]
END
  n=$((n+1))
done
mv /run/cdi/.new /run/cdi/toy.yaml
all='{"cdiVersion":"0.5.0","kind":"toy.org/all","devices":[{"name":"0","containerEdits":{"env":["ALL=json"]}}]}'
echo "$all" > /run/cdi/all.json
"""


def config(tmp_path: Path, layout: PciLayout) -> LocalVm:
    plain = vm_config(uuid=OURS, vm_dir=str(tmp_path / "vm"), share=None, hypervisor_path=QEMU, pci=layout)
    boot = replace(
        plain.boot,
        kernel=str(GUEST / "vmlinuz"),
        initrd=str(GUEST / "initrd.img"),
        image=str(GUEST / "rootfs.img"),
        kernel_params=(*PARAMS, "agent.server_addr=serial:///dev/virtio-ports/org.pykata.agent.0"),
    )
    # For the program that serves a disk out of the guest's memory.
    return replace(plain, boot=boot, memory=replace(plain.memory, backing=MemoryBacking.SHARED_MEMFD))


def layout_of(kind: PortKind, *names: str) -> PciLayout:
    asked = inputs.config(cold_plug_vfio=kind, pcie_root_port=2, pcie_switch_port=2)
    return pci_layout(asked, [EmulatedDevice(id=name, model="edu") for name in names])


def spec(script: str, annotations: Mapping[str, str], devices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "ociVersion": "1.0.2",
        "process": {"args": ["sh", "-c", script], "env": list(ENV), "cwd": "/", "user": {"uid": 0, "gid": 0}},
        # The guest's own root, whose /run and /sys come along.
        "root": {"path": "/"},
        "mounts": [
            {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]}
            for path in ("/dev", "/mnt")
        ],
        "annotations": dict(annotations),
        "linux": {"namespaces": [{"type": "mount"}, {"type": "ipc"}], "devices": devices, "resources": {}},
    }


class Guest:
    def __init__(self, agent: AgentClient) -> None:
        self._agent = agent
        self._count = 0

    async def run(
        self,
        script: str,
        annotations: Mapping[str, str] | None = None,
        devices: tuple[GuestDevice, ...] = (),
        *,
        lines: bool = False,
    ) -> list[str]:
        """The words a container prints, or its lines."""
        self._count += 1
        name = f"c{self._count}"
        nodes = [
            {"path": device.container_path, "type": "c" if device.type == "vfio-pci" else "b", "major": 0, "minor": 0}
            for device in devices
            if device.type != "vfio-pci-gk"
        ]
        container = GuestContainer(
            container_id=name,
            spec=spec(script, annotations or {}, nodes),
            storages=(),
            devices=devices,
            shared_pid_namespace=False,
        )
        await self._agent.create_container(container, TIMEOUT_S)
        await self._agent.start_container(name)
        output = b""
        while chunk := await self._agent.read_stdout(name, name, 1 << 16):
            output += chunk
        errors = await self._agent.read_stderr(name, name, 1 << 16)
        assert await self._agent.wait_process(name, name) == 0, errors
        await self._agent.remove_container(name, 10)
        return output.decode().splitlines() if lines else output.decode().split()


async def scenario(vm: QemuVm, guest: Guest, tmp_path: Path) -> None:
    # A container that asks before the driver is ready waits for the driver's spec.
    early = asyncio.create_task(
        guest.run("echo $TOY_0; cat /mnt/0/device; ls /mnt", {"cdi.k8s.io/vfio1": "toy.org/edu=0"})
    )
    await guest.run(WRITE_SPEC)
    assert await early == ["0000:01:01.0", "0x11e8", "0"]

    # The plan's order is the guest's: bridge, root ports, switch.
    paths = ["02/01", "1c/00", "1e/00/00/00"]
    toys = await guest.run(
        "for n in $TOY_0 $TOY_1 $TOY_2; do readlink -f /sys/bus/pci/devices/$n; done",
        {"cdi.k8s.io/a": "toy.org/edu=0,toy.org/edu=1", "cdi.k8s.io/b": "toy.org/edu=2"},
    )
    assert [guest_path(folder) for folder in toys] == paths

    assert await guest.run("echo $ALL", {"cdi.k8s.io/a": "toy.org/all=0"}) == ["json"]

    # Two containers share the VM and see none of the other's devices.
    one, other = await asyncio.gather(
        guest.run("env | grep ^TOY_ | cut -d= -f1; ls /mnt", {"cdi.k8s.io/vfio1": "toy.org/edu=0,toy.org/edu=2"}),
        guest.run("env | grep ^TOY_ | cut -d= -f1; ls /mnt", {"cdi.k8s.io/vfio2": "toy.org/edu=1"}),
    )
    assert (sorted(one), sorted(other)) == (["0", "2", "TOY_0", "TOY_2"], ["1", "TOY_1"])

    # A device message names the guest's address of a host's function in what device plugins write.
    passed = GuestDevice(
        id="7", type="vfio-pci-gk", vm_path="", container_path="/dev/vfio/7", options=(f"{HOST_ADDRESS}=1c/00",)
    )
    address = Path(toys[1]).name
    script = "echo $TOY_1 $PCIDEVICE_TOY_ORG_EDU"
    assert await guest.run(script, {"cdi.k8s.io/vfio7": "toy.org/edu=1"}, (passed,)) == [address, address]
    assert await guest.run("echo $PCIDEVICE_TOY_ORG_EDU") == [HOST_ADDRESS]
    with pytest.raises(FailedPrecondition, match=r"toy\.org/edu=9"):
        await guest.run("true", {"cdi.k8s.io/vfio9": "toy.org/edu=9"})

    await disks(vm, guest, tmp_path)
    await vhost_user_disk(vm, guest, tmp_path)
    await driven_by_its_container(guest)
    await the_hosts_side(guest, alone=address, beside=Path(toys[0]).name)
    await come_and_go(vm, guest)


async def driven_by_its_container(guest: Guest) -> None:
    """In vfio mode the container has the node of the device's group in the guest, whose vfio-pci has the device."""
    given = GuestDevice(
        id="12", type="vfio-pci", vm_path="", container_path="/dev/vfio/12", options=(f"{HOST_ADDRESS}=1c/00",)
    )
    script = """
    function=/sys/bus/pci/devices/$PCIDEVICE_TOY_ORG_EDU
    group=$(basename $(readlink $function/iommu_group))
    [ $(ls /dev/vfio) = $group ] && exec 3<> /dev/vfio/$group && echo opened
    basename $(readlink $function/driver)
    """
    assert await guest.run(script, devices=(given,)) == ["opened", "vfio-pci"]


# What the shim does to VFIO on a host, done to a kernel that has an IOMMU: the guest's.
HOST_SIDE = """
import os, sys
sys.path.insert(0, "/mnt")
from pyshim.resources.devices.host.vfio import bind, driver_of, rebind, vfio_node
from pyshim.model.errors import FailedPrecondition
alone, beside = sys.argv[1:]
def node(address):
    return "/dev/vfio/" + os.path.basename(os.readlink(f"/sys/bus/pci/devices/{address}/iommu_group"))
print([each.address == alone for each in vfio_node(node(alone)).functions])
rebind(alone, "")
print(repr(driver_of(alone)))
print(repr(bind(alone)), driver_of(alone))
print(bind(beside) == "", driver_of(beside))
try:
    vfio_node(node(beside))
except FailedPrecondition as error:
    print(str(error).partition(": not all of it is held by vfio-pci: ")[2].partition(",")[0].partition(" by ")[2])
rebind(beside, "")
rebind(beside, "")
print(repr(driver_of(beside)))
print(open(f"/sys/bus/pci/devices/{beside}/driver_override").read().strip())
"""

# The guest has no msgspec, and of it the code above only makes nouns and reads their fields.
NOUNS_IN_THE_GUEST = """
class Struct:
    def __init_subclass__(cls, **options):
        pass
    def __init__(self, **values):
        self.__dict__.update(values)
def field(default_factory):
    return None
"""


async def the_hosts_side(guest: Guest, alone: str, beside: str) -> None:
    """Binding and its undo, groups whole and partly bound: vfio-pci has `alone`, `beside` is in a group with disks."""
    names = ("pyshim/__init__.py", "pyshim/resources/devices/host/vfio.py")
    names += tuple(f"pyshim/host/{name}.py" for name in ("__init__", "os_errors"))
    names += tuple(f"pyshim/model/{name}.py" for name in ("__init__", "devices", "errors"))
    files = {name: (GUEST.parents[1] / name).read_text() for name in names}
    files["msgspec.py"] = NOUNS_IN_THE_GUEST
    unpack = f"""
import os
for name, text in {files!r}.items():
    os.makedirs(os.path.dirname("/mnt/" + name), exist_ok=True)
    open("/mnt/" + name, "w").write(text)
"""
    program = f"{unpack}\nopen('/mnt/host_side.py', 'w').write({HOST_SIDE!r})"
    python = "python3 -I -S"
    lines = await guest.run(
        f"{python} -c {shlex.quote(program)} && {python} /mnt/host_side.py {alone} {beside}", lines=True
    )
    assert lines == [*("[True]", "''", "'' vfio-pci"), *("True vfio-pci", "virtio-pci", "''", "(null)")]


async def disks(vm: QemuVm, guest: Guest, tmp_path: Path) -> None:
    """A disk that was there at the first instruction and one that came later reach containers alike."""
    file = tmp_path / "hot.img"
    file.write_bytes(b"hot, disk".ljust(1 << 20, b"\0"))
    location = await vm.plug(disk("hot", file))
    for path, text in (("02/02", "cold"), (location.pci_path, "hot,")):
        device = GuestDevice(id=path, type="blk", vm_path="", container_path="/dev/given", options=())
        assert await guest.run("head -c 9 /dev/given", devices=(device,)) == [text, "disk"]
    assert location.pci_path == "02/03"
    await vm.unplug("hot")
    assert await guest.run("ls /sys/block | grep -c ^vd") == ["2"]


async def vhost_user_disk(vm: QemuVm, guest: Guest, tmp_path: Path) -> None:
    """A disk that another program serves is a disk like the others; one without a server is refused, once.

    A program that takes the connection and says nothing costs the guest nothing but the wait.
    """
    path = tmp_path / "served.sock"
    served = disk("served", path, queues=1, queue_size=64, vhost_user=VhostUserBackend(reconnect_s=0))
    with pytest.raises(Unavailable, match=r"plug 'served': connect to .*served\.sock"):
        await vm.plug(served)
    with listening(path), pytest.raises(DeadlineExceeded, match=r"the program at .*served\.sock' does not answer"):
        await vm.plug(served)
    assert await guest.run("echo on") == ["on"]
    image = tmp_path / "served.img"
    image.write_bytes(b"served disk".ljust(1 << 20, b"\0"))
    async with storage_daemon(image, path):
        location = await vm.plug(served)
        device = GuestDevice(id=location.pci_path, type="blk", vm_path="", container_path="/dev/given", options=())
        script = "head -c 11 /dev/given; echo; echo written | dd of=/dev/given bs=512 seek=9 conv=fsync 2>/dev/null"
        assert await guest.run(script, devices=(device,)) == ["served", "disk"]
        assert image.read_bytes()[9 * 512 :].startswith(b"written")
        await vm.unplug("served")
        assert await guest.run("ls /sys/block | grep -c ^vd") == ["2"]
        assert (await vm.plug(served)).pci_path == location.pci_path
        await vm.unplug("served")


@contextmanager
def listening(path: Path) -> Iterator[None]:
    with socket(AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield
    path.unlink()


@asynccontextmanager
async def storage_daemon(image: Path, path: Path) -> AsyncIterator[None]:
    """QEMU's own program for disks listens at `path`."""
    export = f"vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={path},writable=on"
    words = ("--blockdev", f"driver=file,node-name=d,filename={image}", "--export", export)
    process = await asyncio.create_subprocess_exec(STORAGE_DAEMON, *words)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not os.path.exists(path):  # noqa: ASYNC240 - the program reports it nowhere
                assert process.returncode is None
                await asyncio.sleep(0.05)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def come_and_go(vm: QemuVm, guest: Guest) -> None:
    count = "grep -l 0x11e8 /sys/bus/pci/devices/*/device | wc -l"
    location = await vm.plug(EmulatedDevice(id="late", model="edu"))
    assert location.pci_path == "1d/00"
    assert await until(guest, count, "4")
    for name in ("late", "on-switch", "on-root", "on-bridge"):
        await vm.unplug(name)
    assert await until(guest, count, "0")


async def until(guest: Guest, script: str, wanted: str) -> bool:
    async with asyncio.timeout(TIMEOUT_S):
        while await guest.run(script) != [wanted]:  # noqa: ASYNC110 - every look is a container of its own
            await asyncio.sleep(0.1)
    return True


async def agent_of(vm: QemuVm) -> AgentClient:
    """The guest's agent, or at once the reason why there is none."""
    asked = asyncio.ensure_future(
        Connector(partial(AgentClient, request_timeout_s=TIMEOUT_S)).connect(vm.agent_address, TIMEOUT_S)
    )
    ended = asyncio.ensure_future(vm.wait())
    try:
        await asyncio.wait([asked, ended], return_when=asyncio.FIRST_COMPLETED)
        assert not ended.done(), f"{ended.result().reason}\n{vm.console_tail()}"
        return await asked
    except ShimError as error:
        pytest.fail(f"{error}\n{vm.console_tail()}")
    finally:
        ended.cancel()
        asked.cancel()


async def why(vm: QemuVm) -> str:
    """The VM's end; of one that has not ended, its last words."""
    with suppress(TimeoutError):
        async with asyncio.timeout(5):
            return (await vm.wait()).reason
    return vm.console_tail()


def guest_path(folder: str) -> str:
    """The slots in a function's place in sysfs, below the root bus."""
    return "/".join(part.split(":")[2].removesuffix(".0") for part in folder.split("/")[4:])


def test_devices_behind_every_kind_of_port_reach_their_containers_and_leave(tmp_path: Path) -> None:
    found = [
        layout_of(PortKind.ROOT, "on-root"),
        layout_of(PortKind.SWITCH, "on-switch"),
        layout_of(PortKind.BRIDGE, "on-bridge"),
    ]
    assert len({layout.ports for layout in found}) == 1
    placed = tuple(place for layout in found for place in layout.placed)
    layout = PciLayout(ports=found[0].ports, placed=placed, hot_plug=PortKind.ROOT, iommu=True)
    cold = tmp_path / "cold.img"
    cold.write_bytes(b"cold disk".ljust(1 << 20, b"\0"))

    async def body() -> None:
        ledger, children = FakeLedger(undo_entry), Children()
        vm = QemuVm(ledger=ledger, children=children)
        try:
            await vm.create(config(tmp_path, layout))
            assert (await vm.plug(disk("cold", cold))).pci_path == "02/02"
            await vm.start()
            agent = await agent_of(vm)
            try:
                sandbox = GuestSandbox(
                    sandbox_id="pod1",
                    hostname="pod1",
                    dns=(),
                    storages=(),
                    shared_pid_namespace=False,
                    guest_hook_path="",
                    kernel_modules=(),
                )
                await agent.create_sandbox(sandbox)
                await scenario(vm, Guest(agent), tmp_path)
            except AgentGone as error:
                error.add_note(await why(vm))
                raise
            finally:
                await agent.close()
        finally:
            await vm.stop()
        assert ledger.held == {}
        assert children.alive == ()

    asyncio.run(body())
