"""`make demo`: containers in virtual machines through a private containerd, shown step by step; then nothing left.

Runs inside an enclosure (framework/enclosure.py), so that containerd, the network and every path are the demo's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from .framework import enclosure, images
from .framework.containerd import Containerd, remove_daemon_files
from .framework.ctr import Ctr
from .framework.daemon import Directories
from .framework.leaks import HostState, assert_nothing_left
from .framework.runtime import Runtime

PROJECT = Path(__file__).resolve().parents[1]
GROUND = Path("/run/pyshim-demo")
_CODES = (0, 1, 7, 42, 255)
_BOLD, _DIM, _OFF = ("\033[1m", "\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


def say(text: str = "") -> None:
    print(text, flush=True)


def heading(text: str) -> None:
    say(f"\n{_BOLD}{text}{_OFF}")


def typed(*words: str) -> None:
    say(f"{_DIM}  $ ctr {' '.join(words)}{_OFF}")


def fact(name: str, value: object) -> None:
    say(f"  {name:<22} {value}")


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """A progress line for something that takes a while."""
    say(f"==> {text} ...")
    started = time.monotonic()
    yield
    say(f"    done in {time.monotonic() - started:.1f} s")


def first_output(ctr: Ctr, words: list[str]) -> tuple[float, str, int]:
    """Seconds from calling `ctr` to the first byte of the command's output; all output; the exit code."""
    started = time.monotonic()
    with subprocess.Popen(
        ctr.argv(*words), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=ctr.environment
    ) as run:
        assert run.stdout is not None
        first = run.stdout.read(1)
        after = time.monotonic() - started
        output = first + run.stdout.read()
    return after, output.decode(errors="replace").rstrip("\n"), run.returncode


def show_command(ctr: Ctr, runtime: Runtime) -> None:
    heading("1. A command in a virtual machine of its own")
    script = "echo hello from process $$ on $(uname -m); cat /etc/os-release | head -1"
    typed("run", "--rm", "--runtime", runtime.name, images.IMAGE, "demo-1", "sh", "-c", repr(script))
    words = ["run", "--rm", "--runtime", runtime.name, images.IMAGE, "demo-1", "sh", "-c", script]
    after, output, code = first_output(ctr, words)
    say("  " + output.replace("\n", "\n  "))
    fact("first output after", f"{after:.1f} s (a whole VM booted in it)")
    fact("exit code", code)
    if code != 0:
        raise AssertionError(f"the first container ended with code {code}")


def show_kernels(ctr: Ctr, name: str) -> None:
    heading("2. Whose kernel?")
    typed("task", "exec", "--exec-id", "uname", name, "uname", "-r")
    inside = ctr("task", "exec", "--exec-id", "uname", name, "uname", "-r")
    fact("kernel of the host", platform.release())
    fact("kernel of the guest", inside.out.strip())


def show_size(runtime: Runtime, name: str) -> None:
    heading("3. How large is the VM, and why?")
    state = json.loads(runtime.persisted(name).read_text())
    sizing = state["Pyshim"]["Snapshot"]["Sizing"]
    fact("vCPUs", explained(sizing["vcpus"], "vCPU"))
    fact("memory", explained(sizing["memory_mib"], "MiB"))
    fact("policy", sizing["policy"])
    fact("recorded in", runtime.persisted(name))
    vmm = runtime.vmms(name)[0]
    fact("VMM", f"pid {vmm.pid}, {resident_mib(vmm.pid)} MiB resident")
    shim = runtime.shims(name)[0]
    fact("shim", f"pid {shim.pid}, {resident_mib(shim.pid)} MiB resident")


def explained(size: dict[str, Any], unit: str) -> str:
    base, requested, exact = (f"{float(Fraction(size[key])):g}" for key in ("base", "requested", "exact"))
    text = f"{base} ({size['base_source']}) + {requested} ({size['requested_source']})"
    limited = f", made {size['granted']} by {size['limited_by']}" if size["limited_by"] else ""
    return f"{text} = {exact}, rounded up to {size['rounded']} {unit}{limited}"


def resident_mib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // (1024 * 1024)


def show_exec(ctr: Ctr, name: str) -> None:
    heading("4. Another process in the same VM")
    typed("task", "exec", "--exec-id", "ps", name, "ps")
    done = ctr("task", "exec", "--exec-id", "ps", name, "ps")
    say("  " + done.out.rstrip("\n").replace("\n", "\n  "))
    fact("took", f"{done.took_s:.2f} s")


def show_codes(ctr: Ctr, name: str) -> None:
    heading("5. Exit codes arrive as they are")
    for code in _CODES:
        got = ctr("task", "exec", "--exec-id", f"code{code}", name, "sh", "-c", f"exit {code}", check=False).code
        fact(f"exit {code}", got)
        if got != code:
            raise AssertionError(f"exit {code} arrived as {got}")
    killed = ctr("task", "exec", "--exec-id", "killed", name, "sh", "-c", "kill -KILL $$", check=False).code
    fact("killed by SIGKILL", f"{killed} (128 + {signal.SIGKILL:d})")


def main() -> int:
    """0 when every step did what it says and nothing is left."""
    if enclosure.MARK not in os.environ:
        print("demo: run it with `make demo`", file=sys.stderr)
        return 2
    runtime = Runtime.chosen()
    before = HostState.look((GROUND,))
    daemon = Containerd(Directories(root=GROUND, state=Path("/run/containerd")), binaries=PROJECT / "bin")
    with step("starting a private containerd and importing a busybox image made here"):
        daemon.start()
        images.write_archive(GROUND / "busybox.tar")
        daemon.ctr("images", "import", GROUND / "busybox.tar")
    try:
        show_command(daemon.ctr, runtime)
        limits = ["--memory-limit", str(256 * 1024 * 1024), "--cpus", "0.5"]
        words = ["run", "--detach", *limits, "--runtime", runtime.name, images.IMAGE, "demo-2", "sleep", "100000"]
        say()
        with step("booting a second VM, for a container with limits: half a CPU and 256 MiB"):
            daemon.ctr(*words)
        try:
            show_kernels(daemon.ctr, "demo-2")
            if runtime.has_vm:
                show_size(runtime, "demo-2")
            show_exec(daemon.ctr, "demo-2")
            show_codes(daemon.ctr, "demo-2")
        finally:
            daemon.ctr.remove(["demo-2"])
    except BaseException:
        print(f"--- the end of containerd's and the shim's log:\n{daemon.log_tail(30)}", file=sys.stderr)
        raise
    finally:
        daemon.stop()
    heading("6. Nothing left")
    remove_daemon_files(daemon.directories)
    assert_nothing_left(before, (GROUND,))
    fact("compared with before", "processes, mounts, links, namespaces, cgroups, sockets, files: the same")
    return 0


if __name__ == "__main__":
    sys.exit(main())
