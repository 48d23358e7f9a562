"""`pyshim list`: from states and processes, and from the shims that answer."""

import contextlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.host.processes.identity import ProcessRef, start_ticks
from pyshim.model.errors import ShimError
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.observation import MONITOR_SOCKET
from pyshim.model.sandbox import Phase, SandboxStatus
from pyshim.model.sizing import SizingRecord, dimension
from pyshim.node.cli import listing
from pyshim.node.cli.command import run
from pyshim.node.cli.listing import HEADINGS, age_text, cells
from pyshim.node.cli.sandboxes import SandboxRow, sandbox_id
from pyshim.node.cli.usage import Usage, UsageMeter
from pyshim.node.install.plan import python_path, release_of
from pyshim.state.schema import SandboxState, ShimRecord
from pyshim.state.store import StateStore
from tests.unit.state import states

GONE = ProcessRef(2**22 + 1, 7)
"""No kernel gives such a pid."""
ANSWER = b'{"agent_age_s": 3.5, "problem": ""}'
POD = {"io.kubernetes.cri.sandbox-name": "web-0", "io.kubernetes.cri.sandbox-namespace": "shop"}


def sizing() -> dict[str, object]:
    def of(base: int, requested: Fraction, unit: int) -> Any:
        return dimension(
            base=Fraction(base),
            base_source="x",
            requested=requested,
            requested_source="y",
            unit=unit,
            least=(1, "a"),
            most=(10**6, "b"),
        )

    record = SizingRecord(
        policy="sum", vcpus=of(1, Fraction(1, 2), 1), memory_mib=of(256, Fraction(512), 2), warnings=()
    )
    return record.as_json()


def ref(process: "subprocess.Popen[bytes]") -> ProcessRef:
    return ProcessRef(process.pid, start_ticks(process.pid) or 0)


def save(root: Path, sandbox_id: str, shim: ProcessRef, vmm: ProcessRef, **changes: Any) -> SandboxState:
    container = replace(states.container("c1"), annotations=POD)
    taken = replace(
        states.snapshot(container),
        sandbox_id=SandboxId(sandbox_id),
        sizing=sizing(),
        origin="cloned from 0123",
        trace={"Spans": [["create", -1, time.time_ns() - 90 * 10**9, 0, ""]]},
    )
    detail: dict[str, str | int] = {"pid": vmm.pid, "start_ticks": vmm.start_ticks, "program": "/usr/bin/qemu"}
    state = SandboxState(
        sandbox_id=SandboxId(sandbox_id),
        shim=ShimRecord(pid=shim.pid, start_ticks=shim.start_ticks, socket="unix:///s", namespace="k8s.io"),
        snapshot=replace(taken, **changes),
        ledger=(LedgerEntry(kind=ResourceKind.PROCESS, key=f"/run/vc/vm/{sandbox_id}/qmp", detail=detail),),
    )
    StateStore(root=str(root)).save(state)
    return state


