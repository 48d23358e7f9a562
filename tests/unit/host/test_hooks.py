"""OCI hooks as real programs: what they get, and what becomes of those that do not end well."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pyshim.host.processes.children import Children
from pyshim.host.processes.hooks import HookFailed, netns_member, run_hook
from pyshim.model.errors import DeadlineExceeded, ShimError
from pyshim.model.oci import OciHook

STATE = b'{"id": "c1", "status": "creating"}'


def shell(script: str, *, timeout: int | None = None, env: tuple[str, ...] = ("PATH=/usr/bin:/bin",)) -> OciHook:
    return OciHook(path="/bin/sh", args=("hook", "-c", script), env=env, timeout=timeout)


async def test_a_hook_gets_the_state_its_arguments_and_its_environment_only(tmp_path: Path, children: Children) -> None:
    out = tmp_path / "out"
    script = f'cat > {out}; echo "$0 $1 $A ${{HOME-none}}" >> {out}'
    hook = OciHook(path="/bin/sh", args=("name", "-c", script, "zero", "one"), env=("PATH=/usr/bin:/bin", "A=b=c"))

    await run_hook(children, "prestart", hook, STATE)

    assert out.read_bytes() == STATE + b"zero one b=c none\n"


@pytest.mark.parametrize("size", [0, 1 << 20], ids=["empty", "larger than a pipe"])
async def test_a_hook_need_not_read_its_state(size: int, children: Children) -> None:
    await run_hook(children, "prestart", OciHook(path="/bin/true"), b"x" * size)


@pytest.mark.parametrize(
    ("hook", "kind", "text"),
    [
        (shell("echo no bridge >&2; exit 3"), HookFailed, "it exited with status 3: no bridge"),
        (shell("kill -SEGV $$"), HookFailed, "it was killed by SIGSEGV"),
        (OciHook(path="/no/such/hook"), HookFailed, "ENOENT"),
        (OciHook(path="/etc/passwd"), HookFailed, "EACCES"),
        (OciHook(path="/"), HookFailed, "EACCES"),
        (shell("sleep 1000", timeout=1), DeadlineExceeded, "no end within 1 s"),
        (shell("echo waiting for the lock >&2; sleep 1000", timeout=1), DeadlineExceeded, "1 s: waiting for the lock"),
        (
            shell("while :; do echo flood; echo flood >&2; done", timeout=1),
            DeadlineExceeded,
            "no end within 1 s: flood",
        ),
    ],
    ids=["fails", "is killed", "is missing", "is no program", "is a folder", "hangs", "hangs with words", "floods"],
)
async def test_a_hook_that_does_not_end_well_is_named_with_the_cause(
    hook: OciHook, kind: type[ShimError], text: str, children: Children
) -> None:
    with pytest.raises(kind, match=f"run createRuntime hook '{hook.path}': .*{text}") as caught:
        await run_hook(children, "createRuntime", hook, STATE)
    assert len(str(caught.value)) < 64 << 10
    assert children.alive == ()


async def test_a_file_that_is_no_program_is_refused(tmp_path: Path, children: Children) -> None:
    path = tmp_path / "hook"
    path.write_bytes(b"\0" * 64)
    path.chmod(0o755)

    with pytest.raises(HookFailed, match=r"ENOEXEC \(exec format error\)"):
        await run_hook(children, "prestart", OciHook(path=str(path)), STATE)


async def test_children_of_a_hook_that_succeeded_live_on_and_are_not_waited_for(
    tmp_path: Path, children: Children
) -> None:
    pid_file = tmp_path / "pid"

    await run_hook(children, "createRuntime", shell(f"sleep 1000 & echo $! > {pid_file}"), STATE)

    pid = int(pid_file.read_text())
    assert _runs(pid)
    os.kill(pid, 9)


@pytest.mark.parametrize("end", ["timeout", "cancel"])
async def test_a_hook_that_is_given_up_goes_with_its_children(tmp_path: Path, end: str, children: Children) -> None:
    pid_file = tmp_path / "pid"
    hook = shell(f"sleep 1000 & echo $! > {pid_file}; wait", timeout=1 if end == "timeout" else 1000)

    running = asyncio.ensure_future(run_hook(children, "prestart", hook, STATE))
    await _until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    if end == "cancel":
        running.cancel()
    with pytest.raises((DeadlineExceeded, asyncio.CancelledError)):
        await running
    assert children.alive == ()

    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline, "the hook's child lives on"
        await asyncio.sleep(0.01)


async def test_a_member_of_a_namespace_lives_as_long_as_the_block(children: Children) -> None:
    async with netns_member(children, "/proc/self/ns/net") as pid:
        assert os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
    assert children.alive == ()
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.01)
