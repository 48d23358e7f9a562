"""The argv as a value: golden files for whole VMs, rules for the rest.

After a wanted change: `PYSHIM_UPDATE_GOLDEN=1 pytest tests/unit/hypervisors/test_cmdline.py`, then read the diff.
"""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypervisors.qemu.cmdline import check_config, kernel_command_line, qemu_argv, socket_paths
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import (
    GuestNode,
    ImageDriver,
    LocalVm,
    MemoryBacking,
    MemoryDump,
    ScsiController,
    VhostUserNic,
    VhostUserVsockChannel,
    VsockChannel,
)
from tests.fakes.vm_config import nic, vm_config, with_boot, with_memory
from tests.grammar.check import problems, tables

GOLDEN = Path(__file__).parents[2] / "golden" / "qemu"
IMAGE_BYTES = 64 << 20


NUMA = (
    GuestNode(vcpus=(0, 2), memory_mib=170, distances=(10, 21), memory_nodes=(0,), cpus=(0, 1)),
    GuestNode(vcpus=(1,), memory_mib=86, distances=(21, 10), memory_nodes=(), cpus=(2,)),
)


def _kvm(config: LocalVm) -> LocalVm:
    return replace(config, cpu=replace(config.cpu, accelerator=Accelerator.KVM, model="host,pmu=off"))


def _microvm() -> LocalVm:
    base = vm_config()
    return replace(base, machine_type="microvm", machine_options=("pit=off", "rtc=on"), bridges=0, share=None)


VSOCK_PROGRAM = VhostUserVsockChannel(
    port=1024,
    program="/usr/bin/vhost-device-vsock",
    device_path="/run/vc/vm/pod1/vhost-vsock.sock",
    socket_path="/run/vc/vm/pod1/vsock.sock",
)

CONFIGS = {
    "q35-virtiofs-serial-tcg": vm_config(),
    "q35-vsock-kvm": _kvm(vm_config(agent_channel=VsockChannel(port=1024))),
    "q35-vhost-user-vsock": with_memory(
        vm_config(share=None, agent_channel=VSOCK_PROGRAM), backing=MemoryBacking.SHARED_MEMFD
    ),
    "q35-vhost-user-vsock-template": vm_config(share=None, agent_channel=VSOCK_PROGRAM, is_copyable=True),
    "q35-vhost-user-vsock-clone": vm_config(
        share=None, agent_channel=VSOCK_PROGRAM, is_copyable=True, saved_machine="/run/vc/vm/template/0"
    ),
    "q35-vhost-user-vsock-kvm": _kvm(vm_config(agent_channel=VSOCK_PROGRAM)),
    "q35-nested-kvm-debug": _kvm(vm_config(nested=True, debug=True, extra_monitor="hmp", seccomp_sandbox="")),
    "microvm": _microvm(),
    "q35-initrd-only": with_boot(vm_config(share=None), image=None),
    "q35-image-pmem": with_boot(vm_config(), image_driver=ImageDriver.PMEM, initrd=None),
    "q35-scsi": vm_config(scsi=ScsiController(queues=2, queue_size=64, iothread="scsi")),
    "q35-two-nics": vm_config(nics=(nic(0, taps=(40, 41), vhosts=(50, 51)), nic(1, taps=(42,), mtu=0))),
    "q35-vhost-user-nics": vm_config(
        vhost_user_nics=(
            VhostUserNic(
                id="direct-0", mac="02:00:00:00:00:07", socket_path="/run/a,b.sock", queues=2, queue_size=1024, mtu=9000
            ),
            VhostUserNic(id="direct-1", mac="02:00:00:00:00:08", socket_path="/run/c", queues=1, queue_size=0, mtu=0),
        )
    ),
    "q35-hugepages": with_memory(vm_config(), backing=MemoryBacking.HUGEPAGES, prealloc=True),
    "q35-virtio-mem": with_memory(vm_config(), max_mib=1027, virtio_mem=True, prealloc=True),
    "q35-numa": with_memory(
        replace(vm_config(), cpu=replace(vm_config().cpu, boot_vcpus=3, max_vcpus=3), numa=NUMA), max_mib=256
    ),
    "q35-balloon": with_memory(vm_config(), reclaim=True),
    "q35-private-firmware": with_boot(
        with_memory(vm_config(share=None), backing=MemoryBacking.PRIVATE), firmware="/opt/OVMF.fd"
    ),
    "q35-two-bridges": with_memory(vm_config(bridges=2), max_mib=0),
}


def argv_of(config: LocalVm) -> tuple[str, ...]:
    has_vsock = isinstance(config.agent_channel, VsockChannel)
    image_bytes = IMAGE_BYTES if config.boot.image else 0
    return qemu_argv(config, guest_cid=4242 if has_vsock else 0, image_bytes=image_bytes)


