"""The installed QEMU takes every argv of the golden files that needs no hardware: realized, paused, asked, quit."""

import asyncio
import fcntl
import os
import re
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypervisors.qemu.process import VmStartFailed
from hypervisors.qemu.vm import QemuVm
from pyshim.cleanup.undo import undo_entry
from pyshim.host import syscalls
from pyshim.host.file_answers import FileAnswers
from pyshim.host.processes.children import Children
from pyshim.model.host_facts import Accelerator
from pyshim.model.ids import HostPath
from pyshim.model.vm import BootConfig, LocalVm, MemoryBacking, NicDevice, SerialChannel, ShareDevice, VhostUserNic
from pyshim.model.volumes import VirtiofsdPlan
from pyshim.resources.volumes.host.virtiofsd import start_virtiofsd
from pyshim.resources.volumes.host.virtiofsd_flavours import VirtiofsdFlavours
from tests.fakes.ledger import FakeLedger
from tests.fakes.tiny_kernel import HALT, bzimage
from tests.fakes.vm_config import OURS
from tests.unit.hypervisors.test_cmdline import CONFIGS

QEMU = "/usr/bin/qemu-system-x86_64"
VIRTIOFSD = "/usr/lib/qemu/virtiofsd"
_TUNSETIFF = 0x400454CA
_TAP_FLAGS = 0x0002 | 0x1000 | 0x4000 | 0x0100  # tap, no packet information, virtio header, many queues

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}"),
    pytest.mark.skipif(not os.access(VIRTIOFSD, os.X_OK), reason=f"needs {VIRTIOFSD}"),
]


def free_hugepages() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("HugePages_Free")), 0)


def runnable(config: LocalVm, directory: Path) -> LocalVm:
    """The same VM with real files in `directory`, under TCG and with less memory to allocate."""
    files = {"kernel": bzimage(HALT), "initrd": b"none", "image": bytes(4 << 20), "firmware": None}
    for name, content in files.items():
        if content is not None:
            (directory / name).write_bytes(content)
    boot: BootConfig = replace(
        config.boot,
        kernel=str(directory / "kernel"),
        initrd=config.boot.initrd and str(directory / "initrd"),
        image=config.boot.image and str(directory / "image"),
        firmware=None,
    )
    share = config.share and ShareDevice(tag="kataShared", socket_path=str(directory / "fs.sock"), queue_size=1024)
    channel = SerialChannel(port_name="org.pykata.agent.0", socket_path=str(directory / "agent.sock"))
    cpu = replace(config.cpu, accelerator=Accelerator.TCG, model="max")
    changed = replace(config, boot=boot, share=share, agent_channel=channel, cpu=cpu)
    return replace(changed, uuid=OURS, vm_dir=str(directory / "vm"))


async def accepted(config: LocalVm, directory: Path) -> None:
    ledger, children = FakeLedger(undo_entry), Children()
    vm = QemuVm(ledger=ledger, children=children)
    virtiofsd = None
    if config.share is not None:
        plan = VirtiofsdPlan(
            binary=HostPath(VIRTIOFSD),
            shared_dir=HostPath(str(directory)),
            listen_path=HostPath(config.share.socket_path),
            cache="auto",
            extra_args=("--thread-pool-size=1", "--announce-submounts"),
            debug=False,
        )
        flavours = VirtiofsdFlavours(children, FileAnswers(str(directory / "flavours")))
        virtiofsd = await start_virtiofsd(plan, ledger, children, flavours=flavours)
    await vm.create(config)
    try:
        assert len(await vm.vcpu_thread_ids()) == config.cpu.boot_vcpus
    finally:
        await vm.stop()
        if virtiofsd is not None:
            await virtiofsd.stop()
    assert ledger.held == {}
    assert children.alive == ()


# These need what only the host or a program of it has: vsock, taps, a back end.
@pytest.mark.parametrize(
    "name", [name for name in CONFIGS if "vsock" not in name and name not in ("q35-two-nics", "q35-vhost-user-nics")]
)
def test_the_installed_qemu_accepts_the_arguments(name: str, tmp_path: Path) -> None:
    config = runnable(CONFIGS[name], tmp_path)
    if name == "q35-hugepages" and free_hugepages() * 2 < config.memory.boot_mib:
        pytest.skip("needs 128 free huge pages of 2 MiB")

    asyncio.run(accepted(config, tmp_path))


