"""One VM: QEMU's argv as a pure function, and the process that outlives its starter."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from qemu.qmp import QMPClient
from qemu.qmp.error import QMPError

from pyshim.host.processes.identity import start_ticks
from pyshim.model.architecture import X86_64

from .disks import CONFIG_SERIAL, IMAGES_IN_GUEST, IMAGES_SERIAL

FORWARDER_PORT = 15150
_GUEST_ADDRESS = "10.0.2.15"
_KERNEL_PARAMS = (
    *("console=hvc0", "root=/dev/vda1", "rootfstype=erofs", "ro", "quiet", "panic=1"),
    # As the shim's own VMs boot. Without `no_timer_check` a kernel under emulation on a busy host finds that its
    # timer does not work, and panics before it has a console.
    *(param for param in X86_64.kernel_params if param != "tsc=reliable"),
    # Ten kernels that gauge the TSC on two busy CPUs get it wrong, and one of them lives an hour in a few seconds.
    "clocksource=hpet",
    "agent.server_addr=unix:///run/kata-containers/agent.sock",
    f"forwarder.port={FORWARDER_PORT}",
    f"forwarder.address={_GUEST_ADDRESS}/24",
)
_CPU = {"tcg": "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt", "kvm": "host"}
_FORWARDED = re.compile(
    rf"TCP\[HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)\s+{re.escape(_GUEST_ADDRESS)}\s+{FORWARDER_PORT}\b"
)
_MONITOR_WITHIN_S = 60.0
_GONE_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.02
_TAIL_BYTES = 4096


class MachineError(Exception):
    """The VM cannot be had; the text has QEMU's words and the end of the console."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The parts of a VM. Its files are `directory`'s."""

    name: str
    directory: Path
    guest: Path
    images: Path | None
    vcpus: int
    memory_mib: int
    accelerator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The process of a VM, so that it can be found by a process that did not start it."""

    pid: int
    started_ticks: int
    """Since the host booted; with the pid it names one process only."""
    port: int
    """Of 127.0.0.1: the forwarder's."""


def qemu_argv(machine: Machine) -> tuple[str, ...]:
    """The VM's only way out is the answer to a connection to its port: `restrict` lets nothing else pass."""
    params = list(_KERNEL_PARAMS)
    disks = [(machine.guest / "rootfs.img", "root"), (machine.directory / "config.img", CONFIG_SERIAL)]
    if machine.images is not None:
        params.append(f"agent.image_source=oci:{IMAGES_IN_GUEST}")
        disks.append((machine.images, IMAGES_SERIAL))
    forward = f"hostfwd=tcp:127.0.0.1:0-{_GUEST_ADDRESS}:{FORWARDER_PORT}"
    words = [
        *(
            "qemu-system-x86_64",
            "-name",
            f"{machine.name},debug-threads=on",
            "-machine",
            f"q35,accel={machine.accelerator}",
        ),
        *("-cpu", _CPU[machine.accelerator], "-smp", str(machine.vcpus), "-m", f"{machine.memory_mib}M"),
        *("-rtc", "base=utc,driftfix=slew,clock=host", "-global", "kvm-pit.lost_tick_policy=discard"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-kernel", str(machine.guest / "vmlinux"), "-initrd", str(machine.guest / "initrd.img")),
        *("-append", " ".join(params)),
        *("-qmp", f"unix:{machine.directory}/qmp.sock,server=on,wait=off"),
        *("-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng"),
        *("-device", "virtio-serial-pci", "-chardev", f"file,id=console,path={machine.directory}/console.log"),
        *("-device", "virtconsole,chardev=console"),
        *("-netdev", f"user,id=net,restrict=on,ipv6=off,{forward}", "-device", "virtio-net-pci,netdev=net,romfile="),
    ]
    for number, (path, serial) in enumerate(disks):
        drive = f"id=disk{number},file={path},format=raw,if=none,readonly=on"
        words += ("-drive", drive, "-device", f"virtio-blk-pci,drive=disk{number},serial={serial}")
    return tuple(words)


async def boot(machine: Machine) -> Running:
    """QEMU runs, in a session of its own. Raises MachineError, and then it does not."""
    (machine.directory / "qmp.sock").unlink(missing_ok=True)
    process = _spawned(machine)
    ticks = start_ticks(process.pid)
    try:
        async with asyncio.timeout(_MONITOR_WITHIN_S):
            port = await _forwarded_port(machine, process)
    except BaseException as error:
        process.kill()
        process.wait()
        if isinstance(error, TimeoutError):
            raise MachineError(f"boot {machine.name!r}: QEMU's monitor is silent") from error
        raise
    assert ticks is not None
    return Running(pid=process.pid, started_ticks=ticks, port=port)


def _spawned(machine: Machine) -> subprocess.Popen[bytes]:
    with (machine.directory / "qemu.log").open("wb") as output:
        return subprocess.Popen(
            qemu_argv(machine), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


async def _forwarded_port(machine: Machine, process: subprocess.Popen[bytes]) -> int:
    """The port QEMU took: it chooses a free one, and only its monitor has the number."""
    client = QMPClient(machine.name)
    while True:
        if process.poll() is not None:
            raise MachineError(
                f"boot {machine.name!r}: QEMU exited {process.returncode}: {words_of(machine.directory)}"
            )
        try:
            await client.connect(str(machine.directory / "qmp.sock"))
            break
        except (QMPError, OSError):
            await asyncio.sleep(_LOOK_EVERY_S)
    try:
        told = str(await client.execute("human-monitor-command", {"command-line": "info usernet"}))
    finally:
        await client.disconnect()
    found = _FORWARDED.search(told)
    if found is None:
        raise MachineError(f"boot {machine.name!r}: QEMU forwards no port: {told!r}")
    return int(found[1])


def is_running(vm: Running) -> bool:
    """True if the VM's process is alive. A child that has ended is reaped."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(vm.pid, os.WNOHANG)
    return start_ticks(vm.pid) == vm.started_ticks


async def end(vm: Running) -> None:
    """The VM is gone, as a cloud deletes one: at once. Idempotent. TimeoutError when the kernel does not let it go."""
    async with asyncio.timeout(_GONE_WITHIN_S):
        while is_running(vm):
            with contextlib.suppress(ProcessLookupError):
                os.kill(vm.pid, signal.SIGKILL)
            await asyncio.sleep(_LOOK_EVERY_S)


async def until_ended(vm: Running) -> None:
    # Another peer's VM is not a child of this process: a pidfd serves for both kinds.
    try:
        fd = os.pidfd_open(vm.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        if is_running(vm):
            await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    is_running(vm)


def words_of(directory: Path) -> str:
    """What QEMU and the console said last."""
    told = []
    for name in ("qemu.log", "console.log"):
        with contextlib.suppress(FileNotFoundError):
            data = (directory / name).read_bytes()[-_TAIL_BYTES:]
            told.append(data.decode(errors="replace").strip())
    return "\n".join(filter(None, told)) or "(nothing)"