def as_text(argv: tuple[str, ...]) -> str:
    """One option per line, with its value."""
    lines = [argv[0]]
    for word in argv[1:]:
        if word.startswith("-"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", CONFIGS)
def test_argv_is_the_golden_one(name: str) -> None:
    check_config(CONFIGS[name])
    text = as_text(argv_of(CONFIGS[name]))
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("PYSHIM_UPDATE_GOLDEN"):
        file.write_text(text)

    assert text == file.read_text()


def test_every_golden_file_belongs_to_a_config() -> None:
    assert sorted(file.stem for file in GOLDEN.glob("*.txt")) == sorted(CONFIGS)


def test_commas_in_paths_are_doubled_where_qemu_splits_at_them() -> None:
    config = with_boot(vm_config(vm_dir="/vm,1"), image="/img,1", kernel="/k,1", initrd="/i,1")

    argv = argv_of(config)

    assert "file.filename=/img,,1" in argv[argv.index("-blockdev") + 1]
    assert "socket,id=share0,path=/vm,,1/vhost-fs.sock" in argv
    assert argv[argv.index("-kernel") + 1] == "/k,1"
    assert argv[argv.index("-initrd") + 1] == "/i,1"


@pytest.mark.parametrize(
    ("nodes", "words"),
    [((), ""), ((1,), ",host-nodes=1,policy=preferred"), ((0, 2), ",host-nodes=0,host-nodes=2,policy=bind")],
)
@pytest.mark.parametrize("backing", MemoryBacking)
def test_every_version_accepts_memory_from_the_hosts_nodes(
    backing: MemoryBacking, nodes: tuple[int, ...], words: str
) -> None:
    config = with_memory(vm_config(share=None), backing=backing, host_nodes=nodes)

    argv = argv_of(config)

    ram = next(argv[index + 1] for index, word in enumerate(argv) if word == "-object")
    assert words in ram
    assert ("host-nodes" in ram) is bool(nodes)
    assert [problems(argv, grammar) for grammar in tables().values()] == [[]] * len(tables())


def test_a_pmem_image_gets_a_slot_and_room_of_its_own() -> None:
    config = with_memory(CONFIGS["q35-image-pmem"], max_mib=0)

    argv = qemu_argv(config, guest_cid=0, image_bytes=(10 << 20) + 1)

    assert argv[argv.index("-m") + 1] == "256M,slots=1,maxmem=267M"


@pytest.mark.parametrize("max_mib", [0, 256, 259], ids=["no-maximum", "no-room", "less-than-a-block"])
def test_without_room_there_is_no_virtio_mem_device(max_mib: int) -> None:
    config = with_memory(vm_config(), max_mib=max_mib, virtio_mem=True)

    argv = argv_of(config)

    assert [word for word in argv if "virtio-mem" in word] == []
    assert argv[argv.index("-m") + 1] == "256M"


@pytest.mark.parametrize(
    ("params", "line"),
    [
        pytest.param(("quiet", "panic=1"), "quiet panic=1", id="plain"),
        pytest.param(("root=/dev/vda1", "ro"), "root=/dev/vda1 ro", id="equals"),
        pytest.param(("a=b c",), 'a="b c"', id="blank-in-value"),
        pytest.param(("a b",), '"a b"', id="blank-without-value"),
        pytest.param(("a b=c",), '"a b=c"', id="blank-in-name"),
        pytest.param(('dm-mod.create="dm-verity,,,ro,0 1 x"',), 'dm-mod.create="dm-verity,,,ro,0 1 x"', id="quoted"),
        pytest.param((), "", id="none"),
    ],
)
def test_kernel_parameters_with_blanks_are_quoted(params: tuple[str, ...], line: str) -> None:
    assert kernel_command_line(params) == line


@pytest.mark.parametrize(
    ("params", "text"),
    [
        pytest.param(('a="b',), "open quote", id="open-quote"),
        pytest.param(("a=b\ninit=/bin/sh",), "control character", id="newline"),
        pytest.param(("a=\0",), "control character", id="nul"),
        pytest.param(('a="b" c',), "mixes quotes and blanks", id="unspeakable"),
        pytest.param(("x" * 2048,), "2048 bytes, at most 2047", id="too-long"),
        pytest.param(("ü" * 1024,), "2048 bytes", id="bytes-not-characters"),
    ],
)
def test_a_kernel_parameter_that_cannot_be_quoted_is_refused(params: tuple[str, ...], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        kernel_command_line(params)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (replace(_microvm(), memory_dump=MemoryDump(directory="/dumps", paging=False)), "microvm has no pvpanic"),
        (with_boot(vm_config(), kernel_params=('"',)), "open quote"),
    ],
    ids=["microvm-dump", "kernel-parameter"],
)
def test_config_that_cannot_work_is_refused_before_anything_is_made(config: LocalVm, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        check_config(config)


def test_socket_paths_are_all_there_are() -> None:
    assert socket_paths(vm_config(extra_monitor="hmp")) == (
        "/run/vc/vm/pod1/qmp.sock",
        "/run/vc/vm/pod1/agent.sock",
        "/run/vc/vm/pod1/extra-monitor.sock",
    )
    assert socket_paths(vm_config(agent_channel=VsockChannel(port=1024))) == ("/run/vc/vm/pod1/qmp.sock",)
    assert socket_paths(vm_config(agent_channel=VSOCK_PROGRAM)) == (
        "/run/vc/vm/pod1/qmp.sock",
        "/run/vc/vm/pod1/vhost-vsock.sock",
        "/run/vc/vm/pod1/vsock.sock",
    )


def test_a_clone_has_the_cid_that_was_reserved_for_it() -> None:
    config = vm_config(agent_channel=VsockChannel(port=1024), is_copyable=True, saved_machine="/run/vc/vm/template/0")
    for cid in (17, 18):
        argv = qemu_argv(config, guest_cid=cid, image_bytes=0)
        (device,) = (word for word in argv if word.startswith("vhost-vsock"))
        assert device.endswith(f"guest-cid={cid}")
