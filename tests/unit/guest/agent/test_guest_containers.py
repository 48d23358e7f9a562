"""A container's life in the guest agent, its added processes and signals, with real crun on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent, refused, run, until, unused_id

from guest.agent.container.container import takes_signal
from protos.agent import agent_pb2, oci_pb2
from pyshim.ttrpc import Code

pytestmark = pytest.mark.root


def test_output_and_exit_code_of_init_arrive(hosted_agent: HostedAgent, client: AgentClient) -> None:
    assert run(hosted_agent, client, "echo out; echo err >&2; exit 7") == (7, b"out\n", b"err\n")


def test_init_does_not_run_before_start(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.create(hosted_agent.spec(["sh", "-c", "echo begun"]), cid)
    pending = client.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=cid, len=10))

    before = client.is_answered(pending)
    client.start(cid)

    assert not before
    assert agent_pb2.ReadStreamResponse.FromString(client.wait(pending)).data == b"begun\n"


def test_create_of_a_missing_program_fails_with_cruns_words_and_leaves_its_id_free(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    with refused(Code.INTERNAL, "executable file `/bin/nope` not found"):
        client.create(hosted_agent.spec(["/bin/nope"]), cid)

    client.run(hosted_agent.spec(["sh", "-c", "exit 3"]), cid)
    assert client.exit_code(cid) == 3


def test_a_cgroup_left_by_a_killed_namesake_does_not_matter(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    leftover = hosted_agent.cgroup / cid
    leftover.mkdir()
    (leftover / "cgroup.kill").write_text("1")

    client.run(hosted_agent.spec(["sh", "-c", "exit 3"]), cid)

    assert client.exit_code(cid) == 3


def message_of(client: AgentClient, cid: str, log_type: str = "termination_log") -> str:
    request = agent_pb2.GetDiagnosticDataRequest(log_type=log_type, container_id=cid)
    return str(client.call("GetDiagnosticData", request).data)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (r"printf 'lost: \346\227\245 \377' > /dev/message; exit 1", "lost: \u65e5 \ufffd"),
        ("exit 1", ""),
        ("head -c 5000 /dev/zero > /dev/message; echo end >> /dev/message", "\0" * 4092 + "end\n"),
    ],
    ids=["text", "nothing", "the end of a long one"],
)
def test_the_termination_message_can_be_read_until_the_container_is_removed(
    hosted_agent: HostedAgent, client: AgentClient, cid: str, script: str, expected: str
) -> None:
    file = hosted_agent.folder / cid
    file.touch()
    spec = hosted_agent.spec(["sh", "-c", script])
    spec.Mounts.append(oci_pb2.Mount(destination="/dev/message", type="bind", source=str(file), options=["bind"]))
    spec.Annotations["io.kubernetes.container.terminationMessagePath"] = "/dev/message"
    client.run(spec, cid)
    client.exit_code(cid)

    assert message_of(client, cid) == expected
    with refused(Code.INVALID_ARGUMENT, "'core' is not 'termination_log'"):
        message_of(client, cid, "core")

    client.remove(cid)
    with refused(Code.NOT_FOUND, "no such container"):
        message_of(client, cid)


def test_a_container_without_a_termination_message_has_none_to_read(client: AgentClient, sleeper: str) -> None:
    with refused(Code.NOT_FOUND, "nothing is mounted on ''"):
        message_of(client, sleeper)


def test_creating_an_id_twice_is_refused_and_the_first_lives_on(
    hosted_agent: HostedAgent, client: AgentClient, sleeper: str
) -> None:
    with pytest.raises(CallError) as caught:
        client.create(hosted_agent.spec(["sleep", "1"]), sleeper)

    client.execute(sleeper, "alive", ["sh", "-c", "exit 0"])
    assert caught.value.code == Code.ALREADY_EXISTS
    assert client.exit_code(sleeper, "alive") == 0


def test_create_of_one_id_sent_twice_at_once_makes_one_container(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    request = agent_pb2.CreateContainerRequest(container_id=cid, OCI=hosted_agent.spec(["sleep", "1000"]))
    first, second = client.send("CreateContainer", request), client.send("CreateContainer", request)

    client.wait(first)
    with refused(Code.ALREADY_EXISTS):
        client.wait(second)


def test_starting_twice_is_refused(client: AgentClient, sleeper: str) -> None:
    with refused(Code.FAILED_PRECONDITION):
        client.start(sleeper)


def test_remove_kills_what_runs_and_pending_calls_end(
    hosted_agent: HostedAgent, client: AgentClient, sleeper: str
) -> None:
    waiting = client.send("WaitProcess", agent_pb2.WaitProcessRequest(container_id=sleeper))
    reading = client.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=sleeper, len=10))

    client.remove(sleeper)

    assert agent_pb2.WaitProcessResponse.FromString(client.wait(waiting)).status == 128 + signal.SIGKILL
    assert agent_pb2.ReadStreamResponse.FromString(client.wait(reading)).data == b""
    with refused(Code.NOT_FOUND):
        client.exit_code(sleeper)


def test_a_removal_that_takes_longer_than_its_call_goes_on(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    """And a second call joins it."""
    ran = hosted_agent.folder / "poststop"
    spec = hosted_agent.spec(["true"])
    spec.Hooks.Poststop.append(oci_pb2.Hook(Path="/bin/sh", Args=["sh", "-c", f"sleep 3; echo ran >> {ran}"]))
    client.run(spec, cid)
    client.exit_code(cid)

    with refused(Code.DEADLINE_EXCEEDED, "not yet done after 1 s"):
        client.call("RemoveContainer", agent_pb2.RemoveContainerRequest(container_id=cid, timeout=1))
    client.remove(cid)

    assert ran.read_text() == "ran\n"
    with refused(Code.NOT_FOUND):
        client.remove(cid)


def test_many_containers_leave_no_file_descriptor_behind(hosted_agent: HostedAgent) -> None:
    run(hosted_agent, hosted_agent.connect(), "true")
    hosted_agent.disconnect()
    before = hosted_agent.settled_fds()
    client = hosted_agent.connect()

    for _ in range(5):
        run(hosted_agent, client, "echo x")
        with pytest.raises(CallError):
            client.create(hosted_agent.spec(["/bin/nope"]), unused_id())

    hosted_agent.disconnect()
    until(lambda: hosted_agent.open_fds() <= before, "the agent has more open than before")


def test_a_removed_container_leaves_no_mount_and_no_bundle(
    hosted_agent: HostedAgent, client: AgentClient, sleeper: str
) -> None:
    root = f"/proc/{hosted_agent.pid()}/root"
    assert os.path.isdir(f"{root}/run/kata-containers/{sleeper}/rootfs/bin")

    client.remove(sleeper)

    assert not os.path.exists(f"{root}/run/kata-containers/{sleeper}")
    with open(f"/proc/{hosted_agent.pid()}/mounts") as mounts:
        assert sleeper not in mounts.read()


def test_what_the_share_shows_of_a_container_is_unmounted_with_it(
    hosted_agent: HostedAgent, client: AgentClient, sleeper: str
) -> None:
    """The kernel mounts such file systems by itself; here they are made by hand, as is that of a namesake."""
    shared = "/run/kata-containers/shared/containers"
    folders = [f"{shared}/{sleeper}/rootfs", f"{shared}/{sleeper}x/rootfs"]
    enter = ["nsenter", f"--target={hosted_agent.pid()}", "--mount", "sh", "-ec"]
    for folder in folders:
        subprocess.run([*enter, f"mkdir -p {folder}; mount -t tmpfs tmpfs {folder}"], check=True)

    client.remove(sleeper)

    with open(f"/proc/{hosted_agent.pid()}/mounts") as mounts:
        found = mounts.read()
    assert [folder in found for folder in folders] == [False, True]


def test_stats_of_a_running_container_are_answered(client: AgentClient, sleeper: str) -> None:
    reply = client.call("StatsContainer", agent_pb2.StatsContainerRequest(container_id=sleeper))
    all_replies = client.call("StatsContainers", agent_pb2.StatsContainersRequest()).containers

    assert reply.cgroup_stats.cpu_stats.cpu_usage.total_usage > 0
    assert all_replies[sleeper].cpu_stats.cpu_usage.total_usage >= reply.cgroup_stats.cpu_stats.cpu_usage.total_usage


def test_without_a_client_standard_input_is_dev_null(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    """Not a pipe at its end: programs that look for one would read it in place of their files."""
    look = ["sh", "-c", "ls -l /proc/self/fd/0; sleep 1000"]
    client.run(hosted_agent.spec(look, NoStdin=True), cid)
    client.execute(cid, "null", look, NoStdin=True)
    client.execute(cid, "pipe", look)

    assert client.read(cid).endswith(b"-> /dev/null\n")
    assert client.read(cid, "null").endswith(b"-> /dev/null\n")
    assert b"-> pipe:" in client.read(cid, "pipe")
    client.close_stdin(cid)
    with refused(Code.FAILED_PRECONDITION, "it is /dev/null"):
        client.write(cid, b"x", "null")


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

    with refused(Code.NOT_FOUND):
        client.exit_code(sleeper, "e1")


def test_an_exec_id_is_taken_while_it_runs_and_free_afterwards(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sleep", "1000"])

    with pytest.raises(CallError) as caught:
        client.execute(sleeper, "e1", ["true"])
    client.signal(sleeper, signal.SIGKILL, "e1")
    assert client.exit_code(sleeper, "e1") == 137
    client.execute(sleeper, "e1", ["sh", "-c", "exit 4"])

    assert caught.value.code == Code.ALREADY_EXISTS
    assert client.exit_code(sleeper, "e1") == 4


def test_init_answers_to_its_containers_id_and_no_exec_may_take_it(client: AgentClient, sleeper: str) -> None:
    with pytest.raises(CallError) as caught:
        client.execute(sleeper, sleeper, ["true"])
    client.signal(sleeper, signal.SIGKILL, sleeper)

    assert caught.value.code == Code.ALREADY_EXISTS
    assert client.exit_code(sleeper, sleeper) == 137
    assert client.exit_code(sleeper) == 137


def test_exec_in_an_exited_container_is_refused(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.run(hosted_agent.spec(["true"]), cid)
    client.exit_code(cid)

    with refused(Code.FAILED_PRECONDITION):
        client.execute(cid, "late", ["true"])


def test_many_execs_leave_no_file_descriptor_behind(
    hosted_agent: HostedAgent, client: AgentClient, sleeper: str
) -> None:
    def probe(name: str) -> None:
        client.execute(sleeper, name, ["true"])
        client.exit_code(sleeper, name)
        client.read_all(sleeper, name)
        client.read_all(sleeper, name, method="ReadStderr")
        client.close_stdin(sleeper, name)

    probe("first")
    before = hosted_agent.settled_fds()

    for number in range(10):
        probe(f"probe{number}")

    until(lambda: hosted_agent.open_fds() <= before, "the agent has more open than before")


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
    client.run(hosted_agent.spec(["sh", "-c", script]), cid)
    client.read(cid)

    client.signal(cid, signal.SIGTERM)

    assert client.exit_code(cid) == 42


def test_sigterm_reaches_an_init_that_awaits_it(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    """As `tini` does: the kernel then hides the signal from the process's masks."""
    spec = hosted_agent.spec([os.path.realpath(sys.executable), "-IS", "-c", AWAITS.format(awaited="SIGTERM")])
    spec.Mounts.extend(HOSTS_PROGRAMS)
    client.run(spec, cid)
    client.read(cid)
    time.sleep(0.1)  # most of the time in the call, not before it

    client.signal(cid, signal.SIGTERM)

    assert client.exit_code(cid) == 9


