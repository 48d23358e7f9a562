"""The guest's vsock from a program of the host: it lives and dies with its VM, and its end is named."""

import asyncio
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from hypervisors.qemu.process import VmStartFailed, VmStartTimedOut
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Internal, ShimError
from pyshim.model.ledger import ResourceKind
from pyshim.model.vm import VhostUserVsockChannel, VmExitKind
from tests.fakes.tiny_kernel import HALT

from .conftest import Bench
from .test_vm import QEMU

REAL = shutil.which("vhost-device-vsock")
LISTEN = "listener = socket.socket(socket.AF_UNIX); listener.bind(words['--socket']); listener.listen()"
SERVE = f"{LISTEN}; open(words['--uds-path'], 'w').close(); qemu = listener.accept()[0]; time.sleep(1000)"
IDLE_VMM = "qmp = greet(); qmp.recv(65536)"
"""Ends when it is asked to quit."""


def channel(bench: Bench, script: str = SERVE) -> VhostUserVsockChannel:
    """`script` in the program's place; `words` are its arguments."""
    path = bench.directory / "vsock-program"
    path.write_text(
        f"#!{sys.executable} -IS\nimport os, socket, sys, time\n"
        f"words = dict(word.split('=', 1) for word in sys.argv[1:])\n{script}\n"
    )
    path.chmod(0o755)
    return _channel(bench, str(path))


def _channel(bench: Bench, program: str) -> VhostUserVsockChannel:
    own = bench.directory / "vm/vsock"
    return VhostUserVsockChannel(
        port=1024, program=program, device_path=f"{own}/device.sock", socket_path=f"{own}/vsock.sock"
    )


async def test_the_program_is_in_the_ledger_before_the_vm_and_gone_with_it(bench: Bench) -> None:
    asked = channel(bench)

    await bench.vm.create(bench.config(hypervisor_path=bench.vmm(IDLE_VMM), agent_channel=asked))
    held = bench.ledger.held[ResourceKind.PROCESS, asked.device_path]
    alive = {child.name: child.pid for child in bench.children.alive}
    address = str(bench.vm.agent_address)
    assert bench.vm.helper_pids == (alive["vsock-program"],)
    await bench.vm.stop()

    assert held.detail["pid"] == alive["vsock-program"]
    assert address == f"hvsock://{asked.socket_path}:1024"


async def test_no_packet_of_the_guest_is_so_large_that_its_kernel_splits_it(bench: Bench) -> None:
    """The real program drops a packet in several pieces, and its connection stalls."""
    notes = f"open({str(bench.directory / 'size')!r}, 'w').write(words['--tx-buffer-size']); {SERVE}"

    await bench.vm.create(bench.config(hypervisor_path=bench.vmm(IDLE_VMM), agent_channel=channel(bench, notes)))
    await bench.vm.stop()

    size_bytes = int((bench.directory / "size").read_text())
    assert 4096 <= size_bytes <= 32 * 1024 - 1024, "room for the headers"
    assert size_bytes.bit_count() == 1, "the program counts modulo 2^32"


@pytest.mark.parametrize(
    ("script", "timeout_s", "error", "text"),
    [
        pytest.param("sys.exit('no such cid')", 50, Internal, r"status 1: no such cid", id="dies"),
        pytest.param("time.sleep(1000)", 0.3, DeadlineExceeded, "takes no connection at '.*device.sock'", id="silent"),
    ],
)
async def test_a_program_that_does_not_start_is_an_error_with_its_output(
    script: str, timeout_s: float, error: type[ShimError], text: str, bench: Bench
) -> None:
    config = bench.config(
        hypervisor_path=bench.vmm(IDLE_VMM), agent_channel=channel(bench, script), start_timeout_s=timeout_s
    )

    with pytest.raises(error, match=text):
        await bench.vm.create(config)


async def test_a_missing_program_is_an_error_before_anything_is_made(tmp_path: Path, bench: Bench) -> None:
    config = bench.config(agent_channel=_channel(bench, str(tmp_path / "nowhere")))

    with pytest.raises(FailedPrecondition, match=r"open vsock program '.*/nowhere': ENOENT"):
        await bench.vm.create(config)
    assert not (tmp_path / "vm").exists()


@pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}")
@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        pytest.param(f"{LISTEN}; listener.accept(); sys.exit('broken')", VmStartFailed, "status 1: broken", id="ends"),
        pytest.param(SERVE, VmStartTimedOut, r"vsock-program \(pid \d+\) is running", id="silent"),
    ],
)
async def test_a_program_that_does_not_serve_qemu_is_an_error_with_its_output(
    script: str, error: type[ShimError], text: str, bench: Bench
) -> None:
    with pytest.raises(error, match=text):
        await bench.vm.create(bench.config(agent_channel=channel(bench, script), start_timeout_s=2))


