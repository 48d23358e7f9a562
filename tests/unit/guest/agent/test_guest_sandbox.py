"""The sandbox's side of a real guest agent on this host: storages, devices, files, the guest itself."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent

from protos.agent import agent_pb2, oci_pb2

pytestmark = pytest.mark.root

INVALID_ARGUMENT, DEADLINE_EXCEEDED, FAILED_PRECONDITION, UNIMPLEMENTED = 3, 4, 9, 12


def inside(agent: HostedAgent, path: str) -> Path:
    """A path of the agent's mount namespace, seen from here."""
    return Path(f"/proc/{agent.pid()}/root{path}")


def mounts_of(agent: HostedAgent) -> dict[str, tuple[str, str]]:
    lines = [line.split(" ") for line in Path(f"/proc/{agent.pid()}/mounts").read_text().splitlines()]
    return {fields[1]: (fields[2], fields[3]) for fields in lines}


# -- sandbox ---------------------------------------------------------------------------------------------------------


def test_a_second_create_sandbox_is_refused(client: AgentClient) -> None:
    with pytest.raises(CallError) as caught:
        client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="other"))

    assert caught.value.code == FAILED_PRECONDITION


def test_destroy_ends_the_containers_is_answered_and_then_the_agent_ends(tmp_path: Path) -> None:
    agent = HostedAgent(tmp_path)
    try:
        client = agent.connect()
        client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", sandbox_pidns=True))
        client.create(agent.spec(["sleep", "1000"]), "c")
        client.start("c")

        client.call("DestroySandbox", agent_pb2.DestroySandboxRequest())

        agent.process.wait(timeout=10)
        assert "sandbox destroyed" in agent.log()
    finally:
        agent.stop()


def test_create_sandbox_that_failed_can_be_sent_again(tmp_path: Path) -> None:
    agent = HostedAgent(tmp_path)
    try:
        client = agent.connect()
        bad = agent_pb2.Storage(driver="magic", mount_point="/run/x")
        with pytest.raises(CallError, match="unknown driver 'magic'"):
            client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", storages=[bad]))

        client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", hostname="again"))

        client.create(agent.spec(["hostname"]), "c")
        client.start("c")
        assert client.read_all("c") == b"again\n"
    finally:
        agent.stop()


def test_guest_hooks_run_around_a_container(tmp_path: Path) -> None:
    for kind in ("prestart", "poststop"):
        folder = tmp_path / "hooks" / kind
        folder.mkdir(parents=True)
        hook = folder / "10-note"
        hook.write_text(f'#!/bin/sh\necho "$0 $1" >> {tmp_path}/ran\n')
        hook.chmod(0o755)
        (folder / "20-not-executable").write_text("#!/bin/sh\nexit 1\n")
    agent = HostedAgent(tmp_path)
    try:
        client = agent.connect()
        request = agent_pb2.CreateSandboxRequest(sandbox_id="s", guest_hook_path=str(tmp_path / "hooks"))
        client.call("CreateSandbox", request)
        client.create(agent.spec(["true"]), "c")
        client.start("c")
        client.exit_code("c")
        client.remove("c")

        ran = (tmp_path / "ran").read_text()
        assert "prestart" in ran
        assert "poststop" in ran
    finally:
        agent.stop()


def test_a_hook_need_not_read_what_it_is_told(tmp_path: Path) -> None:
    """The state on its stdin, here more than a pipe holds. Whoever writes to it must outlive the reader."""
    folder = tmp_path / "hooks" / "poststop"
    folder.mkdir(parents=True)
    hook = folder / "deaf"
    hook.write_text(f"#!/bin/sh\nexec touch {tmp_path}/ran\n")
    hook.chmod(0o755)
    agent = HostedAgent(tmp_path)
    try:
        client = agent.connect()
        client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", guest_hook_path=str(folder.parent)))
        spec = agent.spec(["true"])
        spec.Annotations["long"] = "x" * 200_000
        client.create(spec, "c")
        client.start("c")
        client.exit_code("c")
        client.remove("c")

        assert (tmp_path / "ran").exists()
    finally:
        agent.stop()


