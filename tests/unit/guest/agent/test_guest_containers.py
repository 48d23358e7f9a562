"""The guest agent runs real containers on this host through its own API, with real crun."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from pathlib import Path

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent

from protos.agent import agent_pb2, oci_pb2

pytestmark = pytest.mark.root

_names = (f"c{number}" for number in itertools.count())

NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION, INVALID_ARGUMENT, INTERNAL = 5, 6, 9, 3, 13
DEADLINE_EXCEEDED, UNIMPLEMENTED = 4, 12


@pytest.fixture
def cid(client: AgentClient) -> str:
    return next(_names)


@pytest.fixture
def sleeper(hosted_agent: HostedAgent, client: AgentClient) -> str:
    """A running container that does nothing until it is killed."""
    name = next(_names)
    client.create(hosted_agent.spec(["sleep", "1000"]), name)
    client.start(name)
    return name


def run(agent: HostedAgent, client: AgentClient, script: str, **process: object) -> tuple[int, bytes, bytes]:
    name = next(_names)
    client.create(agent.spec(["sh", "-c", script], **process), name)
    client.start(name)
    result = client.exit_code(name), client.read_all(name), client.read_all(name, method="ReadStderr")
    client.remove(name)
    return result


# -- life ------------------------------------------------------------------------------------------------------------


def test_output_and_exit_code_of_init_arrive(hosted_agent: HostedAgent, client: AgentClient) -> None:
    assert run(hosted_agent, client, "echo out; echo err >&2; exit 7") == (7, b"out\n", b"err\n")


@pytest.mark.parametrize("code", [0, 1, 2, 126, 127, 128, 255])
def test_exit_status_is_the_programs(hosted_agent: HostedAgent, client: AgentClient, code: int) -> None:
    assert run(hosted_agent, client, f"exit {code}")[0] == code


def test_init_does_not_run_before_start(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.create(hosted_agent.spec(["sh", "-c", "echo begun"]), cid)
    pending = client.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=cid, len=10))

    before = client.is_answered(pending)
    client.start(cid)

    assert not before
    assert agent_pb2.ReadStreamResponse.FromString(client.wait(pending)).data == b"begun\n"


def test_create_fails_with_cruns_words_when_the_program_is_missing(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    with pytest.raises(CallError, match="executable file `/bin/nope` not found") as caught:
        client.create(hosted_agent.spec(["/bin/nope"]), cid)

    assert caught.value.code == INTERNAL


def test_a_failed_create_leaves_nothing_so_the_id_can_be_used_again(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    with pytest.raises(CallError):
        client.create(hosted_agent.spec(["/bin/nope"]), cid)

    client.create(hosted_agent.spec(["sh", "-c", "exit 3"]), cid)
    client.start(cid)
    assert client.exit_code(cid) == 3


def test_a_cgroup_left_by_a_killed_namesake_does_not_matter(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    leftover = hosted_agent.cgroup / cid
    leftover.mkdir()
    (leftover / "cgroup.kill").write_text("1")

    client.create(hosted_agent.spec(["sh", "-c", "exit 3"]), cid)
    client.start(cid)

    assert client.exit_code(cid) == 3


def test_creating_an_id_twice_is_refused_and_the_first_lives_on(
    hosted_agent: HostedAgent, client: AgentClient, sleeper: str
) -> None:
    with pytest.raises(CallError) as caught:
        client.create(hosted_agent.spec(["sleep", "1"]), sleeper)

    client.execute(sleeper, "alive", ["sh", "-c", "exit 0"])
    assert caught.value.code == ALREADY_EXISTS
    assert client.exit_code(sleeper, "alive") == 0


def test_create_of_one_id_sent_twice_at_once_makes_one_container(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    request = agent_pb2.CreateContainerRequest(container_id=cid, OCI=hosted_agent.spec(["sleep", "1000"]))
    first, second = client.send("CreateContainer", request), client.send("CreateContainer", request)

    client.wait(first)
    with pytest.raises(CallError) as caught:
        client.wait(second)

    assert caught.value.code == ALREADY_EXISTS


def test_starting_twice_is_refused(client: AgentClient, sleeper: str) -> None:
    with pytest.raises(CallError) as caught:
        client.start(sleeper)

    assert caught.value.code == FAILED_PRECONDITION


def test_remove_kills_what_runs_and_pending_calls_end(
    hosted_agent: HostedAgent, client: AgentClient, sleeper: str
) -> None:
    waiting = client.send("WaitProcess", agent_pb2.WaitProcessRequest(container_id=sleeper))
    reading = client.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=sleeper, len=10))

    client.remove(sleeper)

    assert agent_pb2.WaitProcessResponse.FromString(client.wait(waiting)).status == 128 + signal.SIGKILL
    assert agent_pb2.ReadStreamResponse.FromString(client.wait(reading)).data == b""
    with pytest.raises(CallError) as caught:
        client.exit_code(sleeper)
    assert caught.value.code == NOT_FOUND


def test_many_containers_leave_no_file_descriptor_behind(hosted_agent: HostedAgent) -> None:
    run(hosted_agent, hosted_agent.connect(), "true")
    before = hosted_agent.settle()
    client = hosted_agent.connect()

    for _ in range(5):
        run(hosted_agent, client, "echo x")
        with pytest.raises(CallError):
            client.create(hosted_agent.spec(["/bin/nope"]), next(_names))

    assert hosted_agent.settle() == before


def test_a_removed_container_leaves_no_mount_and_no_bundle(
    hosted_agent: HostedAgent, client: AgentClient, sleeper: str
) -> None:
    root = f"/proc/{hosted_agent.pid()}/root"
    assert os.path.isdir(f"{root}/run/kata-containers/{sleeper}/rootfs/bin")

    client.remove(sleeper)

    assert not os.path.exists(f"{root}/run/kata-containers/{sleeper}")
    with open(f"/proc/{hosted_agent.pid()}/mounts") as mounts:
        assert sleeper not in mounts.read()


# -- what the spec says ----------------------------------------------------------------------------------------------


def test_environment_cwd_user_and_hostname_are_the_specs(hosted_agent: HostedAgent, client: AgentClient) -> None:
    user = oci_pb2.User(UID=1000, GID=1001, AdditionalGids=[7])
    script = "id -u; id -g; id -G; pwd; echo $COLOUR; hostname"

    code, out, _err = run(hosted_agent, client, script, User=user, Cwd="/tmp", Env=["PATH=/bin", "COLOUR=blue"])

    assert code == 0
    assert out.decode().splitlines() == ["1000", "1001", "1001 7", "/tmp", "blue", "guest-host"]


def test_string_user_is_looked_up_in_the_containers_files(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    user = agent_pb2.StringUser(uid="app", additionalGids=["extra", "12"])
    client.create(hosted_agent.spec(["sh", "-c", "id -u; id -G"]), cid, string_user=user)
    client.start(cid)

    assert sorted(client.read_all(cid).split()) == [b"12", b"1234", b"4321", b"555"]


def test_an_unknown_string_user_is_named(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    with pytest.raises(CallError, match="'nobody-here'") as caught:
        client.create(hosted_agent.spec(["true"]), cid, string_user=agent_pb2.StringUser(uid="nobody-here"))

    assert caught.value.code == INVALID_ARGUMENT


def test_read_only_root_and_masked_path_hold(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    spec = hosted_agent.spec(["sh", "-c", "echo x > /new; cat /etc/passwd | wc -c; exit 0"])
    spec.Root.Readonly = True
    spec.Linux.MaskedPaths.append("/etc/passwd")
    client.create(spec, cid)
    client.start(cid)

    assert b"Read-only file system" in client.read_all(cid, method="ReadStderr")
    assert client.read_all(cid).strip() == b"0"


def test_capabilities_and_no_new_privileges_are_applied(hosted_agent: HostedAgent, client: AgentClient) -> None:
    names = ["CAP_KILL", "CAP_CHOWN"]
    capabilities = oci_pb2.LinuxCapabilities(Bounding=names, Effective=names, Permitted=names)
    script = "while read k v; do case $k in CapEff:|CapBnd:|NoNewPrivs:) echo $k $v;; esac; done < /proc/self/status"

    _code, out, _err = run(hosted_agent, client, script, Capabilities=capabilities, NoNewPrivileges=True)

    expected = f"{1 << 5 | 1 << 0:016x}"
    assert set(out.decode().splitlines()) == {f"CapEff: {expected}", f"CapBnd: {expected}", "NoNewPrivs: 1"}


def test_rlimits_and_oom_score_are_applied(hosted_agent: HostedAgent, client: AgentClient) -> None:
    limits = [oci_pb2.POSIXRlimit(Type="RLIMIT_NOFILE", Hard=99, Soft=77)]

    _code, out, _err = run(
        hosted_agent, client, "ulimit -n; cat /proc/self/oom_score_adj", Rlimits=limits, OOMScoreAdj=321
    )

    assert out.split() == [b"77", b"321"]


def test_seccomp_rule_answers_with_its_errno(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    spec = hosted_agent.spec(["sh", "-c", "mkdir /tmp/x 2>&1"])
    rule = oci_pb2.LinuxSyscall(Names=["mkdir", "mkdirat"], Action="SCMP_ACT_ERRNO", errnoret=28)
    spec.Linux.Seccomp.CopyFrom(oci_pb2.LinuxSeccomp(DefaultAction="SCMP_ACT_ALLOW", Syscalls=[rule]))
    client.create(spec, cid)
    client.start(cid)

    assert b"No space left on device" in client.read_all(cid)


def test_bind_mount_of_a_storage_is_seen_read_only(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    source = hosted_agent.folder / "volume"
    source.mkdir(exist_ok=True)
    (source / "file").write_text("content")
    spec = hosted_agent.spec(["sh", "-c", "cat /volume/file; echo x > /volume/file"])
    spec.Mounts.append(oci_pb2.Mount(destination="/volume", type="bind", source=str(source), options=["rbind", "ro"]))
    client.create(spec, cid)
    client.start(cid)

    assert client.read_all(cid) == b"content"
    assert b"Read-only" in client.read_all(cid, method="ReadStderr")


def test_each_container_has_its_own_pid_namespace(hosted_agent: HostedAgent, client: AgentClient) -> None:
    _code, out, _err = run(hosted_agent, client, "echo $$")

    assert out == b"1\n"


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

    with pytest.raises(CallError, match=named) as caught:
        client.create(spec, cid)

    assert caught.value.code == INVALID_ARGUMENT


@pytest.mark.parametrize("bad_id", ["", "..", "../x", "a/b", ".hidden", "a b", "a\nb", "x" * 2000])
def test_an_id_that_is_no_file_name_is_refused(hosted_agent: HostedAgent, client: AgentClient, bad_id: str) -> None:
    with pytest.raises(CallError) as caught:
        client.create(hosted_agent.spec(["true"]), bad_id)

    assert caught.value.code == INVALID_ARGUMENT


# -- exec ------------------------------------------------------------------------------------------------------------


def test_exec_has_its_own_streams_and_exit_code(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sh", "-c", "cat; echo err >&2; exit 5"])
    client.write(sleeper, b"to exec", "e1")
    client.close_stdin(sleeper, "e1")

    assert client.read_all(sleeper, "e1") == b"to exec"
    assert client.read_all(sleeper, "e1", method="ReadStderr") == b"err\n"
    assert client.exit_code(sleeper, "e1") == 5


def test_exec_fails_with_cruns_words_when_the_program_is_missing(client: AgentClient, sleeper: str) -> None:
    with pytest.raises(CallError, match="executable file `nope` not found"):
        client.execute(sleeper, "e1", ["nope"])

    with pytest.raises(CallError) as caught:
        client.exit_code(sleeper, "e1")
    assert caught.value.code == NOT_FOUND


def test_an_exec_id_is_taken_while_it_runs_and_free_afterwards(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sleep", "1000"])

    with pytest.raises(CallError) as caught:
        client.execute(sleeper, "e1", ["true"])
    client.signal(sleeper, signal.SIGKILL, "e1")
    assert client.exit_code(sleeper, "e1") == 137
    client.execute(sleeper, "e1", ["sh", "-c", "exit 4"])

    assert caught.value.code == ALREADY_EXISTS
    assert client.exit_code(sleeper, "e1") == 4


def test_init_answers_to_its_containers_id_and_no_exec_may_take_it(client: AgentClient, sleeper: str) -> None:
    with pytest.raises(CallError) as caught:
        client.execute(sleeper, sleeper, ["true"])
    client.signal(sleeper, signal.SIGKILL, sleeper)

    assert caught.value.code == ALREADY_EXISTS
    assert client.exit_code(sleeper, sleeper) == 137
    assert client.exit_code(sleeper) == 137


def test_many_execs_at_once_keep_their_outputs_apart(client: AgentClient, sleeper: str) -> None:
    process = {n: oci_pb2.Process(Args=["sh", "-c", f"echo {n}; exit {n}"], Env=["PATH=/bin"]) for n in range(8)}
    sent = [
        client.send(
            "ExecProcess", agent_pb2.ExecProcessRequest(container_id=sleeper, exec_id=f"m{n}", process=process[n])
        )
        for n in process
    ]
    for stream_id in sent:
        client.wait(stream_id)

    assert [client.exit_code(sleeper, f"m{n}") for n in process] == list(process)
    assert [client.read_all(sleeper, f"m{n}") for n in process] == [b"%d\n" % n for n in process]


def test_exec_in_an_exited_container_is_refused(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.create(hosted_agent.spec(["true"]), cid)
    client.start(cid)
    client.exit_code(cid)

    with pytest.raises(CallError) as caught:
        client.execute(cid, "late", ["true"])

    assert caught.value.code == FAILED_PRECONDITION


# -- waiting and signals ---------------------------------------------------------------------------------------------


def test_exit_is_latched_for_every_waiter_early_and_late(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.create(hosted_agent.spec(["sh", "-c", "exit 9"]), cid)
    early = [client.send("WaitProcess", agent_pb2.WaitProcessRequest(container_id=cid)) for _ in range(3)]
    client.start(cid)

    codes = [agent_pb2.WaitProcessResponse.FromString(client.wait(one)).status for one in early]

    assert codes == [9, 9, 9]
    assert client.exit_code(cid) == 9
    assert client.exit_code(cid) == 9


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_created_container_can_be_killed(
    hosted_agent: HostedAgent, client: AgentClient, cid: str, number: signal.Signals
) -> None:
    client.create(hosted_agent.spec(["sleep", "1000"]), cid)

    client.signal(cid, number)

    assert client.exit_code(cid) == 137


def test_sigterm_reaches_an_init_that_handles_it(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    script = "trap 'exit 42' TERM; echo ready; while :; do sleep 0.05; done"
    client.create(hosted_agent.spec(["sh", "-c", script]), cid)
    client.start(cid)
    client.read(cid)

    client.signal(cid, signal.SIGTERM)

    assert client.exit_code(cid) == 42


def test_sigterm_ends_an_init_that_does_not_handle_it(client: AgentClient, sleeper: str) -> None:
    client.signal(sleeper, signal.SIGTERM)

    assert client.exit_code(sleeper) == 137


def test_sigkill_of_init_takes_execs_along(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sleep", "1000"])

    client.signal(sleeper, signal.SIGKILL)

    assert client.exit_code(sleeper, "e1") == 137
    assert client.exit_code(sleeper) == 137


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], ids=lambda number: number.name)
def test_an_execs_death_by_signal_is_128_plus_its_number(
    client: AgentClient, sleeper: str, number: signal.Signals
) -> None:
    client.execute(sleeper, "e1", ["sleep", "1000"])

    client.signal(sleeper, number, "e1")

    assert client.exit_code(sleeper, "e1") == 128 + number


def test_a_signal_after_exit_is_no_error(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.create(hosted_agent.spec(["true"]), cid)
    client.start(cid)
    client.exit_code(cid)

    client.signal(cid, signal.SIGTERM)
    client.signal(cid, signal.SIGKILL)


@pytest.mark.parametrize("number", [0, 65, 1 << 31])
def test_a_number_that_is_no_signal_is_refused(client: AgentClient, sleeper: str, number: int) -> None:
    with pytest.raises(CallError) as caught:
        client.signal(sleeper, number)

    assert caught.value.code == INVALID_ARGUMENT


def test_paused_container_makes_no_progress_until_resumed(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.create(hosted_agent.spec(["sh", "-c", "while read line; do echo got $line; done"]), cid)
    client.start(cid)
    client.call("PauseContainer", agent_pb2.PauseContainerRequest(container_id=cid))
    client.write(cid, b"1\n")
    reading = client.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=cid, len=100))

    while_paused = client.is_answered(reading)
    client.call("ResumeContainer", agent_pb2.ResumeContainerRequest(container_id=cid))

    assert not while_paused
    assert agent_pb2.ReadStreamResponse.FromString(client.wait(reading)).data == b"got 1\n"


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("StartContainer", agent_pb2.StartContainerRequest),
        ("RemoveContainer", agent_pb2.RemoveContainerRequest),
        ("WaitProcess", agent_pb2.WaitProcessRequest),
        ("PauseContainer", agent_pb2.PauseContainerRequest),
        ("StatsContainer", agent_pb2.StatsContainerRequest),
        ("CloseStdin", agent_pb2.CloseStdinRequest),
        ("TtyWinResize", agent_pb2.TtyWinResizeRequest),
        ("UpdateContainer", agent_pb2.UpdateContainerRequest),
    ],
)
def test_an_unknown_container_is_not_found_by_any_call(client: AgentClient, method: str, request_type: type) -> None:
    with pytest.raises(CallError, match="'ghost'") as caught:
        client.call(method, request_type(container_id="ghost"))

    assert caught.value.code == NOT_FOUND


# -- streams ---------------------------------------------------------------------------------------------------------


def test_64_mib_go_through_stdin_and_stdout_unchanged(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    block = os.urandom(1 << 20)
    client.create(hosted_agent.spec(["cat"]), cid)
    client.start(cid)
    sent, received = hashlib.sha256(), hashlib.sha256()
    total = 0

    for _ in range(64):
        writing = client.send("WriteStdin", agent_pb2.WriteStreamRequest(container_id=cid, data=block))
        sent.update(block)
        want = total + len(block)
        while total < want:
            data = client.read(cid, size=1 << 16)
            received.update(data)
            total += len(data)
        client.wait(writing)
    client.close_stdin(cid)

    assert client.read_all(cid) == b""
    assert client.exit_code(cid) == 0
    assert received.digest() == sent.digest()


def test_output_written_just_before_exit_is_complete_after_the_exit_is_known(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.create(hosted_agent.spec(["head", "-c", "60000", "/dev/zero"]), cid)
    client.start(cid)

    assert client.exit_code(cid) == 0
    assert len(client.read_all(cid)) == 60000
    assert client.read(cid) == b""


def test_a_writer_is_held_back_while_nobody_reads(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.create(hosted_agent.spec(["sh", "-c", "head -c 1000000 /dev/zero; echo done >&2"]), cid)
    client.start(cid)
    finished = client.send("ReadStderr", agent_pb2.ReadStreamRequest(container_id=cid, len=100))

    before = client.is_answered(finished)
    size = len(client.read_all(cid))

    assert not before
    assert size == 1000000
    assert agent_pb2.ReadStreamResponse.FromString(client.wait(finished)).data == b"done\n"


def test_a_blocked_stdin_write_holds_up_no_other_call(client: AgentClient, sleeper: str) -> None:
    stuck = client.send("WriteStdin", agent_pb2.WriteStreamRequest(container_id=sleeper, data=bytes(1 << 20)))

    client.execute(sleeper, "e1", ["sh", "-c", "exit 6"])

    assert client.exit_code(sleeper, "e1") == 6
    client.signal(sleeper, signal.SIGKILL)
    with pytest.raises(CallError) as caught:
        client.wait(stuck)
    assert caught.value.code == FAILED_PRECONDITION


def test_concurrent_reads_each_get_their_own_bytes_in_order(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.create(hosted_agent.spec(["cat"]), cid)
    client.start(cid)
    reads = [client.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=cid, len=2)) for _ in range(3)]

    client.write(cid, b"aabbcc")

    assert [agent_pb2.ReadStreamResponse.FromString(client.wait(one)).data for one in reads] == [b"aa", b"bb", b"cc"]


def test_a_read_given_up_by_its_connection_takes_no_bytes(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.create(hosted_agent.spec(["cat"]), cid)
    client.start(cid)
    gone = hosted_agent.connect()
    gone.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=cid, len=100))
    gone.call("Check")
    gone.close()
    client.call("Check")

    client.write(cid, b"for the living")

    assert client.read(cid) == b"for the living"


def test_a_read_past_its_deadline_ends_and_takes_no_bytes(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.create(hosted_agent.spec(["cat"]), cid)
    client.start(cid)
    request = agent_pb2.ReadStreamRequest(container_id=cid, len=100)

    with pytest.raises(CallError) as caught:
        client.wait(client.send("ReadStdout", request, timeout_ns=50_000_000))
    client.write(cid, b"later")

    assert caught.value.code == DEADLINE_EXCEEDED
    assert client.read(cid) == b"later"


def test_a_grandchild_that_keeps_stdout_open_does_not_hold_the_end_back(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sh", "-c", "echo last; sleep 1000 & exit 0"])

    assert client.exit_code(sleeper, "e1") == 0
    assert client.read_all(sleeper, "e1") == b"last\n"


def test_stdin_stays_open_until_it_is_closed(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.create(hosted_agent.spec(["wc", "-c"]), cid)
    client.start(cid)
    waiting = client.send("WaitProcess", agent_pb2.WaitProcessRequest(container_id=cid))
    client.write(cid, b"12345")

    before = client.is_answered(waiting)
    client.close_stdin(cid)
    client.wait(waiting)

    assert not before
    assert client.read_all(cid).strip() == b"5"


def test_an_empty_write_closes_stdin(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.create(hosted_agent.spec(["wc", "-c"]), cid)
    client.start(cid)

    client.write(cid, b"")

    assert client.exit_code(cid) == 0


def test_a_write_after_close_is_refused(client: AgentClient, sleeper: str) -> None:
    client.close_stdin(sleeper)

    with pytest.raises(CallError) as caught:
        client.write(sleeper, b"x")

    assert caught.value.code == FAILED_PRECONDITION


# -- terminals -------------------------------------------------------------------------------------------------------


def test_a_terminal_echoes_has_a_size_and_ends(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.create(hosted_agent.spec(["sh", "-c", "tty; read line; stty size; exit 3"], terminal=True), cid)
    client.call("TtyWinResize", agent_pb2.TtyWinResizeRequest(container_id=cid, row=33, column=99))
    client.start(cid)
    client.write(cid, b"go\n")

    out = client.read_all(cid)

    assert b"/dev/" in out
    assert b"go" in out
    assert b"33 99" in out
    assert client.exit_code(cid) == 3
    assert client.read_all(cid, method="ReadStderr") == b""


def test_an_exec_with_a_terminal_gets_one(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sh", "-c", "tty; exit 2"], Terminal=True)

    assert client.read_all(sleeper, "e1").startswith(b"/dev/pts/")
    assert client.exit_code(sleeper, "e1") == 2


def test_resizing_without_a_terminal_is_refused(client: AgentClient, sleeper: str) -> None:
    with pytest.raises(CallError) as caught:
        client.call("TtyWinResize", agent_pb2.TtyWinResizeRequest(container_id=sleeper, row=1, column=1))

    assert caught.value.code == FAILED_PRECONDITION


# -- shared pid namespace --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_pause", [True, False], ids=["pause process", "first container"])
def test_containers_that_share_the_sandboxs_pids_see_each_other(tmp_path: Path, has_pause: bool) -> None:
    agent = HostedAgent(tmp_path)
    try:
        client = agent.connect()
        client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", sandbox_pidns=has_pause))
        for name, script in (("one", "sleep 777"), ("two", "echo $$; ps")):
            client.create(agent.spec(["sh", "-c", script]), name, sandbox_pidns=True)
            client.start(name)
        client.create(agent.spec(["sh", "-c", "ps"]), "alone")
        client.start("alone")

        shared, alone = client.read_all("two"), client.read_all("alone")

        assert b"sleep 777" in shared
        assert not shared.startswith(b"1\n")
        assert b"sleep 777" not in alone
    finally:
        agent.stop()


def test_a_container_that_ends_leaves_the_shared_pid_namespace_alive(tmp_path: Path) -> None:
    agent = HostedAgent(tmp_path)
    try:
        client = agent.connect()
        client.call("CreateSandbox", agent_pb2.CreateSandboxRequest(sandbox_id="s", sandbox_pidns=True))
        for name in ("one", "two"):
            client.create(agent.spec(["sleep", "777"]), name, sandbox_pidns=True)
            client.start(name)
        client.signal("one", signal.SIGKILL)

        assert client.exit_code("one") == 137
        client.execute("two", "still", ["sh", "-c", "exit 8"])
        assert client.exit_code("two", "still") == 8
    finally:
        agent.stop()


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_stats_of_a_running_container_are_answered(client: AgentClient, sleeper: str) -> None:
    reply = client.call("StatsContainer", agent_pb2.StatsContainerRequest(container_id=sleeper))

    assert reply.cgroup_stats.cpu_stats.cpu_usage.total_usage > 0


def test_many_execs_leave_no_file_descriptor_behind(
    hosted_agent: HostedAgent, client: AgentClient, sleeper: str
) -> None:
    client.execute(sleeper, "first", ["true"])
    client.exit_code(sleeper, "first")
    client.read_all(sleeper, "first")
    client.read_all(sleeper, "first", method="ReadStderr")
    client.close_stdin(sleeper, "first")
    before = hosted_agent.open_fds()

    for number in range(10):
        name = f"probe{number}"
        client.execute(sleeper, name, ["true"])
        client.exit_code(sleeper, name)
        client.read_all(sleeper, name)
        client.read_all(sleeper, name, method="ReadStderr")
        client.close_stdin(sleeper, name)

    assert hosted_agent.open_fds() == before
