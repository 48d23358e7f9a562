"""The daemon: which callers it accepts, when it ends, and what it serves."""

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path

import msgspec
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

import pyshim.serve
from protos.containerd import sandbox_pb2
from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.host_facts import HostFacts
from pyshim.model.ids import HostPath
from pyshim.model.task import Identity, RuntimeOptions
from pyshim.serve import check_peer
from pyshim.task.publisher import EventPublisher
from pyshim.task.sandbox_service import SANDBOX_SERVICE
from pyshim.ttrpc import Client, RemoteError
from tests.unit.monitor.monitored import FakePod, said


def test_a_peer_of_our_own_user_and_group_is_accepted() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        check_peer(ours)


@pytest.mark.parametrize("of_ours", ["geteuid", "getegid"])
def test_a_peer_of_another_user_or_group_is_refused(of_ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    another = getattr(os, of_ours)() + 1
    monkeypatch.setattr(os, of_ours, lambda: another)

    with ours, theirs, pytest.raises(PermissionError, match=f"pid {os.getpid()}: uid .* is not ours"):
        check_peer(ours)


def daemon_in(directory: Path) -> tuple[pyshim.serve._Daemon, socket.socket]:
    """A daemon and the socket it is to serve."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "shim.sock"))
    listener.listen()
    identity = Identity(
        namespace="default",
        sandbox_id="demo",
        containerd_ttrpc_address=str(directory / "unused"),
        bundle=HostPath(str(directory)),
        debug=False,
    )
    return pyshim.serve._Daemon(identity, made_by="exec"), listener


async def _containerd(directory: Path) -> Client:
    ours = socket.socket(socket.AF_UNIX)
    ours.connect(str(directory / "shim.sock"))
    ours.setblocking(False)
    return Client(ours)


def _bundle(directory: Path) -> str:
    (directory / "demo").mkdir()
    return str(directory / "demo")


@pytest.mark.parametrize(
    ("connects", "leaves"),
    [(False, False), (True, True), (True, False)],
    ids=["never connected", "connected, then left", "connected"],
)
async def test_a_daemon_with_neither_container_nor_call_ends(
    connects: bool, leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """containerd died, gave up a Create and could not clean up after it, or forgot the sandbox while it was down."""
    monkeypatch.setattr(pyshim.serve, "LEFT_S" if leaves else "IDLE_S", 0.05)  # one of them: the other is a minute
    daemon, listener = daemon_in(tmp_path)

    end = asyncio.create_task(daemon.run(listener))
    with socket.socket(socket.AF_UNIX) as containerd:
        if connects:
            containerd.connect(str(tmp_path / "shim.sock"))
        if leaves:
            containerd.close()
        await asyncio.wait_for(end, 30)

    assert not (tmp_path / "shim.sock").exists()


async def test_a_created_sandbox_waits_for_its_start_as_long_as_containerd_is_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between CreateSandbox and StartSandbox containerd may pull an image, which takes its time."""
    monkeypatch.setattr(pyshim.serve, "IDLE_S", 0.05)
    daemon, listener = daemon_in(tmp_path)
    options = AnyMessage(type_url="runtime.v1.PodSandboxConfig")
    request = sandbox_pb2.CreateSandboxRequest(sandbox_id="demo", bundle_path=_bundle(tmp_path), options=options)

    end = asyncio.create_task(daemon.run(listener))
    containerd = await _containerd(tmp_path)
    await containerd.call(SANDBOX_SERVICE, "CreateSandbox", request.SerializeToString(), timeout_s=10)
    await asyncio.sleep(0.3)
    assert not end.done()
    containerd.close()

    await asyncio.wait_for(end, 30)


async def test_the_connection_stays_until_containerd_closes_it_after_a_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """containerd's client may take the connection's end for the answer, and RemovePodSandbox then fails."""
    monkeypatch.setattr(pyshim.serve, "LAST_REPLY_S", 60.0)
    daemon, listener = daemon_in(tmp_path)
    request = sandbox_pb2.ShutdownSandboxRequest(sandbox_id="demo").SerializeToString()

    end = asyncio.create_task(daemon.run(listener))
    containerd = await _containerd(tmp_path)
    await containerd.call(SANDBOX_SERVICE, "ShutdownSandbox", request, timeout_s=10)
    await asyncio.sleep(0.05)
    assert not end.done()
    containerd.close()

    await asyncio.wait_for(end, 30)


@pytest.mark.parametrize("created", [True, False], ids=["created", "refused"])
async def test_a_shutdown_of_a_sandbox_that_was_never_started_ends_the_daemon(created: bool, tmp_path: Path) -> None:
    """Also while containerd keeps its connection."""
    daemon, listener = daemon_in(tmp_path)
    options = AnyMessage(type_url="runtime.v1.PodSandboxConfig" if created else "")
    create = sandbox_pb2.CreateSandboxRequest(sandbox_id="demo", bundle_path=_bundle(tmp_path), options=options)
    request = sandbox_pb2.ShutdownSandboxRequest(sandbox_id="demo").SerializeToString()

    end = asyncio.create_task(daemon.run(listener))
    containerd = await _containerd(tmp_path)
    with contextlib.nullcontext() if created else pytest.raises(RemoteError, match="neither options of type"):
        await containerd.call(SANDBOX_SERVICE, "CreateSandbox", create.SerializeToString(), timeout_s=10)
    await containerd.call(SANDBOX_SERVICE, "ShutdownSandbox", request, timeout_s=10)
    await asyncio.wait_for(end, 30)

    containerd.close()
    assert not (tmp_path / "shim.sock").exists()


def test_a_daemon_that_fails_before_it_serves_leaves_no_socket_to_wait_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> HostFacts:
        raise OSError("this host cannot be probed")

    monkeypatch.setattr(pyshim.serve, "probe_host", broken)
    path = tmp_path / "shim.sock"
    daemon, listener = daemon_in(tmp_path)

    with listener, pytest.raises(OSError, match="cannot be probed"):
        asyncio.run(daemon.run(listener))

    assert not path.exists()


@pytest.mark.parametrize(("debug", "status"), [(True, 200), (False, 404)], ids=["enabled", "not enabled"])
def test_the_monitor_socket_tells_what_the_daemon_does_where_that_is_enabled(
    debug: bool, status: int, tmp_path: Path
) -> None:
    daemon, listener = daemon_in(tmp_path)
    publisher = EventPublisher(address=str(tmp_path / "unused"), namespace="default")
    path = str(tmp_path / "shim-monitor.sock")

    async def ask() -> list[tuple[int, bytes]]:
        environment = daemon._environment(publisher, listener.getsockname())
        daemon._calls.open_calls = lambda: iter(["Wait c1 - for 1.0 s"])  # type: ignore[method-assign]
        close = await environment.serve_monitor(path, f"{tmp_path}/metrics/s1", FakePod(), debug=debug)
        try:
            modes = [stat.S_IMODE(os.stat(each).st_mode) for each in (path, f"{tmp_path}/metrics/s1")]
            assert modes == [0, 0o660], "for root with its capabilities, and for the directory's group"
            os.chmod(path, 0o600)  # this test's user need not be root
            words = (f"GET /debug/{name} HTTP/1.1\r\n\r\n".encode() for name in ("stacks", "objects"))
            return [await said(path, each) for each in words]
        finally:
            await close()

    with listener:
        (stacks_status, stacks), (objects_status, objects) = asyncio.run(ask())

    assert stacks_status == objects_status == status
    assert (b"request Wait c1 - for 1.0 s\n" in stacks) is debug
    assert (b"builtins.function\n" in objects) is debug


def test_the_log_names_what_others_can_change_of_a_pods_programs_and_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["path", "kernel", "image", "initrd", "firmware", "virtio_fs_daemon", "vhost_user_vsock_daemon"]
    for name in (*names, "config.toml", "extension"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o666)
    config = build_config(Source(path=f"{tmp_path}/config.toml", directory="/", document={}))
    machine = msgspec.structs.replace(config.hypervisor, **{name: str(tmp_path / name) for name in names})
    machine = msgspec.structs.replace(machine, guest_extension_images=({"name": "x", "path": f"{tmp_path}/extension"},))

    pyshim.serve._warn_of_writers("x", pyshim.serve._booted(msgspec.structs.replace(config, hypervisor=machine)))

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    places = vars(record)["places"].split(", ")
    assert places == [f"'{tmp_path}/{name}' by everyone" for name in ("config.toml", *names, "extension")]


async def test_a_daemon_looks_who_can_change_its_code_and_its_pods_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pyshim.serve, "IDLE_S", 0.05)
    code, configuration = tmp_path / "code", tmp_path / "config.toml"
    code.touch()
    configuration.write_text("[hypervisor.qemu]\n[runtime]\nconfine_shim = false\n")
    code.chmod(0o666)
    configuration.chmod(0o666)
    monkeypatch.setattr(pyshim.serve, "code_paths", lambda: (str(code),))
    daemon, listener = daemon_in(tmp_path)

    publisher = EventPublisher(address=str(tmp_path / "unused"), namespace="default")
    environment = daemon._environment(publisher, listener.getsockname())
    await environment.load_config(RuntimeOptions(config_path=str(configuration), config_body=b""), {})
    await daemon.run(listener)

    warnings = [vars(record) for record in caplog.records if "places" in vars(record)]
    assert [each["msg"] for each in warnings] == [
        "others can change what this pod is made from",
        "others can change the shim's code",
    ]
    assert f"'{configuration}' by everyone" in warnings[0]["places"]
    assert warnings[1]["places"] == f"'{code}' by everyone"


def test_the_log_says_nothing_of_what_root_alone_can_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pyshim.serve._warn_of_writers("x", [str(tmp_path)])

    assert not caplog.records
