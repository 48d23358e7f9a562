"""The Task API refuses bad requests, and each error has its code and text."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from service_bench import PROCESS_URL, RESOURCES_URL, V3, bench

from protos.containerd import task_v2_pb2
from pyshim.model import errors
from pyshim.ttrpc import Code

pytestmark = pytest.mark.usefixtures("fast_clock")


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
        ("Exec", exec_with(value=b"[" * 100_000), "decode process of exec 'e1': nested too deeply"),
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


async def test_unknown_container_is_not_found() -> None:
    async with bench() as b:
        assert (await b.fails("State", task_v2_pb2.StateRequest(id="c9"))).code == Code.NOT_FOUND


@pytest.mark.parametrize(("service", "method"), [("containerd.task.v4.Task", "State"), (V3, "Migrate")])
async def test_unknown_service_and_method_are_unimplemented(service: str, method: str) -> None:
    async with bench() as b:
        assert (await b.fails(method, b"", service)).code == Code.UNIMPLEMENTED