AWAITS = """
from signal import *
pthread_sigmask(SIG_BLOCK, [{awaited}])
print("ready", flush=True)
while not sigtimedwait([{awaited}], 1): pass
raise SystemExit(9)
"""
HOSTS_PROGRAMS = [
    oci_pb2.Mount(destination=path, type="bind", source=path, options=["rbind", "ro"])
    for path in dict.fromkeys(("/usr", "/lib", "/lib64", sys.base_prefix))
    if os.path.exists(path)
]


@pytest.mark.parametrize(
    ("program", "takes"),
    [
        pytest.param(AWAITS.format(awaited="SIGTERM"), True, id="awaits it"),
        pytest.param(AWAITS.format(awaited="SIGUSR1"), False, id="awaits another"),
        pytest.param("import time; print(flush=True); time.sleep(1000)", False, id="sleeps"),
        pytest.param("print(flush=True)\nwhile True: pass", False, id="runs"),
        pytest.param(
            "import signal; signal.signal(15, print); print(flush=True); signal.pause()", True, id="handles it"
        ),
        pytest.param(
            "import signal; signal.pthread_sigmask(0, [15]); print(flush=True); signal.pause()", True, id="blocks it"
        ),
    ],
)
def test_a_process_takes_a_signal_that_it_handles_blocks_ignores_or_awaits(program: str, takes: bool) -> None:
    with subprocess.Popen([sys.executable, "-IS", "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            found = [takes_signal(process.pid, signal.SIGTERM) for _ in range(50)]
        finally:
            process.kill()

    assert found == [takes] * 50


def test_sigterm_ends_an_init_that_does_not_handle_it(client: AgentClient, sleeper: str) -> None:
    client.signal(sleeper, signal.SIGTERM)

    assert client.exit_code(sleeper) == 137


def test_sigkill_of_init_takes_execs_along(client: AgentClient, sleeper: str) -> None:
    client.execute(sleeper, "e1", ["sleep", "1000"])

    client.signal(sleeper, signal.SIGKILL)

    assert client.exit_code(sleeper, "e1") == 137
    assert client.exit_code(sleeper) == 137


def test_a_signal_after_exit_is_no_error(hosted_agent: HostedAgent, client: AgentClient, cid: str) -> None:
    client.run(hosted_agent.spec(["true"]), cid)
    client.exit_code(cid)

    client.signal(cid, signal.SIGTERM)
    client.signal(cid, signal.SIGKILL)


@pytest.mark.parametrize("number", [0, 65, 1 << 31])
def test_a_number_that_is_no_signal_is_refused(client: AgentClient, sleeper: str, number: int) -> None:
    with refused(Code.INVALID_ARGUMENT):
        client.signal(sleeper, number)


def test_paused_container_makes_no_progress_until_resumed(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.run(hosted_agent.spec(["sh", "-c", "while read line; do echo got $line; done"]), cid)
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
    with refused(Code.NOT_FOUND, "'ghost'"):
        client.call(method, request_type(container_id="ghost"))
