"""The Task API through a real ttrpc server and client: every method, both generations, every refusal."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import Any

import pytest
from fake_sandboxes import EXIT, PID, FakeSandboxes, some_stats
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from msgspec.structs import replace
from service_bench import PROCESS_URL, RESOURCES_URL, V2, V3, Bench, bench

from protos.cgroups import v1_pb2, v2_pb2
from protos.containerd import runc_options_pb2, runtimeoptions_pb2, task_v2_pb2, task_v3_pb2
from pyshim.model import errors
from pyshim.model.host_facts import CgroupMode
from pyshim.model.task import CreateTask, ExecTask, RootfsMount, RuntimeOptions, Stdio
from pyshim.task import translate
from pyshim.task.calls import Calls
from pyshim.task.service import SERVICES, TaskService
from pyshim.ttrpc import CallTimedOut, Code, RemoteError

pytestmark = pytest.mark.usefixtures("fast_clock")


def json_any(url: str, value: object) -> AnyMessage:
    return AnyMessage(type_url=url, value=json.dumps(value).encode())


def test_both_generations_have_the_same_wire_format() -> None:
    """The ground on which one set of generated classes serves both."""

    def shape(module: Any) -> dict[str, list[tuple[object, ...]]]:
        package = module.DESCRIPTOR.package
        return {
            name: [
                (
                    f.number,
                    f.name,
                    f.type,
                    f.is_repeated,
                    (f.message_type.full_name if f.message_type else "").removeprefix(package),
                )
                for f in message.fields
            ]
            for name, message in module.DESCRIPTOR.message_types_by_name.items()
        }

    def methods(module: Any) -> list[str]:
        return [method.name for method in module.DESCRIPTOR.services_by_name["Task"].methods]

    assert shape(task_v2_pb2) == shape(task_v3_pb2)
    assert methods(task_v2_pb2) == methods(task_v3_pb2)


def test_every_method_of_the_service_definition_is_served() -> None:
    names = {method.name for method in task_v2_pb2.DESCRIPTOR.services_by_name["Task"].methods}

    async def served() -> dict[str, set[str]]:
        service = TaskService(tasks=FakeSandboxes(), cgroup_mode=CgroupMode.V2, calls=Calls())
        return {name: set(methods) for name, methods in service.services().items()}

    assert asyncio.run(served()) == {V2: names, V3: names}
    assert len(names) == 17


@pytest.mark.parametrize("service", SERVICES)
async def test_create_carries_everything_containerd_says(service: str) -> None:
    options = runtimeoptions_pb2.Options(config_path="/etc/k.toml", config_body=b"[a]")

    async with bench() as b:
        request = task_v2_pb2.CreateTaskRequest(
            id="c2",
            bundle="/run/b/c2",
            stdin="/f/in",
            stdout="/f/out",
            stderr="/f/err",
            options=AnyMessage(type_url="runtimeoptions.v1.Options", value=options.SerializeToString()),
        )
        request.rootfs.add(type="overlay", source="overlay", target="", options=["lowerdir=/l", "upperdir=/u"])
        request.rootfs.add(type="bind", source="/x", target="sub", options=[])

        reply = task_v2_pb2.CreateTaskResponse.FromString(await b.call("Create", request, service))

        assert reply.pid == PID
        assert b.sandboxes.calls == [
            (
                "create",
                CreateTask(
                    container_id="c2",  # type: ignore[arg-type]
                    bundle="/run/b/c2",  # type: ignore[arg-type]
                    rootfs=(
                        RootfsMount(
                            type="overlay", source="overlay", target="", options=("lowerdir=/l", "upperdir=/u")
                        ),
                        RootfsMount(type="bind", source="/x", target="sub", options=()),
                    ),
                    stdio=Stdio(stdin="/f/in", stdout="/f/out", stderr="/f/err", terminal=False),
                    options=RuntimeOptions(config_path="/etc/k.toml", config_body=b"[a]"),
                ),
            )
        ]


async def test_terminal_has_no_stderr() -> None:
    async with bench() as b:
        request = task_v2_pb2.CreateTaskRequest(id="c2", bundle="/b", terminal=True, stdout="/o", stderr="/e")
        await b.call("Create", request)

        stdio = b.sandboxes.created["c2"].stdio  # type: ignore[index]
        assert stdio == Stdio(stdin="", stdout="/o", stderr="", terminal=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            AnyMessage(
                type_url="type.googleapis.com/runtimeoptions.v1.Options",
                value=runtimeoptions_pb2.Options(config_path="/p").SerializeToString(),
            ),
            RuntimeOptions(config_path="/p", config_body=b""),
        ),
        (
            AnyMessage(
                type_url="containerd.runc.v1.Options", value=runc_options_pb2.Options(io_uid=7).SerializeToString()
            ),
            None,
        ),
        (AnyMessage(type_url="unheard.of/Type", value=b"\xff\xff"), None),
        (AnyMessage(), None),
        (None, None),
    ],
    ids=["prefixed", "runc", "unknown", "empty", "absent"],
)
async def test_runtime_options_of_any_origin(options: AnyMessage | None, expected: RuntimeOptions | None) -> None:
    async with bench() as b:
        await b.call("Create", task_v2_pb2.CreateTaskRequest(id="c2", bundle="/b", options=options))

        assert b.sandboxes.created["c2"].options == expected  # type: ignore[index]


SIMPLE_CALLS = [
    ("Start", task_v2_pb2.StartRequest(id="c1"), ("start", "c1", None)),
    ("Start", task_v2_pb2.StartRequest(id="c1", exec_id="e1"), ("start", "c1", "e1")),
    ("Pause", task_v2_pb2.PauseRequest(id="c1"), ("pause", "c1")),
    ("Resume", task_v2_pb2.ResumeRequest(id="c1"), ("resume", "c1")),
    ("Kill", task_v2_pb2.KillRequest(id="c1", signal=15), ("kill", "c1", None, 15, False)),
    ("Kill", task_v2_pb2.KillRequest(id="c1", exec_id="e1", signal=9), ("kill", "c1", "e1", 9, False)),
    ("Kill", task_v2_pb2.KillRequest(id="c1", signal=9, all=True), ("kill", "c1", None, 9, True)),
    (
        "ResizePty",
        task_v2_pb2.ResizePtyRequest(id="c1", exec_id="e1", width=80, height=24),
        ("resize_pty", "c1", "e1", 80, 24),
    ),
    ("CloseIO", task_v2_pb2.CloseIORequest(id="c1", stdin=True), ("close_io", "c1", None)),
    ("CloseIO", task_v2_pb2.CloseIORequest(id="c1", exec_id="e1"), ("close_io", "c1", "e1")),
    ("Delete", task_v2_pb2.DeleteRequest(id="c1", exec_id="e1"), ("delete", "c1", "e1")),
    ("Shutdown", task_v2_pb2.ShutdownRequest(id="c1", now=True), ("shutdown", True)),
]


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(("method", "request_", "expected"), SIMPLE_CALLS)
async def test_call_reaches_the_sandboxes(
    service: str, method: str, request_: Message, expected: tuple[Any, ...]
) -> None:
    async with bench() as b:
        await b.call(method, request_, service)

        assert b.sandboxes.calls == [expected]


async def test_a_newer_callers_fields_are_named_once_and_the_call_is_carried_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    translate._warn_of_unknown_fields.cache_clear()
    field_127 = b"\xfa\x07\x03new"
    kill = task_v2_pb2.KillRequest(id="c1", signal=15)
    kill.MergeFromString(field_127)
    create = task_v2_pb2.CreateTaskRequest(id="c2", bundle="/b")
    create.rootfs.add(type="overlay").MergeFromString(field_127)

    async with bench() as b:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                await b.call("Kill", kill)
            await b.call("Create", create)

        assert [call[0] for call in b.sandboxes.calls] == ["kill", "kill", "create"]
    warned = [record for record in caplog.records if "fields that this release does not know" in record.message]
    assert [record.__dict__["method"] for record in warned] == [
        "containerd.task.v2.KillRequest",
        "containerd.task.v2.CreateTaskRequest",
    ]


async def test_start_answers_the_pid() -> None:
    async with bench() as b:
        reply = await b.call("Start", task_v2_pb2.StartRequest(id="c1"))

        assert task_v2_pb2.StartResponse.FromString(reply).pid == PID


async def test_state_has_no_exit_time_before_the_exit() -> None:
    async with bench() as b:
        request = task_v2_pb2.StateRequest(id="c1", exec_id="e1")

        state = task_v2_pb2.StateResponse.FromString(await b.call("State", request))

        assert state == task_v2_pb2.StateResponse(
            id="c1", exec_id="e1", bundle="/b", pid=PID, status="RUNNING", stdin="/in", stdout="/out", stderr="/err"
        )
        assert not state.HasField("exited_at")

        b.sandboxes.exited.set()
        state = task_v2_pb2.StateResponse.FromString(await b.call("State", request))

        assert (state.status, state.exit_status) == (3, EXIT.status)
        assert state.exited_at.ToNanoseconds() == EXIT.exited_at_ns


async def test_exec_passes_the_process_and_lets_the_request_decide_about_the_terminal() -> None:
    process = {"args": ["sh"], "cwd": "/", "terminal": False}

    async with bench() as b:
        request = task_v2_pb2.ExecProcessRequest(
            id="c1", exec_id="e1", terminal=True, stdout="/o", spec=json_any(PROCESS_URL, process)
        )
        await b.call("Exec", request)

        ((_, _, task),) = b.sandboxes.calls
        assert task == ExecTask(
            container_id="c1",  # type: ignore[arg-type]
            exec_id="e1",  # type: ignore[arg-type]
            stdio=Stdio(stdin="", stdout="/o", stderr="", terminal=True),
            process=process | {"terminal": True},
        )


@pytest.mark.parametrize("url", [PROCESS_URL, "opencontainers/runtime-spec/1/Process", ""])
async def test_process_is_accepted_under_every_spelling_of_its_type(url: str) -> None:
    async with bench() as b:
        spec = json_any(url, {"args": ["sh"]})

        await b.call("Exec", task_v2_pb2.ExecProcessRequest(id="c1", exec_id="e1", spec=spec))

        assert b.sandboxes.calls[0][2].process["args"] == ["sh"]


async def test_process_of_some_mebibytes_arrives_whole() -> None:
    argument = "x" * (3 << 20)

    async with bench() as b:
        spec = json_any(PROCESS_URL, {"args": [argument]})
        await b.call("Exec", task_v2_pb2.ExecProcessRequest(id="c1", exec_id="e1", spec=spec))

        assert b.sandboxes.calls[0][2].process["args"] == [argument]


async def test_update_passes_resources() -> None:
    async with bench() as b:
        request = task_v2_pb2.UpdateTaskRequest(id="c1", resources=json_any(RESOURCES_URL, {"memory": {"limit": 1}}))
        await b.call("Update", request)
        await b.call("Update", task_v2_pb2.UpdateTaskRequest(id="c1"))

        assert b.sandboxes.calls == [("update", "c1", {"memory": {"limit": 1}}), ("update", "c1", {})]


async def test_pids_name_the_exec_of_an_added_process() -> None:
    async with bench() as b:
        reply = task_v2_pb2.PidsResponse.FromString(await b.call("Pids", task_v2_pb2.PidsRequest(id="c1")))

        init, added = reply.processes
        assert (init.pid, init.HasField("info")) == (PID, False)
        assert added.info.type_url == "containerd.runc.v1.ProcessDetails"
        assert runc_options_pb2.ProcessDetails.FromString(added.info.value).exec_id == "e1"


async def test_wait_answers_everybody_while_other_calls_go_on() -> None:
    async with bench() as b:
        request = task_v2_pb2.WaitRequest(id="c1")
        waits = [asyncio.create_task(b.call("Wait", request)) for _ in range(3)]
        await b.call("State", task_v2_pb2.StateRequest(id="c1"))
        assert not any(wait.done() for wait in waits)
        assert [line.split(" for ")[0] for line in b.calls.open_calls()] == ["Wait c1 -"] * 3

        b.sandboxes.exited.set()
        replies = [task_v2_pb2.WaitResponse.FromString(await wait) for wait in waits]

        assert {(r.exit_status, r.exited_at.ToNanoseconds()) for r in replies} == {(EXIT.status, EXIT.exited_at_ns)}
        assert list(b.calls.open_calls()) == []


async def test_wait_ends_with_its_callers_deadline() -> None:
    async with bench() as b:
        with pytest.raises((CallTimedOut, RemoteError)) as caught:
            await b.call("Wait", task_v2_pb2.WaitRequest(id="c1"), timeout_s=0.05)

        assert caught.value.code == Code.DEADLINE_EXCEEDED
        async with asyncio.timeout(30):
            await b.sandboxes.wait_cancelled.wait()


async def test_delete_answers_pid_and_exit() -> None:
    async with bench() as b:
        reply = task_v2_pb2.DeleteResponse.FromString(await b.call("Delete", task_v2_pb2.DeleteRequest(id="c1")))

        assert (reply.pid, reply.exit_status) == (PID, EXIT.status)
        assert reply.exited_at.ToNanoseconds() == EXIT.exited_at_ns


@pytest.mark.parametrize(("container_id", "task_pid"), [("c1", PID), ("unknown", 0), ("", 0)])
async def test_connect_always_names_the_shim(container_id: str, task_pid: int) -> None:
    async with bench() as b:
        reply = await b.call("Connect", task_v2_pb2.ConnectRequest(id=container_id))

        assert task_v2_pb2.ConnectResponse.FromString(reply) == task_v2_pb2.ConnectResponse(
            shim_pid=os.getpid(), task_pid=task_pid
        )


@pytest.mark.parametrize(
    ("mode", "kind"),
    [(CgroupMode.V1, v1_pb2.Metrics), (CgroupMode.V2, v2_pb2.Metrics), (CgroupMode.NONE, v2_pb2.Metrics)],
)
async def test_stats_come_in_the_form_of_the_hosts_cgroups_under_a_bare_type(mode: CgroupMode, kind: Any) -> None:
    async with bench(mode) as b:
        reply = task_v2_pb2.StatsResponse.FromString(await b.call("Stats", task_v2_pb2.StatsRequest(id="c1")))

        assert reply.stats.type_url == kind.DESCRIPTOR.full_name
        assert kind.FromString(reply.stats.value).pids.current == 41


async def test_stats_are_each_containers_own_and_those_of_now() -> None:
    async def pids(b: Bench) -> list[int]:
        requests = [task_v2_pb2.StatsRequest(id=name) for name in ("c1", "c2")]
        replies = [task_v2_pb2.StatsResponse.FromString(await b.call("Stats", each)) for each in requests]
        return [v2_pb2.Metrics.FromString(reply.stats.value).pids.current for reply in replies]

    async with bench(CgroupMode.V2) as b:
        b.sandboxes.created |= dict.fromkeys(("c1", "c2"), b.sandboxes.created["c1"])
        b.sandboxes.used = {"c1": replace(some_stats(), pids_current=1), "c2": replace(some_stats(), pids_current=2)}
        assert [await pids(b), await pids(b)] == [[1, 2], [1, 2]]

        b.sandboxes.used["c1"] = replace(some_stats(), pids_current=3)
        assert await pids(b) == [3, 2]


@pytest.mark.parametrize("empty", [True, False])
async def test_shim_may_end_only_after_a_shutdown_that_left_nothing(empty: bool) -> None:
    async with bench() as b:
        assert not b.service.finished.is_set()
        b.sandboxes.empty = empty

        await b.call("Shutdown", task_v2_pb2.ShutdownRequest(id="c1"))

        assert b.service.finished.is_set() is empty


async def test_checkpoint_is_not_implemented() -> None:
    async with bench() as b:
        error = await b.fails("Checkpoint", task_v2_pb2.CheckpointTaskRequest(id="c1", path="/x"))

        assert error.code == Code.UNIMPLEMENTED
        assert error.message == "checkpoint task 'c1': not supported for virtual machines"


async def test_calls_are_logged_with_their_object_and_duration(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="pyshim.task"):
        async with bench() as b:
            await b.call("Start", task_v2_pb2.StartRequest(id="c1", exec_id="e1"))

    record = next(record for record in caplog.records if getattr(record, "method", "") == "Start")
    assert (record.container, record.exec) == ("c1", "e1")  # type: ignore[attr-defined]
    assert record.took_ms >= 0  # type: ignore[attr-defined]


BAD_ID = "../etc"


def exec_with(**spec: Any) -> Message:
    return task_v2_pb2.ExecProcessRequest(id="c1", exec_id="e1", spec=AnyMessage(**spec))


@pytest.mark.parametrize(
    ("method", "request_", "text"),
    [
        *(
            (method, kind(id=BAD_ID), "check container id '../etc': not a valid identifier")
            for method, kind in [
                ("State", task_v2_pb2.StateRequest),
                ("Create", task_v2_pb2.CreateTaskRequest),
                ("Start", task_v2_pb2.StartRequest),
                ("Delete", task_v2_pb2.DeleteRequest),
                ("Pids", task_v2_pb2.PidsRequest),
                ("Pause", task_v2_pb2.PauseRequest),
                ("Resume", task_v2_pb2.ResumeRequest),
                ("Checkpoint", task_v2_pb2.CheckpointTaskRequest),
                ("Kill", task_v2_pb2.KillRequest),
                ("Exec", task_v2_pb2.ExecProcessRequest),
                ("ResizePty", task_v2_pb2.ResizePtyRequest),
                ("CloseIO", task_v2_pb2.CloseIORequest),
                ("Update", task_v2_pb2.UpdateTaskRequest),
                ("Wait", task_v2_pb2.WaitRequest),
                ("Stats", task_v2_pb2.StatsRequest),
                ("Connect", task_v2_pb2.ConnectRequest),
            ]
        ),
        ("State", task_v2_pb2.StateRequest(), "check container id '': not a valid identifier"),
        ("Start", task_v2_pb2.StartRequest(id="c1", exec_id="/"), "check exec id '/': not a valid identifier"),
        ("Exec", task_v2_pb2.ExecProcessRequest(id="c1"), "check exec id '': not a valid identifier"),
        (
            "Create",
            task_v2_pb2.CreateTaskRequest(id="c2", bundle="relative/b"),
            "check bundle of task 'c2': 'relative/b' is not an absolute path",
        ),
        (
            "Create",
            task_v2_pb2.CreateTaskRequest(id="c2", bundle="/b", checkpoint="/cp"),
            "create task 'c2': restoring from a checkpoint is not supported",
        ),
        ("Kill", task_v2_pb2.KillRequest(id="c1", signal=65), "kill task 'c1': 65 is not a signal number"),
        ("Exec", exec_with(type_url=PROCESS_URL, value=b"[]"), "decode process of exec 'e1': not a JSON object"),
        (
            "Exec",
            exec_with(type_url="x.Y", value=b"{}"),
            "decode process of exec 'e1': type 'x.Y' is not 'opencontainers/runtime-spec/1/Process'",
        ),
        ("Exec", exec_with(value=b"[" * 100_000), "decode process of exec 'e1': not JSON: nested too deeply"),
        (
            "Update",
            task_v2_pb2.UpdateTaskRequest(id="c1", resources=AnyMessage(type_url=RESOURCES_URL, value=b"{")),
            "decode resources of task 'c1': not JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)",
        ),
    ],
)
async def test_bad_input_is_refused_by_name(method: str, request_: Message, text: str) -> None:
    async with bench() as b:
        error = await b.fails(method, request_)

        assert (error.code, error.message) == (Code.INVALID_ARGUMENT, text)
        assert b.sandboxes.calls == []


@pytest.mark.parametrize("method", [m.name for m in task_v2_pb2.DESCRIPTOR.services_by_name["Task"].methods])
async def test_bytes_that_are_no_message_are_refused(method: str) -> None:
    async with bench() as b:
        error = await b.fails(method, b"\xff\xff\xff")

        assert error.code == Code.INVALID_ARGUMENT
        assert error.message.startswith("decode ")
        assert b.sandboxes.calls == []


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidArgument, 3),
        (errors.NotFound, 5),
        (errors.AlreadyExists, 6),
        (errors.FailedPrecondition, 9),
        (errors.Unavailable, 14),
        (errors.DeadlineExceeded, 4),
        (errors.ResourceExhausted, 8),
        (errors.Unimplemented, 12),
        (errors.Internal, 13),
    ],
)
async def test_errors_of_ours_keep_code_and_text(kind: type[errors.ShimError], code: int) -> None:
    async with bench() as b:
        b.sandboxes.failures["start"] = kind("start container 'c1': because")

        error = await b.fails("Start", task_v2_pb2.StartRequest(id="c1"))

        assert (error.code, error.message) == (code, "start container 'c1': because")


async def test_unforeseen_error_names_its_type_to_the_caller_and_everything_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        async with bench() as b:
            b.sandboxes.failures["start"] = KeyError("secret")

            error = await b.fails("Start", task_v2_pb2.StartRequest(id="c1"))

            assert error.code == Code.INTERNAL
            assert error.message == "serve Start: KeyError (hint: the shim's log has more)"

    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


async def test_memory_that_is_used_up_is_a_limit_of_the_node() -> None:
    async with bench() as b:
        b.sandboxes.failures["start"] = MemoryError()

        error = await b.fails("Start", task_v2_pb2.StartRequest(id="c1"))

        assert error.code == Code.RESOURCE_EXHAUSTED
        assert error.message.startswith("serve Start: ENOMEM (cannot allocate memory) (hint: ")


async def test_unknown_container_is_not_found() -> None:
    async with bench() as b:
        assert (await b.fails("State", task_v2_pb2.StateRequest(id="c9"))).code == Code.NOT_FOUND