async def test_the_vm_ends_with_its_program_and_the_reason_is_the_programs_end(bench: Bench) -> None:
    await bench.vm.create(bench.config(hypervisor_path=bench.vmm(IDLE_VMM), agent_channel=channel(bench)))
    program = next(child for child in bench.children.alive if child.name == "vsock-program")

    os.kill(program.pid, signal.SIGKILL)
    ended = await bench.vm.wait()
    await bench.vm.stop()

    assert ended.kind is VmExitKind.VMM_DIED
    assert f"lost the guest's vsock: vsock-program (pid {program.pid}) was killed by SIGKILL" in ended.reason


async def test_the_program_ends_with_a_vmm_that_dies_which_is_the_reason(bench: Bench) -> None:
    hangs_up = f"{LISTEN}; listener.accept()[0].recv(1); sys.exit('qemu is gone')"
    config = bench.config(hypervisor_path=bench.vmm(IDLE_VMM), agent_channel=channel(bench, hangs_up))
    await bench.vm.create(config)

    os.kill(bench.vm.pid, signal.SIGKILL)
    ended = await bench.vm.wait()
    await bench.vm.stop()

    assert "vmm (pid" in ended.reason
    assert "vsock-program" not in ended.reason


def telling(bench: Bench, *answers: dict[str, object]) -> str:
    """A VMM that says this, one after the other and the last for good, of the vsock device, and ends after "end"."""
    return bench.vmm(
        f"""answers, asked, qmp = {list(answers)!r}, [], greet()
while text := qmp.recv(65536):
    request, answer = json.loads(text), {{"return": {{}}}}
    if request["execute"] == "x-query-virtio-status":
        asked.append(request["arguments"]["path"])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer == "end":
            sys.exit(1)
        open({str(bench.directory / "asked")!r}, "w").write(" ".join(asked))
    qmp.sendall(json.dumps({{**answer, "id": request.get("id")}}).encode() + b"\\r\\n")
    if request["execute"] == "quit":
        break
"""
    )


_NOT_YET: dict[str, object] = {"return": {"vhost-started": False}}
_STARTED: dict[str, object] = {"return": {"vhost-started": True}}
_UNKNOWN: dict[str, object] = {"error": {"class": "CommandNotFound", "desc": "not found"}}
_PATH = "/machine/peripheral/vsock0/virtio-backend"


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        pytest.param((_STARTED,), 1, id="is started"),
        pytest.param((_NOT_YET, _NOT_YET, _STARTED), 3, id="is started later"),
        pytest.param((_UNKNOWN,), 1, id="a QEMU that does not tell"),
        pytest.param(({"return": {"vhost-dev": {"started": False}}},), 1, id="tells otherwise"),
        pytest.param(({"return": "yes"},), 1, id="tells nothing"),
    ],
)
async def test_the_agent_is_called_when_the_guest_has_started_its_vsock(
    tmp_path: Path, answers: tuple[dict[str, object], ...], asked: int, bench: Bench
) -> None:
    await bench.vm.create(bench.config(hypervisor_path=telling(bench, *answers), agent_channel=channel(bench)))
    await bench.vm.start()

    await bench.vm.await_agent_device(50)
    await bench.vm.stop()

    assert (tmp_path / "asked").read_text().split() == [_PATH] * asked


@pytest.mark.parametrize(
    ("answers", "error", "text"),
    [
        pytest.param((_NOT_YET,), DeadlineExceeded, "wait until the guest uses the agent's device", id="never"),
        pytest.param((_NOT_YET, "end"), ShimError, "x-query-virtio-status.*qmp connection", id="ends"),
    ],
)
async def test_a_guest_that_does_not_start_its_vsock_is_an_error(
    answers: tuple[dict[str, object], ...], error: type[ShimError], text: str, bench: Bench
) -> None:
    await bench.vm.create(bench.config(hypervisor_path=telling(bench, *answers), agent_channel=channel(bench)))
    await bench.vm.start()

    with pytest.raises(error, match=text):
        await bench.vm.await_agent_device(50 if "end" in answers else 0.3)
    await bench.vm.stop()


async def test_other_agent_channels_are_ready_at_once(tmp_path: Path, bench: Bench) -> None:
    await bench.vm.create(bench.config(hypervisor_path=telling(bench, _NOT_YET)))
    await bench.vm.start()

    await bench.vm.await_agent_device(0.1)
    await bench.vm.stop()

    assert not (tmp_path / "asked").exists()


@pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}")
@pytest.mark.skipif(REAL is None, reason="needs vhost-device-vsock (hint: cargo install vhost-device-vsock)")
async def test_the_real_program_serves_the_device_of_a_real_qemu(bench: Bench) -> None:
    assert REAL is not None
    asked = _channel(bench, REAL)
    await bench.vm.create(bench.config(HALT, agent_channel=asked))
    await bench.vm.start()

    with pytest.raises(DeadlineExceeded, match="guest uses the agent's device"):
        await bench.vm.await_agent_device(0.3)
    with socket.socket(socket.AF_UNIX) as agent:
        agent.setblocking(False)
        await asyncio.get_running_loop().sock_connect(agent, asked.socket_path)
    await bench.vm.stop()
