"""A pod whose guest shares no files: what it gets first, what the host makes for it, and what it does not make."""

from __future__ import annotations

import asyncio
import stat
from typing import Any

import pytest

from pyshim.model.errors import ShimError
from pyshim.model.volumes import SourceFacts, SourceKind, TreeEntry
from pyshim.resources.confidential.plan.initdata import disk_image, encode, parse
from pyshim.ttrpc import Code

from .conftest import DOCUMENT, Stack, until

POLICY = "package agent_policy\n"
INITDATA = parse(b'version = "0.1.0"\nalgorithm = "sha256"\n', "test")
NAMED = {"io.kubernetes.cri.image-name": "docker.io/library/busybox:1"}


def unshared(stack: Stack, *, policy: str = "", initdata: str = "") -> None:
    qemu = {**DOCUMENT["hypervisor"]["qemu"], "shared_fs": "none", "initdata": initdata}
    stack.document = {
        "hypervisor": {"qemu": qemu},
        "agent": {"kata": {"policy": policy}},
        "runtime": {"experimental_force_guest_pull": True},
    }


def volume(stack: Stack, source: str, text: str) -> dict[str, Any]:
    """A file of the host, as a bind mount of the spec."""
    entry = TreeEntry(path="", mode=stat.S_IFREG | 0o644, uid=0, gid=0, size_bytes=len(text), target="", changed_ns=0)
    stack.host.sources[source] = SourceFacts(kind=SourceKind.FILE)
    stack.host.trees[source] = [entry]
    stack.host.files[f"{source}"] = text.encode()
    return {"type": "bind", "source": source, "destination": "/file", "options": ["rbind", "ro"]}


async def test_the_policy_is_set_before_any_other_call_of_the_agent(stack: Stack) -> None:
    unshared(stack, policy=POLICY)

    await stack.create("c1", ["exit", "0"], annotations=NAMED)

    asked = [call for call in stack.agent.calls if call not in ("Check", "GetOOMEvent")]
    assert asked[0] == "SetPolicy"
    assert stack.agent.policy == POLICY


async def test_a_policy_the_agent_refuses_ends_the_pods_start(stack: Stack) -> None:
    unshared(stack, policy=POLICY)
    stack.agent.failures["SetPolicy"] = (int(Code.INVALID_ARGUMENT), "no rego")

    with pytest.raises(ShimError, match="set policy in guest: no rego"):
        await stack.create("c1", ["exit", "0"], annotations=NAMED)

    assert "CreateSandbox" not in stack.agent.calls


async def test_the_initdata_disk_is_there_before_the_vm(stack: Stack) -> None:
    unshared(stack, initdata=encode(INITDATA))

    await stack.create("c1", ["exit", "0"], annotations=NAMED)

    (path,) = [path for path in stack.host.files if path.endswith("/initdata.img")]
    assert path == "/run/vc/vm/c1/initdata.img"
    assert stack.host.files[path] == disk_image(INITDATA)


async def test_nothing_is_shared_and_volumes_are_copied_before_the_container_is_made(stack: Stack) -> None:
    unshared(stack)

    await stack.create("c1", ["exit", "0"], annotations=NAMED, mounts=[volume(stack, "/etc/app.conf", "x = 1")])

    assert (stack.host.mounts, stack.host.daemons) == ([], set())
    calls = stack.agent.calls
    assert calls.index("CopyFile") < calls.index("CreateContainer")
    (piece,) = stack.agent.copied
    assert piece.data == b"x = 1"
    request = stack.agent.containers["c1"]
    assert [mount.source for mount in request.OCI.Mounts] == [piece.path]
    assert [storage.driver for storage in request.storages] == ["image_guest_pull"]
    assert stack.agent.sandbox is not None
    assert [storage.driver for storage in stack.agent.sandbox.storages] == ["ephemeral"]


