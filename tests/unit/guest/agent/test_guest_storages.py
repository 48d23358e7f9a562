"""Storages of a real guest agent on this host: made, shared, resized, watched, refused and taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent, inside, refused, until

from protos.agent import agent_pb2
from pyshim.ttrpc import Code

pytestmark = pytest.mark.root


def mounts_of(agent: HostedAgent) -> dict[str, tuple[str, str]]:
    lines = [line.split(" ") for line in Path(f"/proc/{agent.pid()}/mounts").read_text().splitlines()]
    return {fields[1]: (fields[2], fields[3]) for fields in lines}


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
    client.run(spec, cid, storages=[scratch, overlay])

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
    with refused(Code.INVALID_ARGUMENT, named):
        client.create(hosted_agent.spec(["true"]), cid, storages=[storage])


def test_a_disk_that_never_comes_is_named_after_the_hotplug_timeout_while_others_are_served(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    storage = agent_pb2.Storage(driver="blk", source="1e/1f", fstype="ext4", mount_point="/run/never")
    request = agent_pb2.CreateContainerRequest(container_id=cid, OCI=hosted_agent.spec(["true"]), storages=[storage])
    waiting = client.send("CreateContainer", request)

    assert client.call("Check").status == 1
    with refused(Code.DEADLINE_EXCEEDED, "'1e/1f'"):
        client.wait(waiting)


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


def test_watched_volumes_can_be_where_kata_wants_them(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    """In a directory of the share, which the guest cannot write: kata-agent mounts a file system of its own there."""
    watchable = "/run/kata-containers/shared/containers/watchable"
    storages = []
    for number in range(2):
        source = hosted_agent.folder / f"config-{cid}-{number}"
        source.mkdir()
        (source / "key").write_text(f"value {number}")
        target = f"{watchable}/{cid}-{number}"
        storages.append(agent_pb2.Storage(driver="watchable-bind", source=str(source), mount_point=target))

    client.create(hosted_agent.spec(["true"]), cid, storages=storages)

    assert mounts_of(hosted_agent)[watchable][0] == "tmpfs"
    found = [inside(hosted_agent, f"{storage.mount_point}/key").read_text() for storage in storages]
    assert found == ["value 0", "value 1"]
    client.remove(cid)
    assert list(inside(hosted_agent, watchable).iterdir()) == []


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

    assert first == "one"
    until(lambda: (target / "key").read_text() == "two", "the new content has not come")
    until(lambda: not (target / "..1").exists(), "the old files have not gone")
    client.remove(cid)
    assert "/run/watched" not in mounts_of(hosted_agent)
