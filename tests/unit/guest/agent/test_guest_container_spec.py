"""A container's spec holds inside, by the guest agent and real crun on this host."""

from __future__ import annotations

import signal

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent, refused, run, unused_id

from protos.agent import agent_pb2, oci_pb2
from pyshim.ttrpc import Code

pytestmark = pytest.mark.root


# -- what the spec says ----------------------------------------------------------------------------------------------


def test_environment_cwd_user_and_hostname_are_the_specs(hosted_agent: HostedAgent, client: AgentClient) -> None:
    user = oci_pb2.User(UID=1000, GID=1001, AdditionalGids=[7])
    script = "id -u; id -g; id -G; pwd; echo $COLOUR; hostname"

    code, out, _err = run(hosted_agent, client, script, User=user, Cwd="/tmp", Env=["PATH=/bin", "COLOUR=blue"])

    assert code == 0
    assert out.decode().splitlines() == ["1000", "1001", "1001 7", "/tmp", "blue", "guest-host"]


def test_a_specs_hostname_becomes_the_pods_unless_it_wishes_to_keep_the_guests(
    hosted_agent: HostedAgent, client: AgentClient
) -> None:
    def hostname_of(wanted: str, *kinds: str) -> str:
        name = unused_id()
        spec = hosted_agent.spec(["hostname"])
        spec.Hostname = wanted
        del spec.Linux.Namespaces[:]
        spec.Linux.Namespaces.extend(oci_pb2.LinuxNamespace(Type=kind) for kind in kinds)
        client.run(spec, name)
        return client.read_all(name).decode().strip()

    assert hostname_of("another", "mount", "uts") == "another"
    assert hostname_of("ignored", "mount") == "another"
    assert hostname_of("guest-host", "mount", "uts") == "guest-host"
    with pytest.raises(CallError, match="longer than 64 bytes"):
        hostname_of("h" * 65, "mount", "uts")


def test_a_device_that_the_specs_mounts_show_can_be_opened(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    spec = hosted_agent.spec(["sh", "-c", "exec 5</dev/f && echo opened"])
    spec.Mounts.append(oci_pb2.Mount(destination="/dev/f", type="bind", source="/dev/fuse", options=["bind"]))

    client.run(spec, cid)

    assert client.read_all(cid) == b"opened\n"


def test_string_user_is_looked_up_in_the_containers_files(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    user = agent_pb2.StringUser(uid="app", additionalGids=["extra", "12"])
    client.run(hosted_agent.spec(["sh", "-c", "id -u; id -G"]), cid, string_user=user)

    assert sorted(client.read_all(cid).split()) == [b"12", b"1234", b"4321", b"555"]


def test_a_spec_of_a_version_that_crun_does_not_know_runs(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    """containerd 2.0 writes 1.2.0 and its successors later ones, of which Debian 12's crun refuses each."""
    spec = hosted_agent.spec(["echo", "up"])
    spec.Version = "1.3.0"
    client.run(spec, cid)

    assert client.read_all(cid) == b"up\n"


@pytest.mark.parametrize(
    ("break_spec", "named"),
    [
        pytest.param(lambda spec: spec.ClearField("Process"), "no process", id="process"),
        pytest.param(lambda spec: spec.ClearField("Root"), "no root", id="root"),
        pytest.param(lambda spec: spec.ClearField("Linux"), "no linux", id="linux"),
        pytest.param(lambda spec: spec.Process.ClearField("Args"), "no args", id="args"),
        pytest.param(lambda spec: setattr(spec.Root, "Path", "rootfs"), "'rootfs' is not absolute", id="relative root"),
        pytest.param(lambda spec: setattr(spec.Root, "Path", "/nowhere"), "'/nowhere'", id="missing root"),
        pytest.param(lambda spec: spec.Process.Args.append("a\0b"), "NUL byte in process args", id="NUL"),
    ],
)
def test_a_malformed_spec_is_refused_by_name(
    hosted_agent: HostedAgent, client: AgentClient, cid: str, break_spec: object, named: str
) -> None:
    spec = hosted_agent.spec(["true"])
    break_spec(spec)  # type: ignore[operator]

    with refused(Code.INVALID_ARGUMENT, named):
        client.create(spec, cid)


@pytest.mark.parametrize("bad_id", ["", "..", "../x", "a/b", ".hidden", "a b", "a\nb", "x" * 2000])
def test_an_id_that_is_no_file_name_is_refused(hosted_agent: HostedAgent, client: AgentClient, bad_id: str) -> None:
    with refused(Code.INVALID_ARGUMENT):
        client.create(hosted_agent.spec(["true"]), bad_id)


# -- shared pid namespace --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_pause", [True, False], ids=["pause process", "first container"])
def test_containers_that_share_the_sandboxs_pids_see_each_other(own_agent: HostedAgent, has_pause: bool) -> None:
    client = own_agent.connect()
    client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", sandbox_pidns=has_pause))
    for name, script in (("one", "sleep 777"), ("two", "echo $$; ps")):
        client.run(own_agent.spec(["sh", "-c", script]), name, sandbox_pidns=True)
    client.run(own_agent.spec(["sh", "-c", "ps"]), "alone")

    shared, alone = client.read_all("two"), client.read_all("alone")

    assert b"sleep 777" in shared
    assert not shared.startswith(b"1\n")
    assert b"sleep 777" not in alone


def test_no_process_outlives_its_containers_init_in_a_shared_pid_namespace(own_agent: HostedAgent) -> None:
    client = own_agent.connect()
    client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", sandbox_pidns=True))
    client.run(own_agent.spec(["sh", "-c", "sleep 1000 & exit 3"]), "one", sandbox_pidns=True)

    assert client.exit_code("one") == 3
    assert client.read_all("one") == b"", "the output has ended with its last writer"


def test_a_container_joins_the_processes_of_the_container_that_its_spec_names(own_agent: HostedAgent) -> None:
    client = own_agent.connect()
    client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s"))
    for name, seconds in (("one", "777"), ("two", "888")):
        client.run(own_agent.spec(["sleep", seconds]), name)
    spec = own_agent.spec(["ps"])
    spec.Linux.Namespaces.append(oci_pb2.LinuxNamespace(Type="pid", Path="container:two"))
    client.run(spec, "debug", sandbox_pidns=True)

    seen = client.read_all("debug")

    assert b"sleep 888" in seen
    assert b"sleep 777" not in seen
    client.signal("two", signal.SIGKILL)
    client.exit_code("two")
    for target, named in (("two", "'two': it has exited"), ("three", "'three': no such container")):
        spec.Linux.Namespaces[-1].Path = f"container:{target}"
        with pytest.raises(CallError, match=named):
            client.create(spec, "late", sandbox_pidns=True)


def test_a_container_that_ends_leaves_the_shared_pid_namespace_alive(own_agent: HostedAgent) -> None:
    client = own_agent.connect()
    client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", sandbox_pidns=True))
    for name in ("one", "two"):
        client.run(own_agent.spec(["sleep", "777"]), name, sandbox_pidns=True)
    client.signal("one", signal.SIGKILL)

    assert client.exit_code("one") == 137
    client.execute("two", "still", ["sh", "-c", "exit 8"])
    assert client.exit_code("two", "still") == 8