MESSAGE = {**NAMED, "io.kubernetes.container.terminationMessagePath": "/file"}


def message_file(stack: Stack) -> list[dict[str, Any]]:
    """A file for the termination message, as a writable mount; one of the bundle, which the caller removes."""
    return [{**volume(stack, "/bundles/c1/message", ""), "options": ["rbind", "rw"]}]


async def test_the_termination_message_is_in_the_kubelets_file_before_the_exit_is_seen(stack: Stack) -> None:
    unshared(stack)
    stack.agent.termination_messages["c1"] = "it broke: \N{SNOWMAN}"
    container = await stack.create("c1", ["exit", "3"], annotations=MESSAGE, mounts=message_file(stack))
    reply = stack.agent.late["GetDiagnosticData"] = asyncio.Event()

    await stack.pod.start(container, None)
    await until(lambda: "GetDiagnosticData" in stack.agent.calls)
    before = stack.pod.state(container, None).exit
    reply.set()
    exit_status = await stack.pod.wait(container, None)

    assert (before, exit_status.status) == (None, 3)
    assert stack.host.files["/bundles/c1/message"].decode() == "it broke: \N{SNOWMAN}"


@pytest.mark.parametrize("fault", ["unimplemented", "no message", "full disk"])
async def test_an_exit_is_reported_without_its_termination_message(stack: Stack, fault: str) -> None:
    unshared(stack)
    stack.agent.termination_messages["c1"] = "" if fault == "no message" else "text"
    if fault == "unimplemented":  # kata-agent before 3.29
        stack.agent.failures["GetDiagnosticData"] = (int(Code.UNIMPLEMENTED), "no such method")
    container = await stack.create("c1", ["exit", "3"], annotations=MESSAGE, mounts=message_file(stack))
    if fault == "full disk":
        stack.host.faults.plan({"write_bytes": 1})

    await stack.pod.start(container, None)

    assert (await stack.pod.wait(container, None)).status == 3
    assert stack.host.files["/bundles/c1/message"] == b""


async def test_a_pod_that_shares_files_is_not_asked_for_termination_messages(stack: Stack) -> None:
    container = await stack.run("c1", ["exit", "3"], annotations=MESSAGE, mounts=message_file(stack))

    await stack.pod.wait(container, None)

    assert "GetDiagnosticData" not in stack.agent.calls


async def test_a_copy_that_fails_is_named_and_leaves_nothing(stack: Stack) -> None:
    unshared(stack)
    stack.agent.failures["CopyFile"] = (int(Code.RESOURCE_EXHAUSTED), "no room")

    with pytest.raises(ShimError, match=r"copy '/run/kata-containers/shared/containers/copy-.*-app\.conf'.*no room"):
        await stack.create("c1", ["exit", "0"], annotations=NAMED, mounts=[volume(stack, "/etc/app.conf", "x = 1")])

    assert "CreateContainer" not in stack.agent.calls


async def test_a_sandbox_container_that_enters_the_guest_has_its_files_copied_too(stack: Stack) -> None:
    unshared(stack)
    kubernetes = "io.kubernetes.cri"
    sandbox = {f"{kubernetes}.container-type": "sandbox", f"{kubernetes}.sandbox-id": "c1"}
    member = {**NAMED, f"{kubernetes}.container-type": "container", f"{kubernetes}.sandbox-id": "c1"}
    shared = {"namespaces": [{"type": "pid", "path": "/proc/1/ns/pid"}]}
    mounts = [volume(stack, "/etc/resolv.conf", "nameserver ::1")]
    await stack.run("c1", ["sleep"], annotations=sandbox, mounts=mounts)

    await stack.create("c2", ["exit", "0"], annotations=member, linux=shared)

    request = stack.agent.containers["c1"]
    assert [storage.source for storage in request.storages] == ["pause"]
    assert [piece.path for piece in stack.agent.copied] == [mount.source for mount in request.OCI.Mounts]
