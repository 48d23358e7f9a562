"""The QEMU driver when things go otherwise: guests that end, VMMs that fail, callers that give up.

Real QEMU under TCG; the guests are kernels of a few bytes, the broken VMMs are scripts.
"""

import asyncio
import os
import resource
import shutil
import signal
import socket
import stat
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypervisors.qemu import memory, process
from hypervisors.qemu.console import MAX_FILE_BYTES
from hypervisors.qemu.process import VmStartFailed, VmStartTimedOut
from hypervisors.qemu.vm import QemuVm
from pyshim.cleanup.undo import undo_entry
from pyshim.host.processes.identity import arguments
from pyshim.host.syscalls import CAP_DAC_OVERRIDE, CAP_IPC_LOCK
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, ShimError
from pyshim.model.ledger import ResourceKind
from pyshim.model.vm import LocalVm, MemoryDump, VmExitKind, VsockChannel
from tests.fakes.ledger import FakeLedger
from tests.fakes.tiny_kernel import FLOOD, HALT, PANIC_EVENT, POWER_OFF, RESET, say
from tests.fakes.vm_config import with_boot

from .conftest import Bench

QEMU = "/usr/bin/qemu-system-x86_64"
pytestmark = pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}")


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        pytest.param(
            say("bye\n") + POWER_OFF + HALT, VmExitKind.GUEST_SHUTDOWN, ["powered off", "bye"], id="power-off"
        ),
        pytest.param(RESET + HALT, VmExitKind.GUEST_SHUTDOWN, ["the guest reset", "console is empty"], id="reset"),
        pytest.param(
            say("one\nKernel panic - not syncing: no init\n") + RESET + HALT,
            VmExitKind.GUEST_PANIC,
            ["kernel panicked", "one\nKernel panic - not syncing: no init"],
            id="panic-without-driver",
        ),
        pytest.param(say("oops\n") + PANIC_EVENT + HALT, VmExitKind.GUEST_PANIC, ["panicked", "oops"], id="pvpanic"),
    ],
)
async def test_the_exit_of_a_guest_has_its_kind_and_last_lines(
    code: str, kind: VmExitKind, words: list[str], bench: Bench
) -> None:
    ended = await bench.end_of(code)

    assert ended.kind is kind
    assert ended.reason.startswith("vm 'pod1': ")
    assert [word for word in words if word not in ended.reason] == []


def panics_with_dump(bench: Bench, directory: Path, *, paging: bool = False) -> LocalVm:
    return bench.config(PANIC_EVENT + HALT, memory_dump=MemoryDump(directory=str(directory), paging=paging))


@pytest.mark.parametrize("paging", [False, True])
async def test_the_memory_of_a_guest_that_panicked_is_in_a_file(tmp_path: Path, paging: bool, bench: Bench) -> None:
    await bench.vm.create(panics_with_dump(bench, tmp_path / "dumps", paging=paging))
    await bench.vm.start()
    ended = await bench.vm.wait()
    await bench.vm.stop()

    assert ended.kind is VmExitKind.GUEST_PANIC

    (file,) = tmp_path.glob("dumps/*/vmcore-*.elf")
    with file.open("rb") as dump:
        assert dump.read(4) == b"\x7fELF"
    assert file.stat().st_size > 256 << 20
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.unlink()


@pytest.mark.parametrize(("reason", "words"), [("full", "has no room for 256 MiB"), ("a file", "ENOTDIR")])
async def test_a_dump_that_cannot_be_made_is_a_warning_and_the_guest_ends(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    words: str,
    bench: Bench,
) -> None:
    if reason == "full":
        monkeypatch.setattr(memory, "free_bytes", lambda _directory: 256 << 20)
    else:
        (tmp_path / "dumps").touch()

    await bench.vm.create(panics_with_dump(bench, tmp_path / "dumps"))
    await bench.vm.start()
    assert (await bench.vm.wait()).kind is VmExitKind.GUEST_PANIC
    await bench.vm.stop()

    (warning,) = [record for record in caplog.records if record.getMessage() == "guest memory not dumped"]
    assert words in vars(warning)["error"]
    assert not list(tmp_path.glob("dumps/*/*"))


async def test_stopping_a_vm_that_dumps_its_memory_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    started = asyncio.Event()

    async def endless(*_arguments: object) -> None:
        started.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(memory, "_write_dump", endless)

    await bench.vm.create(panics_with_dump(bench, tmp_path / "dumps"))
    await bench.vm.start()
    await started.wait()
    await bench.vm.stop()

    assert not list(tmp_path.glob("dumps/*/*"))


