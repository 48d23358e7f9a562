"""Assumptions of the shim about kata-agent, checked with a real one that runs on this machine, without a VM.

`KATA_AGENT=/path pytest tests/contract/test_kata_agent.py`, as root. The program runs in an enclosure: its mounts,
cgroups and processes go with it.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from integration.framework import images
from pyshim.agent.client import AgentClient
from pyshim.agent.connect import Connector
from pyshim.model.errors import Internal, InvalidArgument, NotFound, ShimError, Unimplemented
from pyshim.model.guest import GuestContainer, GuestSandbox, Storage, UnixAddress
from pyshim.model.ids import GuestPath

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("KATA_AGENT", "")
CONTAINER = "contract"
NODES = "null zero full random urandom tty"
# A /dev without disks, in which the agent would look for the sandbox's documents.
DEV = f"""\
mkdir /tmp/dev && for node in {NODES}; do cp -a /dev/$node /tmp/dev; done
mount -t tmpfs dev /dev && cp -a /tmp/dev/* /dev && mkdir /dev/pts /dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts /dev/pts && ln -s pts/ptmx /dev/ptmx
exec "$0" --config "$1"
"""

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not PROGRAM, reason="KATA_AGENT names no program"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]
Body = Callable[[AgentClient], Awaitable[None]]


@pytest.fixture(scope="module")
def ground() -> Iterator[Path]:
    """A directory that the enclosure shows too, with the container's root."""
    (PROJECT / ".build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PROJECT / ".build", prefix="agent-") as name:
        images.unpack_rootfs(Path(name, "rootfs"))
        yield Path(name)


@pytest.fixture
def ask(ground: Path) -> Iterator[Callable[[Body], None]]:
    """Runs a body with a client of an agent that has one container, which sleeps."""
    address = UnixAddress(str(ground / "agent.sock"))
    (ground / "agent.toml").write_text(f'server_addr = "{address}"\n')
    argv = [sys.executable, "-m", "integration.framework.enclosure", "/bin/sh", "-ec", DEV]
    with (ground / "log").open("wb") as log:
        agent = subprocess.Popen(
            [*argv, PROGRAM, ground / "agent.toml"], cwd=PROJECT, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )

    async def with_client(body: Body) -> None:
        client = await Connector(partial(AgentClient, request_timeout_s=30)).connect(address, 60)
        try:
            await client.create_sandbox(
                GuestSandbox(
                    sandbox_id=CONTAINER,
                    hostname="contract",
                    dns=(),
                    storages=(),
                    shared_pid_namespace=False,
                    guest_hook_path="",
                    kernel_modules=(),
                )
            )
            await client.create_container(container(ground), 30)
            await client.start_container(CONTAINER)
            async with asyncio.timeout(60):
                await body(client)
        finally:
            await client.close()

    try:
        yield lambda body: asyncio.run(with_client(body))
    finally:
        agent.terminate()
        agent.wait(60)
        (ground / "agent.sock").unlink(missing_ok=True)


def process(*words: str, terminal: bool = False) -> dict[str, Any]:
    user = {"uid": 0, "gid": 0}
    return {"terminal": terminal, "user": user, "args": [*words], "env": ["PATH=/bin"], "cwd": "/"}


def container(
    ground: Path, container_id: str = CONTAINER, storages: tuple[Storage, ...] = (), **linux: object
) -> GuestContainer:
    spec: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {**process("sleep", "1000"), "capabilities": {}},
        "root": {"path": str(ground / "rootfs")},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": []},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": []},
        ],
        "linux": {
            "cgroupsPath": f"/{container_id}",
            "namespaces": [{"type": kind} for kind in ("mount", "ipc", "uts")],
            **linux,
        },
    }
    return GuestContainer(
        container_id=container_id, spec=spec, storages=storages, devices=(), shared_pid_namespace=False
    )


async def output(
    read: Callable[[str, str, int], Awaitable[bytes | memoryview]], exec_id: str, container_id: str = CONTAINER
) -> bytes:
    """All of it, to its end."""
    whole = b""
    while piece := await read(container_id, exec_id, 65536):
        whole += bytes(piece)
    return whole


def test_after_the_end_of_both_outputs_wait_tells_the_status_and_then_the_process_is_forgotten(
    ask: Callable[[Body], None],
) -> None:
    async def body(agent: AgentClient) -> None:
        await agent.exec_process(CONTAINER, "e", process("sh", "-c", "head -c 3000000 /dev/zero; echo err >&2; exit 7"))
        assert await asyncio.gather(output(agent.read_stdout, "e"), output(agent.read_stderr, "e")) == [
            bytes(3000000),
            b"err\n",
        ]
        assert await agent.wait_process(CONTAINER, "e") == 7
        for again in (agent.wait_process(CONTAINER, "e"), agent.read_stdout(CONTAINER, "e", 10)):
            with pytest.raises(NotFound):
                await again

    ask(body)


def test_a_process_that_is_waited_for_first_loses_its_output(ask: Callable[[Body], None]) -> None:
    """Why the shim reads both outputs to their end before it waits."""

    async def body(agent: AgentClient) -> None:
        await agent.exec_process(CONTAINER, "e", process("echo", "lost"))
        assert await agent.wait_process(CONTAINER, "e") == 0
        with pytest.raises(NotFound):
            await agent.read_stdout(CONTAINER, "e", 10)

    ask(body)


def test_input_reaches_the_process_to_its_end(ask: Callable[[Body], None]) -> None:
    async def body(agent: AgentClient) -> None:
        await agent.exec_process(CONTAINER, "e", process("wc", "-c"))
        assert await agent.write_stdin(CONTAINER, "e", bytes(50000)) == 50000
        await agent.close_stdin(CONTAINER, "e")
        assert await output(agent.read_stdout, "e") == b"50000\n"

    ask(body)


def test_the_end_of_a_terminal_is_an_end_and_no_error(ask: Callable[[Body], None]) -> None:
    async def body(agent: AgentClient) -> None:
        await agent.exec_process(CONTAINER, "e", process("sh", "-c", "sleep 1; stty size", terminal=True))
        await agent.resize_terminal(CONTAINER, "e", 31, 97)
        assert await output(agent.read_stdout, "e") == b"31 97\r\n"
        assert await agent.wait_process(CONTAINER, "e") == 0

    ask(body)


REFUSED: dict[str, tuple[Callable[[AgentClient], Awaitable[object]], type[ShimError]]] = {
    "a program that is not there": (lambda a: a.exec_process(CONTAINER, "x", process("/none")), Internal),
    "an exec in no container": (lambda a: a.exec_process("none", "x", process("true")), Internal),
    "a signal to no exec": (lambda a: a.signal_process(CONTAINER, "none", 15), NotFound),
    "a wait for no container": (lambda a: a.wait_process("none", "none"), InvalidArgument),
    "statistics of no container": (lambda a: a.stats_container("none"), InvalidArgument),
    "removal of no container": (lambda a: a.remove_container("none", 5), Internal),
    "a larger volume": (lambda a: a.resize_volume("/", 1 << 30), Unimplemented),
    "a policy, without the feature": (lambda a: a.set_policy("package agent_policy"), NotFound),
}


def test_what_is_refused_has_these_codes_and_no_backtrace(ask: Callable[[Body], None]) -> None:
    async def body(agent: AgentClient) -> None:
        for what, (call, kind) in REFUSED.items():
            with pytest.raises(ShimError) as refused:
                await call(agent)
            assert type(refused.value) is kind, what
            assert "<unknown>" not in str(refused.value), what

    ask(body)


def test_a_killed_container_is_measured_and_removed(ask: Callable[[Body], None]) -> None:
    async def body(agent: AgentClient) -> None:
        await agent.pause_container(CONTAINER)
        await agent.resume_container(CONTAINER)
        await agent.update_container(CONTAINER, {"memory": {"limit": 100 << 20}})
        await agent.signal_process(CONTAINER, "", 9)
        assert await agent.wait_process(CONTAINER, CONTAINER) == 137
        assert (await agent.stats_container(CONTAINER)).memory.usage.limit_bytes == 100 << 20
        await agent.remove_container(CONTAINER, 10)
        await agent.destroy_sandbox()

    ask(body)


def test_what_docs_say_of_sizes_masks_and_sysctls_is_so(ask: Callable[[Body], None], ground: Path) -> None:
    """The table of docs/KATA_GUEST.md."""
    place = "/run/kata-containers/sandbox/ephemeral/cache"
    memory = Storage(
        driver="ephemeral",
        driver_options=(),
        source="tmpfs",
        fs_type="tmpfs",
        options=("size=3m",),
        mount_point=GuestPath(place),
    )

    async def body(agent: AgentClient) -> None:
        asked = container(
            ground,
            "other",
            (memory,),
            sysctl={"net.ipv4.no_such_setting": "1"},
            maskedPaths=["/proc/keys", "/proc/sys/kernel"],
        )
        asked.spec["mounts"].append({"destination": "/cache", "type": "bind", "source": place, "options": ["rbind"]})
        await agent.create_container(asked, 30)
        await agent.start_container("other")
        script = "grep ' /cache ' /proc/mounts; wc -c </proc/keys; ls /proc/sys/kernel"
        await agent.exec_process("other", "e", process("sh", "-c", script))
        said = (await output(agent.read_stdout, "e", "other")).decode()
        assert " /cache tmpfs " in said
        assert "size=3072k" not in said
        assert "\n0\n" in said
        assert "hostname" in said

    ask(body)
