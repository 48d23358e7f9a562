"""The sandbox's side of a real guest agent on this host: its own calls, devices, copied files, the guest itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from guest_agent_client import PATIENCE_S, AgentClient, CallError, HostedAgent, inside, refused

from protos.agent import agent_pb2, oci_pb2
from pyshim.ttrpc import Code

pytestmark = pytest.mark.root


# -- sandbox ---------------------------------------------------------------------------------------------------------


def test_a_second_create_sandbox_is_refused(client: AgentClient) -> None:
    with refused(Code.FAILED_PRECONDITION):
        client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="other"))


def test_destroy_ends_the_containers_is_answered_and_then_the_agent_ends(own_agent: HostedAgent) -> None:
    client = own_agent.connect()
    client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", sandbox_pidns=True))
    client.run(own_agent.spec(["sleep", "1000"]), "c")

    client.call("DestroySandbox", agent_pb2.DestroySandboxRequest())

    own_agent.process.wait(timeout=PATIENCE_S)
    assert "sandbox destroyed" in own_agent.log()


def test_create_sandbox_that_failed_can_be_sent_again(own_agent: HostedAgent) -> None:
    client = own_agent.connect()
    bad = agent_pb2.Storage(driver="magic", mount_point="/run/x")
    with pytest.raises(CallError, match="unknown driver 'magic'"):
        client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", storages=[bad]))

    client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", hostname="again"))

    client.run(own_agent.spec(["hostname"]), "c")
    assert client.read_all("c") == b"again\n"


def test_guest_hooks_run_around_a_container(tmp_path: Path, own_agent: HostedAgent) -> None:
    for kind in ("prestart", "poststop"):
        folder = tmp_path / "hooks" / kind
        folder.mkdir(parents=True)
        hook = folder / "10-note"
        # It reads the state: the crun that creates fails when a hook has ended before it was written.
        hook.write_text(f'#!/bin/sh\ncat > /dev/null\necho "$0 $1" >> {tmp_path}/ran\n')
        hook.chmod(0o755)
        (folder / "20-not-executable").write_text("#!/bin/sh\nexit 1\n")
    client = own_agent.connect()
    request = agent_pb2.CreateSandboxRequest(sandbox_id="s", guest_hook_path=str(tmp_path / "hooks"))
    client.call("CreateSandbox", request)
    client.run(own_agent.spec(["true"]), "c")
    client.exit_code("c")
    client.remove("c")

    ran = (tmp_path / "ran").read_text()
    assert "prestart" in ran
    assert "poststop" in ran


def test_a_hook_need_not_read_its_stdin(tmp_path: Path, own_agent: HostedAgent) -> None:
    """The state on its stdin, here more than a pipe holds. The writer must outlive the reader."""
    folder = tmp_path / "hooks" / "poststop"
    folder.mkdir(parents=True)
    hook = folder / "deaf"
    hook.write_text(f"#!/bin/sh\nexec touch {tmp_path}/ran\n")
    hook.chmod(0o755)
    client = own_agent.connect()
    client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", guest_hook_path=str(folder.parent)))
    spec = own_agent.spec(["true"])
    spec.Annotations["long"] = "x" * 200_000
    client.run(spec, "c")
    client.exit_code("c")
    client.remove("c")

    assert (tmp_path / "ran").exists()


def test_check_and_version_are_answered(client: AgentClient) -> None:
    assert client.call("Check").status == 1
    assert client.call("Version").agent_version


# -- devices ---------------------------------------------------------------------------------------------------------


def test_a_device_gets_the_guests_numbers(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    spec = hosted_agent.spec(["sh", "-c", "head -c 3 /dev/given | wc -c"])
    spec.Linux.Devices.append(oci_pb2.LinuxDevice(Path="/dev/given", Type="b", Major=99, Minor=7, FileMode=0o666))
    (hosted_agent.folder / "node").unlink(missing_ok=True)
    os.mknod(hosted_agent.folder / "node", 0o600 | 0o060000, os.makedev(7, 250))
    device = agent_pb2.Device(
        id="x", type="mmioblk", vm_path=f"/dev/../{hosted_agent.folder}/node", container_path="/dev/given"
    )

    client.create(spec, cid, devices=[device])

    config = json.loads(inside(hosted_agent, f"/run/kata-containers/{cid}/config.json").read_text())
    devices = {one["path"]: (one["type"], one["major"], one["minor"]) for one in config["linux"]["devices"]}
    assert devices["/dev/given"] == ("b", 7, 250)


@pytest.mark.parametrize(
    ("device", "named"),
    [
        (agent_pb2.Device(id="1", type="vfio-ap", container_path="/dev/x"), "unknown type 'vfio-ap'"),
        (agent_pb2.Device(id="1", type="vfio-pci", container_path="/dev/x"), "no function is named in its options"),
        (agent_pb2.Device(id="1", type="vfio-pci-gk", container_path="/dev/x", options=["00:1.0"]), "not ADDRESS=PATH"),
        (agent_pb2.Device(id="1", type="vfio-pci-gk", container_path="/dev/x", options=["1=02"]), "PCI address '1'"),
        (agent_pb2.Device(id="1", type="vfio-pci-gk", container_path="/x", options=["0:1.0=zz"]), "PCI path 'zz'"),
        (agent_pb2.Device(id="1", type="blk", container_path="dev/x"), "'dev/x' is not absolute"),
        (agent_pb2.Device(type="blk", container_path="/dev/x"), "neither id nor vm_path"),
    ],
    ids=["type", "no function", "no path", "address", "PCI path", "path", "no id"],
)
def test_a_device_that_cannot_be_meant_is_refused(
    hosted_agent: HostedAgent, client: AgentClient, cid: str, device: agent_pb2.Device, named: str
) -> None:
    with refused(Code.INVALID_ARGUMENT, named):
        client.create(hosted_agent.spec(["true"]), cid, devices=[device])


# -- copied files ----------------------------------------------------------------------------------------------------

SHARED = "/run/kata-containers/shared/containers"


def test_a_file_appears_whole_after_its_last_chunk(hosted_agent: HostedAgent, client: AgentClient) -> None:
    path = f"{SHARED}/deep/er/file"
    fields: dict[str, Any] = {
        "path": path,
        "file_size": 6,
        "file_mode": 0o100640,
        "dir_mode": 0o755,
        "uid": 5,
        "gid": 6,
    }

    client.call("CopyFile", agent_pb2.CopyFileRequest(**fields, offset=0, data=b"abc"))
    halfway = inside(hosted_agent, path).exists()
    client.call("CopyFile", agent_pb2.CopyFileRequest(**fields, offset=3, data=b"def"))

    found = inside(hosted_agent, path)
    assert not halfway
    assert found.read_bytes() == b"abcdef"
    assert (found.stat().st_mode, found.stat().st_uid, found.stat().st_gid) == (0o100640, 5, 6)
    assert [one.name for one in found.parent.iterdir()] == ["file"]


def test_a_path_outside_the_share_is_refused_by_name(client: AgentClient) -> None:
    for path in ("/etc/passwd", f"{SHARED}/../../../etc/x", SHARED, f"{SHARED}x/y", "relative", ""):
        with pytest.raises(CallError) as caught:
            client.call("CopyFile", agent_pb2.CopyFileRequest(path=path, file_mode=0o100600))
        assert caught.value.code == Code.INVALID_ARGUMENT
        assert repr(path) in caught.value.message


# -- the guest -------------------------------------------------------------------------------------------------------


def test_details_name_agent_handlers_and_init(client: AgentClient) -> None:
    details = client.call("GetGuestDetails", agent_pb2.GuestDetailsRequest(mem_block_size=True)).agent_details

    assert details.init_daemon
    assert details.supports_seccomp
    assert {"virtio-fs", "overlayfs", "ephemeral", "local", "blk"} <= set(details.storage_handlers)


def test_more_cpus_than_the_kernel_takes_are_refused_at_once_with_their_number(client: AgentClient) -> None:
    """Waiting for a CPU that was plugged is seen in a VM, by integration/test_resizing.py."""
    client.call("OnlineCPUMem", agent_pb2.OnlineCPUMemRequest(nb_cpus=1, cpu_only=True))

    with refused(Code.FAILED_PRECONDITION, r"online 4000000 cpus: the guest's kernel takes \d+ on this machine"):
        client.call("OnlineCPUMem", agent_pb2.OnlineCPUMemRequest(nb_cpus=4_000_000, cpu_only=True))


def test_metrics_are_prometheus_text(client: AgentClient) -> None:
    text = client.call("GetMetrics").metrics

    samples = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(float(line.rsplit(" ", 1)[1]) is not None for line in samples)
    assert any(line.startswith('kata_guest_meminfo{item="mem_total"}') for line in samples)
    assert any(line.startswith("kata_agent_total_rss ") for line in samples)


def test_volume_statistics_are_the_file_systems(hosted_agent: HostedAgent, client: AgentClient) -> None:
    reply_bytes = client.wait(client.send("GetVolumeStats", agent_pb2.VolumeStatsRequest(volume_guest_path="/run")))
    reply = agent_pb2.VolumeStatsResponse.FromString(reply_bytes)

    found = os.statvfs(inside(hosted_agent, "/run"))
    assert reply.usage[0].total == found.f_blocks * found.f_frsize
    assert reply.usage[1].total == found.f_files
    assert [one.unit for one in reply.usage] == [1, 2]


@pytest.mark.parametrize(
    ("method", "request_"),
    [("SetPolicy", agent_pb2.SetPolicyRequest(policy="x")), ("MemAgentMemcgSet", agent_pb2.MemAgentMemcgConfig())],
)
def test_what_this_agent_does_not_do_it_says(client: AgentClient, method: str, request_: Any) -> None:
    with refused(Code.UNIMPLEMENTED):
        client.call(method, request_)


def test_an_oom_wait_is_given_up_with_its_connection_and_the_next_one_waits(
    hosted_agent: HostedAgent, client: AgentClient
) -> None:
    gone = hosted_agent.connect()
    gone.send("GetOOMEvent", agent_pb2.GetOOMEventRequest())
    gone.close()

    waiting = client.send("GetOOMEvent", agent_pb2.GetOOMEventRequest())

    assert not client.is_answered(waiting)