async def test_console_text_cannot_forge_or_command(bench: Bench) -> None:
    ended = await bench.end_of(say("\x1b[2J\x1b[31mred\x07\n") + POWER_OFF + HALT)

    assert ended.reason.endswith("last console lines:\nred")


async def test_a_guest_that_floods_its_console_fills_neither_memory_nor_disk(tmp_path: Path, bench: Bench) -> None:
    await bench.vm.create(bench.config(FLOOD))
    await bench.vm.start()
    old = tmp_path / "vm" / "console.log.1"
    while not old.exists():  # noqa: ASYNC110 - the file system has no event for us
        await asyncio.sleep(0.02)

    await bench.vm.pause()  # the shim still answers, and so does QEMU
    sizes = [(tmp_path / "vm" / name).stat().st_size for name in ("console.log", "console.log.1")]
    tail = bench.vm.console_tail()
    await bench.vm.stop()

    assert max(sizes) <= MAX_FILE_BYTES
    assert len(tail) < 20_000


async def test_the_agents_socket_takes_a_connection_as_soon_as_create_returns(tmp_path: Path, bench: Bench) -> None:
    await bench.vm.create(bench.config())
    path = str(bench.vm.agent_address).removeprefix("serial://")

    with socket.socket(socket.AF_UNIX) as agent:
        agent.connect(path)
    mode = (tmp_path / "vm" / "agent.sock").stat().st_mode
    await bench.vm.stop()

    assert stat.S_IMODE(mode) == 0o600


def opening(bench: Bench, *changes: tuple[str, bool]) -> str:
    """A VMM whose guest opens ports (True) and closes them, in this order, as soon as it runs."""
    return bench.vmm(
        f"""qmp = greet()
while text := qmp.recv(65536):
    request = json.loads(text)
    messages = [{{"return": {{}}, "id": request.get("id")}}]
    if request["execute"] == "cont":
        stamp = {{"seconds": 1, "microseconds": 2}}
        for port, is_open in {changes!r}:
            data = {{"id": port, "open": is_open}}
            messages.append({{"event": "VSERPORT_CHANGE", "data": data, "timestamp": stamp}})
    qmp.sendall(b"".join(json.dumps(message).encode() + b"\\r\\n" for message in messages))
    if request["execute"] == "quit":
        break
"""
    )


@pytest.mark.parametrize(
    ("changes", "has_firmware", "is_ready"),
    [
        pytest.param((), False, True, id="without firmware at once"),
        pytest.param((("console0", True), ("agent-port0", False)), True, False, id="not before the guest opened it"),
        pytest.param((("agent-port0", True),), True, True, id="once the guest opened it"),
    ],
)
async def test_with_firmware_the_agents_port_gets_a_host_when_the_guest_has_opened_it(
    tmp_path: Path, changes: tuple[tuple[str, bool], ...], has_firmware: bool, is_ready: bool, bench: Bench
) -> None:
    """OVMF opens a port that has a host, and the agent's first request would be lost there."""
    (tmp_path / "OVMF.fd").touch()
    config = bench.config(hypervisor_path=opening(bench, *changes))
    await bench.vm.create(with_boot(config, firmware=str(tmp_path / "OVMF.fd") if has_firmware else None))
    await bench.vm.start()

    with nullcontext() if is_ready else pytest.raises(DeadlineExceeded, match="guest uses the agent's device"):
        await bench.vm.await_agent_device(50 if is_ready else 0.3)
    await bench.vm.stop()


@pytest.mark.parametrize(
    ("script", "start_timeout_s", "error", "text"),
    [
        pytest.param(
            "print('no luck today', file=sys.stderr); sys.exit(3)",
            50,
            VmStartFailed,
            r"vmm \(pid \d+\) exited with status 3: no luck today",
            id="dies-with-words",
        ),
        pytest.param("os.kill(os.getpid(), signal.SIGABRT)", 50, VmStartFailed, "was killed by SIGABRT", id="aborts"),
        pytest.param(
            "time.sleep(1000)", 0.3, VmStartTimedOut, r"no answer within 0.3 s; vmm \(pid \d+\) is running", id="silent"
        ),
        pytest.param(
            "accept().sendall(b'hello?\\n'); time.sleep(1000)", 50, VmStartFailed, "greet qemu of 'pod1'", id="garbage"
        ),
    ],
)
async def test_a_vmm_that_does_not_start_is_an_error_with_its_output(
    script: str, start_timeout_s: float, error: type[ShimError], text: str, bench: Bench
) -> None:
    config = bench.config(hypervisor_path=bench.vmm(script), start_timeout_s=start_timeout_s)

    with pytest.raises(error, match=text):
        await bench.vm.create(config)
    with pytest.raises(FailedPrecondition):
        await bench.vm.wait()