def taps(name: str, count: int) -> tuple[int, ...]:
    """Queues of one tap device of the current network namespace."""
    fds = []
    for _ in range(count):
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_FLAGS))
        fds.append(fd)
    return tuple(fds)


def in_own_netns(body: Callable[[], None]) -> None:
    """Runs `body` in a thread with a network namespace of its own."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNET)
            body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="needs /dev/net/tun")
def test_nics_cold_and_hot_with_one_and_with_two_queues(tmp_path: Path) -> None:
    def body() -> None:
        cold = tuple(
            NicDevice(id=f"eth{n}", mac=f"02:00:00:00:00:0{n}", tap_fds=taps(f"t{n}", n + 1), vhost_fds=(), mtu=1450)
            for n in range(2)
        )
        config = replace(runnable(CONFIGS["q35-initrd-only"], tmp_path), nics=cold)

        async def plugged() -> list[str]:
            ledger, children = FakeLedger(undo_entry), Children()
            vm = QemuVm(ledger=ledger, children=children)
            await vm.create(config)
            places = []
            for index, queues in ((2, 1), (3, 2)):
                fds = taps(f"t{index}", queues)
                hot = NicDevice(id=f"eth{index}", mac=f"02:00:00:00:00:0{index}", tap_fds=fds, vhost_fds=(), mtu=0)
                places.append((await vm.plug(hot)).pci_path)
                for fd in fds:
                    os.close(fd)
            await vm.stop()
            return places

        assert asyncio.run(plugged()) == ["02/01", "02/02"]
        for nic in cold:
            for fd in nic.tap_fds:
                os.close(fd)  # still ours, as promised

    in_own_netns(body)


@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/ksm"), reason="this kernel merges no pages")
async def test_memory_at_boot_and_added_later_is_not_merged(tmp_path: Path) -> None:
    plain = runnable(CONFIGS["q35-initrd-only"], tmp_path)
    memory = replace(plain.memory, boot_mib=256, max_mib=512, slots=2, backing=MemoryBacking.PRIVATE)

    vm = QemuVm(ledger=FakeLedger(undo_entry), children=Children())
    await vm.create(replace(plain, memory=memory))
    try:
        assert await vm.resize_memory(384) == 384
        smaps = await asyncio.to_thread(Path(f"/proc/{vm.pid}/smaps").read_text)
        flags = [line.split()[1:] for line in smaps.splitlines() if line.startswith("VmFlags:")]
        assert sum(f"{kib} kB" in line for line in smaps.splitlines() for kib in (256 << 10, 128 << 10)) >= 2
        assert not [each for each in flags if "mg" in each]
    finally:
        await vm.stop()


@pytest.mark.skipif(not os.path.exists("/sys/devices/system/node/node0"), reason="this kernel has no NUMA nodes")
@pytest.mark.parametrize("backing", [MemoryBacking.PRIVATE, MemoryBacking.SHARED_MEMFD])
async def test_memory_at_boot_and_added_later_is_preferred_from_its_node(
    backing: MemoryBacking, tmp_path: Path
) -> None:
    plain = runnable(CONFIGS["q35-virtiofs-serial-tcg"], tmp_path)
    memory = replace(plain.memory, boot_mib=256, max_mib=512, slots=2, backing=backing, host_nodes=(0,))
    config = replace(plain, memory=memory, share=None)

    vm = QemuVm(ledger=FakeLedger(undo_entry), children=Children())
    await vm.create(config)
    try:
        assert await vm.resize_memory(384) == 384
        maps = await asyncio.to_thread(Path(f"/proc/{vm.pid}/numa_maps").read_text)
        # Newer QEMUs set the policy that may name several nodes.
        assert len(re.findall(r"(?m)^[0-9a-f]+ prefer(?: \(many\))?:0\b", maps)) >= 2
    finally:
        await vm.stop()


def test_a_vhost_user_nic_without_a_server_raises_qemus_error(tmp_path: Path) -> None:
    nic = VhostUserNic(
        id="direct-0", mac="02:00:00:00:00:07", socket_path=str(tmp_path / "none"), queues=1, queue_size=0, mtu=0
    )
    config = replace(runnable(CONFIGS["q35-initrd-only"], tmp_path), vhost_user_nics=(nic,))

    with pytest.raises(VmStartFailed, match=f"Failed to connect to '{nic.socket_path}'"):
        asyncio.run(accepted(config, tmp_path))