@contextlib.contextmanager
def shim(
    root: Path, sandbox_id: str, reply: bytes = b'{"agent_age_s": 3.5, "problem": ""}', status: int = 200
) -> Iterator[None]:
    """The sandbox's monitor socket is there and has this answer to everything."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(reply)}\r\nConnection: close\r\n\r\n"
            self.wfile.write(head.encode() + reply)

    with socketserver.ThreadingUnixStreamServer(str(root / sandbox_id / MONITOR_SOCKET), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(60)


def listed(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert run(["list", "--state-dir", str(root), "--json", *words]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_running_pod_has_its_name_age_sizes_and_use(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, "ab12", ref(sleeper), ref(sleeper))

    with shim(tmp_path, "ab12"):
        (found,) = listed(tmp_path, capsys)

    assert found["age_s"] >= 90
    assert found["used"]["cpu_percent"] >= 0
    assert {key: found[key] for key in found if key not in ("age_s", "used")} == {
        "id": "ab12",
        "pod": "shop/web-0",
        "containers": 1,
        "requested": {"vcpus": 0.5, "memory_mib": 512.0},
        "vm": {"vcpus": 2, "memory_mib": 768},
        "release": "",
        "origin": "cloned from 0123",
        "agent_age_s": 3.5,
        "health": "ok",
    }


def test_programs_get_the_release_that_a_shim_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = python_path("/opt/pyshim/releases/0.2.0-0123456789ab")
    with subprocess.Popen([python, "600"], executable="/bin/sleep") as process:
        save(tmp_path, "ab12", ref(process), ref(process))
        save(tmp_path, "cd34", GONE, ref(process))

        installed, gone = listed(tmp_path, capsys)

        process.kill()

    assert (installed["release"], gone["release"]) == ("0.2.0-0123456789ab", "")


@pytest.mark.parametrize(
    "program", ["", "/src/.venv/bin/python", "/a/releases/1/venv/bin/python3", "/a/releases/1/x/venv/bin/python"]
)
def test_another_interpreter_is_of_no_release(program: str) -> None:
    assert not release_of(program)


def test_people_get_a_table(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, "ab12" + "0" * 12, ref(sleeper), ref(sleeper))

    with shim(tmp_path, "ab12" + "0" * 12):
        assert run(["list", "--state-dir", str(tmp_path)]) == 0

    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split() == list(HEADINGS)
    assert line.startswith("ab12" + "0" * 12 + "  shop/web-0 ")
    assert "0.5 / 512Mi" in line
    assert "2 / 768Mi  clone" in line
    assert line.endswith("   3s  ok")


@pytest.mark.parametrize(
    ("shim_lives", "vmm_lives", "changes", "health"),
    [
        (True, True, {}, "its shim does not answer"),
        (True, False, {}, "qemu is gone"),
        (False, True, {}, "its shim is gone (hint: pyshim cleanup)"),
        (True, True, {"failure": "qemu exited 1"}, "failed: qemu exited 1"),
        (True, True, {"status": SandboxStatus.STOPPED}, "stopped"),
        (True, True, {"status": SandboxStatus.STOPPED, "phase": Phase.ENDING}, "ending"),
        (True, True, {"status": SandboxStatus.CREATING}, "starting"),
        (True, True, {"sizing": {"vcpus": 1}}, "state damaged: read sizing record of 'ab12'"),
    ],
)
def test_health_is_what_states_and_processes_say(
    tmp_path: Path,
    sleeper: "subprocess.Popen[bytes]",
    capsys: pytest.CaptureFixture[str],
    shim_lives: bool,
    vmm_lives: bool,
    changes: dict[str, Any],
    health: str,
) -> None:
    lives = ref(sleeper)
    save(tmp_path, "ab12", lives if shim_lives else GONE, lives if vmm_lives else GONE, **changes)

    (found,) = listed(tmp_path, capsys)

    assert found["health"].startswith(health)


@pytest.mark.parametrize(
    ("reply", "status", "health", "age_s"),
    [
        (b'{"agent_age_s": 0.1, "problem": ""}', 200, "ok", 0.1),
        (b'{"agent_age_s": 90, "problem": "check agent: no reply within 1 s"}', 200, "check agent: no reply", 90),
        (b'{"agent_age_s": null, "problem": "no agent"}', 200, "no agent", None),
        (b"no such path", 404, "runs", None),
        (b"{", 200, "its shim answers nonsense", None),
    ],
)
def test_it_is_ok_when_the_guests_agent_has_answered(
    tmp_path: Path,
    sleeper: "subprocess.Popen[bytes]",
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    reply: bytes,
    status: int,
    health: str,
    age_s: float | None,
) -> None:
    monkeypatch.setattr(listing, "ASK_S", 60.0)
    save(tmp_path, "ab12", ref(sleeper), ref(sleeper))

    with shim(tmp_path, "ab12", reply, status):
        (found,) = listed(tmp_path, capsys)

    assert (found["health"].startswith(health), found["agent_age_s"]) == (True, age_s)


@pytest.mark.parametrize("stopped", ["shim", "qemu"])
def test_a_stopped_process_is_named_and_nothing_is_asked(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str], stopped: str
) -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        shim_, vmm = (sleeper, other) if stopped == "shim" else (other, sleeper)
        save(tmp_path, "ab12", ref(shim_), ref(vmm))
        with shim(tmp_path, "ab12"):
            (found,) = listed(tmp_path, capsys)
        other.kill()
    sleeper.send_signal(signal.SIGCONT)

    assert found["health"] == f"{stopped} is stopped (SIGSTOP or a debugger)"
    assert found["agent_age_s"] is None


def test_shims_that_hang_delay_the_list_once(
    tmp_path: Path,
    sleeper: "subprocess.Popen[bytes]",
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listing, "ASK_S", 0.2)
    with contextlib.ExitStack() as silent:
        for number in range(20):
            save(tmp_path, f"s{number}", ref(sleeper), ref(sleeper))
            listener = silent.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(tmp_path / f"s{number}" / MONITOR_SOCKET))
            listener.listen()
        began_s = time.monotonic()
        found = listed(tmp_path, capsys)
        took_s = time.monotonic() - began_s

    assert {each["health"] for each in found} == {"its shim does not answer"}
    assert took_s < 20 * 0.2


def test_states_that_are_not_ours_or_damaged_are_named_and_hide_no_others(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, "c3", ref(sleeper), ref(sleeper))
    for name, text in (("a1", "{"), ("b2", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "persist.json").write_text(text)
    (tmp_path / "d4").mkdir()  # it begins or ends just now

    with shim(tmp_path, "c3"):
        found = listed(tmp_path, capsys)

    assert [each["id"] for each in found] == ["a1", "b2", "c3"]
    assert found[0]["health"].startswith("state damaged: ")
    assert [each["health"] for each in found[1:]] == ["another runtime's", "ok"]


def test_those_with_a_prefix_only(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ab", "ac", "b"):
        save(tmp_path, name, ref(sleeper), ref(sleeper))

    assert [each["id"] for each in listed(tmp_path, capsys, "a")] == ["ab", "ac"]


def test_a_pod_is_listed_by_its_name(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, "a1", ref(sleeper), ref(sleeper))

    assert [each["pod"] for each in listed(tmp_path, capsys, "shop/web-0")] == ["shop/web-0"]


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        ("shop/web-0", "running"),
        ("shop/none", "find pod 'shop/none': no sandbox of it is recorded here (hint: pyshim list)"),
        ("shop/twice", "find pod 'shop/twice': it has 2 sandboxes: t1, t2"),
        ("../web-0", "check sandbox id '../web-0': not a valid identifier"),
    ],
)
def test_a_pods_name_means_its_sandbox_that_runs(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", pod: str, expected: str
) -> None:
    twice = {key: "twice" if value == "web-0" else value for key, value in POD.items()}
    save(tmp_path, "ended", ref(sleeper), ref(sleeper), status=SandboxStatus.STOPPED)
    save(tmp_path, "running", ref(sleeper), ref(sleeper))
    for name in ("t1", "t2"):
        save(
            tmp_path, name, ref(sleeper), ref(sleeper), containers=(replace(states.container("c"), annotations=twice),)
        )

    try:
        found: str = sandbox_id(pod, str(tmp_path))
    except ShimError as error:
        found = str(error)

    assert found == expected


def test_a_node_without_sandboxes_is_an_empty_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(tmp_path / "none", capsys) == []


def test_use_is_counted_from_the_second_look(sleeper: "subprocess.Popen[bytes]") -> None:
    busy = SandboxRow(id="a", health="ok", processes=(ProcessRef(os.getpid(), start_ticks(os.getpid()) or 0),))
    idle = SandboxRow(id="b", health="ok", processes=(ref(sleeper), GONE))
    meter = UsageMeter()

    assert meter.measure([busy, idle])["a"].cpu_percent == 0
    began_s = time.process_time()
    while time.process_time() < began_s + 0.05:
        pass
    usage = meter.measure([busy, idle])

    assert usage["a"].cpu_percent > 0
    assert usage["a"].memory_mib > 0
    assert usage["b"].cpu_percent == 0


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (90000, "1d")])
def test_ages_have_one_unit(seconds: int, text: str) -> None:
    assert age_text(seconds) == text


def test_a_terminal_gets_short_ids() -> None:
    shown = cells(
        SandboxRow(id="a" * 64, health="stopped"), Usage(cpu_percent=0, memory_mib=0), now_ns=0, whole_ids=False
    )

    assert shown == ("a" * 13, "-", "-", "0", "-", "-", "-", "-", "-", "-", "stopped")


def test_top_looks_again_and_gives_programs_a_line_for_each_look(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, "ab12", ref(sleeper), ref(sleeper))
    words = ["list", "--watch", "--state-dir", str(tmp_path), "--interval", "0.1", "--count", "2"]

    assert run([*words, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert run(words) == 0
    shown = capsys.readouterr().out.splitlines()

    assert [[each["id"] for each in line["sandboxes"]] for line in lines] == [["ab12"]] * 2
    assert [line.split()[0] for line in shown] == ["ID", "ab12"] * 2


def test_top_on_a_terminal_draws_the_table(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    save(tmp_path, "ab12", ref(sleeper), ref(sleeper))
    words = f"-m pyshim list --watch --interval 0.1 --count 1 --state-dir {tmp_path}"

    done = subprocess.run(
        ["script", "-qec", f"{sys.executable} {words}", "/dev/null"],
        cwd=Path(__file__).parents[4],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "150"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert done.returncode == 0
    assert "ab12" in done.stdout


_HOLDS = """
import mmap, os, sys
fd = os.memfd_create("memory-backend-memfd")
os.ftruncate(fd, 128 << 20)
ram = mmap.mmap(fd, 128 << 20)
own = mmap.mmap(-1, 40 << 20)
unshared = mmap.mmap(-1, 768 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for memory, size in ((ram, 128), (own, 40), (unshared, 60)):
    for at in range(0, size << 20, 4096):
        memory[at] = 1
print("ready", flush=True)
sys.stdin.read()
"""
"""RAM that is shared, RAM of the VM's size that is not, and 40 MiB of its own (of another kind: the kernel makes one
mapping of equal neighbours; QEMU has a page without rights beside its RAM)."""


def test_podfixed_counts_what_a_sandbox_here_takes_beside_guest_ram(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", capsys: pytest.CaptureFixture[str]
) -> None:
    words = [sys.executable, "-I", "-S", "-c", _HOLDS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as vmm:
        assert vmm.stdout is not None
        assert vmm.stdout.readline() == b"ready\n"
        save(tmp_path, "ab12", ref(sleeper), ref(vmm))
        save(tmp_path, "cd34", ref(sleeper), GONE)
        assert run(["sizing", "podfixed", "--state-dir", str(tmp_path), "--json"]) == 0
        vmm.communicate()

    host_side = json.loads(capsys.readouterr().out)["summands"][-1]
    assert host_side["source"] == "measured: the one sandbox here"
    assert 40 <= int(host_side["memory"].removesuffix("Mi")) < 100