async def test_a_vmm_that_has_lost_its_qmp_connection_is_killed(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr(process, "_LOST_CONTROL_GRACE_S", 0.1)
    script = "qmp = greet(); qmp.recv(100); print('drifting', file=sys.stderr); qmp.close(); time.sleep(1000)"

    await bench.vm.create(bench.config(hypervisor_path=bench.vmm(script)))

    with pytest.raises(ShimError, match="ask qemu 'cont' of 'pod1': qmp connection"):
        await bench.vm.start()
    ended = await bench.vm.wait()
    await bench.vm.stop()

    assert ended.kind is VmExitKind.VMM_DIED
    assert "lost control of qemu" in ended.reason
    assert "was killed by SIGKILL: drifting" in ended.reason


@pytest.mark.parametrize("stranger", ["1", "os.getppid()", "0", "-1"], ids=["init", "shim", "zero", "negative"])
async def test_a_thread_that_is_not_of_the_vmm_is_no_vcpu(stranger: str, bench: Bench) -> None:
    """The shim moves vCPU threads into the pod's cgroup, whose processes are killed at the end, and pins them."""
    answer = f"""
qmp = greet()
threads = [os.getpid(), {stranger}]
while request := qmp.recv(65536):
    rows = [{{"cpu-index": index, "thread-id": thread}} for index, thread in enumerate(threads)]
    qmp.sendall(json.dumps({{"return": rows, "id": json.loads(request).get("id")}}).encode() + b"\\r\\n")
    del threads[1:]
"""

    await bench.vm.create(bench.config(hypervisor_path=bench.vmm(answer)))

    with pytest.raises(ShimError, match="names a thread that is not its own"):
        await bench.vm.vcpu_thread_ids()
    assert await bench.vm.vcpu_thread_ids() == (bench.vm.pid,)
    await bench.vm.stop()


async def test_a_vmm_that_hangs_is_killed_by_stop(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr(process, "QUIT_GRACE_S", 0.1)

    await bench.vm.create(bench.config())
    await bench.vm.start()
    os.kill(bench.vm.pid, signal.SIGSTOP)

    await bench.vm.stop()

    assert (await bench.vm.wait()).kind is VmExitKind.REQUESTED


@pytest.mark.root  # enters a network namespace
@pytest.mark.parametrize("steps", range(12))
async def test_create_given_up_at_any_moment_leaves_nothing(steps: int, bench: Bench) -> None:
    creating = asyncio.create_task(bench.vm.create(bench.config(netns_path="/proc/self/ns/net")))
    for _ in range(steps):
        await asyncio.sleep(0 if steps < 8 else 0.01)
    creating.cancel()

    await asyncio.gather(creating, return_exceptions=True)
    await bench.vm.stop()


async def test_a_ledger_full_at_the_last_write_leaves_nothing(bench: Bench) -> None:
    full = FakeLedger(undo_entry, full_after=2)
    vm = QemuVm(ledger=full, children=bench.children)

    with pytest.raises(FailedPrecondition, match="ENOSPC"):
        await vm.create(bench.config())

    assert full.held == {}


async def test_a_directory_made_by_another_program_stays_with_its_files(tmp_path: Path, bench: Bench) -> None:
    own = tmp_path / "vm"
    own.mkdir()
    (own / "vhost-fs.sock").touch()

    await bench.vm.create(bench.config(extra_monitor="hmp", debug=True))
    kinds = [entry.kind for entry in bench.ledger.held.values()]
    made = sorted(os.listdir(own))
    await bench.vm.stop()

    assert kinds == [ResourceKind.PROCESS]
    assert made == ["agent.sock", "console.log", "extra-monitor.sock", "qmp.sock", "vhost-fs.sock"]
    assert os.listdir(own) == ["vhost-fs.sock"]
    shutil.rmtree(own)


async def test_a_link_in_place_of_the_console_log_is_not_followed(tmp_path: Path, bench: Bench) -> None:
    (tmp_path / "vm").mkdir()
    (tmp_path / "vm" / "console.log").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(VmStartFailed, match=r"start vm 'pod1': ELOOP .*console\.log"):
        await bench.vm.create(bench.config())

    shutil.rmtree(tmp_path / "vm")

    assert not (tmp_path / "elsewhere").exists()


async def test_a_path_too_long_for_a_socket_is_named(tmp_path: Path, bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match=r"qmp\.sock': longer than 107 bytes"):
        await bench.vm.create(bench.config(vm_dir=f"{tmp_path}/{'x' * 100}"))


@pytest.mark.skipif(os.path.exists("/dev/vhost-vsock"), reason="needs a host without vhost-vsock")
async def test_vsock_without_the_device_is_an_error_with_a_hint(bench: Bench) -> None:
    with pytest.raises(FailedPrecondition, match=r"open '/dev/vhost-vsock': ENOENT .*modprobe vhost_vsock"):
        await bench.vm.create(bench.config(agent_channel=VsockChannel(port=1024)))


async def test_an_empty_image_is_refused_by_name(tmp_path: Path, bench: Bench) -> None:
    config = bench.config()
    image = tmp_path / "image"
    image.touch()

    with pytest.raises(InvalidArgument, match=f"image '{image}' is empty"):
        await bench.vm.create(replace(config, boot=replace(config.boot, image=str(image))))


@pytest.mark.root
async def test_qemu_runs_in_the_pods_network_namespace(bench: Bench) -> None:
    ready, ready_write = os.pipe()
    holder = await bench.children.spawn(
        ["/usr/bin/unshare", "--net", "/bin/sh", "-c", "echo; exec sleep 1000"], env={}, stdout=ready_write
    )
    os.close(ready_write)
    await asyncio.to_thread(os.read, ready, 1)
    os.close(ready)
    namespace = f"/proc/{holder.pid}/ns/net"

    await bench.vm.create(bench.config(netns_path=namespace))
    inside = os.readlink(f"/proc/{bench.vm.pid}/ns/net")
    await bench.vm.stop()

    assert inside == os.readlink(namespace) != os.readlink("/proc/self/ns/net")
    await holder.end()


@pytest.mark.root
@pytest.mark.parametrize("in_host_netns", [False, True])
async def test_qemu_without_a_namespace_of_the_pod_has_an_empty_one_unless_it_stays_in_the_hosts(
    in_host_netns: bool, bench: Bench
) -> None:
    await bench.vm.create(bench.config(in_host_netns=in_host_netns))
    inside = os.readlink(f"/proc/{bench.vm.pid}/ns/net")
    await bench.vm.stop()

    assert (inside == os.readlink("/proc/self/ns/net")) == in_host_netns


def flags_of_memory(pid: int, size_kib: int) -> list[str]:
    """The kernel's flags of the one mapping of that size."""
    maps = Path(f"/proc/{pid}/smaps").read_text().split("\nVmFlags:")
    (flags,) = [after.splitlines()[0] for before, after in pairwise(maps) if f" {size_kib} kB\nKernel" in before]
    return flags.split()


@pytest.mark.parametrize("dumps_core", [False, True])
async def test_a_crash_of_qemu_writes_the_guests_memory_only_if_allowed(dumps_core: bool, bench: Bench) -> None:
    await bench.vm.create(bench.config(dumps_core=dumps_core))
    limit = resource.prlimit(bench.vm.pid, resource.RLIMIT_CORE)
    machine = arguments(bench.vm.pid)[arguments(bench.vm.pid).index("-machine") + 1]
    flags = flags_of_memory(bench.vm.pid, bench.config().memory.boot_mib << 10)
    await bench.vm.stop()

    assert (limit == (1, 1)) is not dumps_core
    assert ("dump-guest-core=off" in machine) is not dumps_core
    assert ("dd" in flags) is not dumps_core, "the kernel's mark on memory that is in no core"


def statuses(pid: int) -> list[dict[str, str]]:
    """The kernel's fields of each thread of the process."""
    texts = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line) for text in texts]


@pytest.mark.root
@pytest.mark.parametrize("is_privileged", [False, True])
async def test_qemu_has_two_capabilities_a_filter_and_no_way_to_more(is_privileged: bool, bench: Bench) -> None:
    await bench.vm.create(bench.config(is_privileged=is_privileged))
    await bench.vm.start()
    threads = statuses(bench.vm.pid)
    await bench.vm.stop()

    assert len(threads) > 1
    assert {(status["NoNewPrivs"], status["Seccomp"]) for status in threads} == {("1", "2")}
    few = {int(status[name], 16) for status in threads for name in ("CapEff", "CapPrm", "CapBnd")}
    assert (few == {1 << CAP_DAC_OVERRIDE | 1 << CAP_IPC_LOCK}) is not is_privileged