def test_check_and_version_are_answered(client: AgentClient) -> None:
    assert client.call("Check").status == 1
    assert client.call("Version").agent_version


# -- storages --------------------------------------------------------------------------------------------------------


def test_a_containers_storages_are_mounted_for_it_and_gone_after_it(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    storages = [
        agent_pb2.Storage(
            driver="ephemeral", source="tmpfs", fstype="tmpfs", mount_point="/run/e", options=["size=1m"]
        ),
        agent_pb2.Storage(driver="local", source="local", fstype="local", mount_point="/run/l", options=["mode=0751"]),
    ]
    client.create(hosted_agent.spec(["sleep", "9"]), cid, storages=storages)

    mounts = mounts_of(hosted_agent)
    assert mounts["/run/e"][0] == "tmpfs"
    assert "size=1024k" in mounts["/run/e"][1]
    assert inside(hosted_agent, "/run/l").stat().st_mode & 0o7777 == 0o751

    client.remove(cid)
    assert "/run/e" not in mounts_of(hosted_agent)


def test_fsgid_gives_an_ephemeral_storage_its_group(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    storage = agent_pb2.Storage(
        driver="ephemeral", source="tmpfs", fstype="tmpfs", mount_point="/run/g", options=["fsgid=4711"]
    )

    client.create(hosted_agent.spec(["true"]), cid, storages=[storage])

    found = inside(hosted_agent, "/run/g").stat()
    assert (found.st_gid, found.st_mode & 0o2000) == (4711, 0o2000)


def test_a_storage_of_two_containers_goes_with_the_last(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    storage = agent_pb2.Storage(driver="ephemeral", source="tmpfs", fstype="tmpfs", mount_point="/run/two")
    first, second = cid, f"{cid}-other"
    for name in (first, second):
        client.create(hosted_agent.spec(["true"]), name, storages=[storage])

    client.remove(first)
    between = "/run/two" in mounts_of(hosted_agent)
    client.remove(second)

    assert between
    assert "/run/two" not in mounts_of(hosted_agent)


def test_a_shared_storage_stays_for_later_containers(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    storage = agent_pb2.Storage(
        driver="ephemeral", source="tmpfs", fstype="tmpfs", mount_point="/run/shared-one", shared=True
    )
    client.create(hosted_agent.spec(["true"]), cid, storages=[storage])

    client.remove(cid)

    assert "/run/shared-one" in mounts_of(hosted_agent)


def test_a_failed_create_takes_its_storages_back(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    storage = agent_pb2.Storage(driver="ephemeral", source="tmpfs", fstype="tmpfs", mount_point="/run/back")

    with pytest.raises(CallError):
        client.create(hosted_agent.spec(["/bin/nope"]), cid, storages=[storage])

    assert "/run/back" not in mounts_of(hosted_agent)


def test_a_bind_storage_can_be_a_read_only_file(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    source = hosted_agent.folder / "one-file"
    source.write_text("text")
    storage = agent_pb2.Storage(
        driver="bind", source=str(source), fstype="bind", mount_point="/run/files/one", options=["bind", "ro"]
    )

    client.create(hosted_agent.spec(["true"]), cid, storages=[storage])

    assert inside(hosted_agent, "/run/files/one").read_text() == "text"
    assert mounts_of(hosted_agent)["/run/files/one"][1].startswith("ro")


def test_overlay_with_a_guest_side_upper_makes_a_writable_root(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    root = f"/run/kata-containers/{cid}/rootfs"
    scratch = agent_pb2.Storage(driver="ephemeral", source="tmpfs", fstype="tmpfs", mount_point=f"/run/up-{cid}")
    overlay = agent_pb2.Storage(
        driver="overlayfs",
        source="overlay",
        fstype="overlay",
        mount_point=root,
        driver_options=[
            f"io.katacontainers.volume.overlayfs.create_directory=/run/up-{cid}/fs",
            f"io.katacontainers.volume.overlayfs.create_directory=/run/up-{cid}/work",
        ],
        options=[f"lowerdir={hosted_agent.root}", f"upperdir=/run/up-{cid}/fs", f"workdir=/run/up-{cid}/work"],
    )
    spec = hosted_agent.spec(["sh", "-c", "echo new > /file; cat /file"])
    spec.Root.Path = root
    client.create(spec, cid, storages=[scratch, overlay])
    client.start(cid)

    assert client.read_all(cid) == b"new\n"
    client.remove(cid)
    assert not (hosted_agent.root / "file").exists()
    assert root not in mounts_of(hosted_agent)


@pytest.mark.parametrize(
    ("storage", "named"),
    [
        (agent_pb2.Storage(driver="magic", mount_point="/run/x"), "unknown driver 'magic'"),
        (agent_pb2.Storage(driver="bind", source="/a", fstype="bind", mount_point="relative"), "'relative'"),
        (agent_pb2.Storage(driver="bind", source="/a", fstype="bind", mount_point="/"), "'/'"),
        (agent_pb2.Storage(driver="blk", source="zz/1", fstype="ext4", mount_point="/run/x"), "'zz/1'"),
        (agent_pb2.Storage(driver="scsi", source="1", fstype="ext4", mount_point="/run/x"), "'1'"),
        (agent_pb2.Storage(driver="virtio-fs", source="tag", mount_point="/run/x"), "no fstype"),
        (agent_pb2.Storage(driver="local", mount_point="/run/x1", options=["mode=9"]), "'mode=9'"),
    ],
    ids=lambda value: value.driver if isinstance(value, agent_pb2.Storage) else "",
)
def test_a_storage_that_cannot_be_meant_is_refused_by_name(
    hosted_agent: HostedAgent, client: AgentClient, cid: str, storage: agent_pb2.Storage, named: str
) -> None:
    with pytest.raises(CallError, match=named) as caught:
        client.create(hosted_agent.spec(["true"]), cid, storages=[storage])

    assert caught.value.code == INVALID_ARGUMENT


def test_a_disk_that_never_comes_is_named_after_the_hotplug_timeout_while_others_are_served(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    storage = agent_pb2.Storage(driver="blk", source="1e/1f", fstype="ext4", mount_point="/run/never")
    request = agent_pb2.CreateContainerRequest(container_id=cid, OCI=hosted_agent.spec(["true"]), storages=[storage])
    waiting = client.send("CreateContainer", request)

    assert client.call("Check").status == 1
    with pytest.raises(CallError, match="'1e/1f'") as caught:
        client.wait(waiting)

    assert caught.value.code == DEADLINE_EXCEEDED


def test_an_ephemeral_mount_is_resized_in_place(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    storage = agent_pb2.Storage(
        driver="ephemeral", source="tmpfs", fstype="tmpfs", mount_point="/run/grow", options=["size=1m"]
    )
    client.create(hosted_agent.spec(["true"]), cid, storages=[storage])
    inside(hosted_agent, "/run/grow/kept").write_text("x")
    storage.options[:] = ["size=2m"]

    client.call("UpdateEphemeralMounts", agent_pb2.UpdateEphemeralMountsRequest(storages=[storage]))

    assert "size=2048k" in mounts_of(hosted_agent)["/run/grow"][1]
    assert inside(hosted_agent, "/run/grow/kept").read_text() == "x"


def test_a_watched_directory_follows_its_source_by_whole_updates(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    source = hosted_agent.folder / f"config-{cid}"
    (source / "..1").mkdir(parents=True)
    (source / "..1/key").write_text("one")
    (source / "..data").symlink_to("..1")
    (source / "key").symlink_to("..data/key")
    storage = agent_pb2.Storage(
        driver="watchable-bind", source=str(source), fstype="bind", mount_point="/run/watched", options=["ro"]
    )
    client.create(hosted_agent.spec(["true"]), cid, storages=[storage])
    target = inside(hosted_agent, "/run/watched")
    first = (target / "key").read_text()

    (source / "..2").mkdir()
    (source / "..2/key").write_text("two")
    (source / "..new").symlink_to("..2")
    (source / "..new").rename(source / "..data")
    (source / "..1/key").unlink()
    (source / "..1").rmdir()
    for _ in range(100):
        if (target / "key").read_text() == "two" and not (target / "..1").exists():
            break
        time.sleep(0.1)

    assert first == "one"
    assert (target / "key").read_text() == "two"
    assert not (target / "..1").exists()
    client.remove(cid)
    assert "/run/watched" not in mounts_of(hosted_agent)


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
    with pytest.raises(CallError, match=named) as caught:
        client.create(hosted_agent.spec(["true"]), cid, devices=[device])

    assert caught.value.code == INVALID_ARGUMENT


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
        assert caught.value.code == INVALID_ARGUMENT
        assert repr(path) in caught.value.message


# -- the guest -------------------------------------------------------------------------------------------------------


def test_details_name_agent_handlers_and_init(client: AgentClient) -> None:
    details = client.call("GetGuestDetails", agent_pb2.GuestDetailsRequest(mem_block_size=True)).agent_details

    assert details.init_daemon
    assert details.supports_seccomp
    assert {"virtio-fs", "overlayfs", "ephemeral", "local", "blk"} <= set(details.storage_handlers)


def test_cpus_that_never_come_are_counted_in_the_error(client: AgentClient) -> None:
    present = len(os.sched_getaffinity(1))
    client.call("OnlineCPUMem", agent_pb2.OnlineCPUMemRequest(nb_cpus=1, cpu_only=True))

    with pytest.raises(CallError, match=f"online 4000 cpus: {present} are online") as caught:
        client.call("OnlineCPUMem", agent_pb2.OnlineCPUMemRequest(nb_cpus=4000, cpu_only=True))

    assert caught.value.code == DEADLINE_EXCEEDED


def test_metrics_are_prometheus_text(client: AgentClient) -> None:
    text = client.call("GetMetrics").metrics

    samples = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(float(line.rsplit(" ", 1)[1]) is not None for line in samples)
    assert any(line.startswith('kata_guest_meminfo{item="memtotal"}') for line in samples)
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
    [
        ("SetPolicy", agent_pb2.SetPolicyRequest(policy="x")),
        ("MemAgentMemcgSet", agent_pb2.MemAgentMemcgConfig()),
    ],
)
def test_what_this_agent_does_not_do_it_says(client: AgentClient, method: str, request_: Any) -> None:
    with pytest.raises(CallError) as caught:
        client.call(method, request_)

    assert caught.value.code == UNIMPLEMENTED


def test_the_termination_message_is_cut_at_4_kib(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    source = hosted_agent.folder / "termination"
    source.write_bytes(b"x" * 5000)
    spec = hosted_agent.spec(["true"])
    spec.Annotations["io.kubernetes.container.terminationMessagePath"] = "/dev/termination-log"
    spec.Mounts.append(
        oci_pb2.Mount(destination="/dev/termination-log", source=str(source), type="bind", options=["bind"])
    )
    client.create(spec, cid)

    request = agent_pb2.GetDiagnosticDataRequest(log_type="termination_log", container_id=cid)

    assert client.call("GetDiagnosticData", request).data == "x" * 4096


def test_an_oom_wait_is_given_up_with_its_connection_and_the_next_one_waits(
    hosted_agent: HostedAgent, client: AgentClient
) -> None:
    gone = hosted_agent.connect()
    gone.send("GetOOMEvent", agent_pb2.GetOOMEventRequest())
    gone.close()

    waiting = client.send("GetOOMEvent", agent_pb2.GetOOMEventRequest())

    assert not client.is_answered(waiting)
