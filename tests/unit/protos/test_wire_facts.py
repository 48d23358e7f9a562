"""Every message, field, enum and service equals the table of wire facts in tests/golden/wire_facts.json.

The table was taken from a list of the protocols' names, numbers and types, apart from the `.proto` files, so a slip in
one of the two shows. A field reads `number type`, a method `[request, reply]`; types have their full names.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.message import Message

from protos.agent import agent_pb2, oci_pb2
from protos.containerd import bootstrap_pb2, runc_options_pb2, task_v2_pb2, task_v3_pb2

ROOT = Path(__file__).parents[3]
FACTS: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/golden/wire_facts.json").read_text())
PART, WHOLE = "runtime.v1.shim.", "runtime.v1."
SCALARS = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_") and name not in ("TYPE_MESSAGE", "TYPE_ENUM")
}


def _modules() -> list[ModuleType]:
    paths = sorted((ROOT / "protos").rglob("*_pb2.py"))
    return [importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in paths]


FILES: list[FileDescriptor] = [module.DESCRIPTOR for module in _modules()]


def _type(field: Any) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        return f"map<{_type(key)},{_type(value)}>"
    named = field.message_type or field.enum_type
    text = named.full_name if named is not None else SCALARS[field.type]
    if field.is_repeated:
        return f"repeated {text}"
    group = field.containing_oneof
    if group is None:
        return text
    proto = descriptor_pb2.DescriptorProto()
    field.containing_type.CopyToProto(proto)
    is_optional = next(one for one in proto.field if one.name == field.name).proto3_optional
    return f"optional {text}" if is_optional else f"{text} (oneof {group.name})"


def _messages(container: Any) -> Iterator[Any]:
    types = container.message_types_by_name if isinstance(container, FileDescriptor) else container.nested_types_by_name
    for message in types.values():
        if not message.GetOptions().map_entry:
            yield message
            yield from _messages(message)


def _declared_messages() -> dict[str, dict[str, str]]:
    return {
        message.full_name: {field.name: f"{field.number} {_type(field)}" for field in message.fields}
        for file in FILES
        for message in _messages(file)
    }


def _declared_enums() -> dict[str, dict[str, int]]:
    containers: list[Any] = [*FILES, *(message for file in FILES for message in _messages(file))]
    return {
        enum.full_name: {value.name: value.number for value in enum.values}
        for container in containers
        for enum in container.enum_types_by_name.values()
    }


def _method(method: Any) -> list[str]:
    sent = ("stream " if method.client_streaming else "") + method.input_type.full_name
    received = ("stream " if method.server_streaming else "") + method.output_type.full_name
    return [sent, received]


def _declared_services() -> dict[str, dict[str, list[str]]]:
    return {
        service.full_name: {method.name: _method(method) for method in service.methods}
        for file in FILES
        for service in file.services_by_name.values()
    }


@pytest.mark.parametrize(
    ("kind", "declared"),
    [("messages", _declared_messages), ("enums", _declared_enums), ("services", _declared_services)],
    ids=["messages", "enums", "services"],
)
def test_declared_names_numbers_and_types_equal_the_table(kind: str, declared: Callable[[], dict[str, Any]]) -> None:
    found = {name: value for name, value in declared().items() if not name.startswith(PART)}

    assert found == FACTS[kind]


@pytest.mark.parametrize(
    ("kind", "declared"), [("messages", _declared_messages), ("enums", _declared_enums)], ids=["messages", "enums"]
)
def test_a_part_of_the_cri_is_as_in_the_whole(kind: str, declared: Callable[[], dict[str, Any]]) -> None:
    parts = {name: value for name, value in declared().items() if name.startswith(PART)}

    assert parts
    for name, members in parts.items():
        whole = FACTS[kind][name.replace(PART, WHOLE)]
        for member, value in members.items():
            assert whole[member] == (value.replace(PART, WHOLE) if isinstance(value, str) else value)


def test_all_files_are_proto3_so_that_presence_and_packing_are_the_wire_s() -> None:
    protos: list[descriptor_pb2.FileDescriptorProto] = []
    for file in FILES:
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        protos.append(proto)

    assert {proto.name: proto.syntax for proto in protos} == {file.name: "proto3" for file in FILES}


# Hand-made bytes: tag = number << 3 | wire type (0 varint, 2 length-delimited).
@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (task_v2_pb2.KillRequest(id="a", signal=9, all=True), "0a0161 1809 2001"),
        (task_v3_pb2.KillRequest(id="a", signal=9, all=True), "0a0161 1809 2001"),
        (agent_pb2.WaitProcessResponse(status=-1), "08ffffffffffffffffff01"),
        (agent_pb2.ReseedRandomDevRequest(data=b"\x00"), "120100"),
        (agent_pb2.MemAgentMemcgConfig(disabled=False), "0800"),
        (oci_pb2.LinuxSyscall(errnoret=0), "1800"),
        (oci_pb2.User(AdditionalGids=[1, 2]), "1a02 0102"),
        (bootstrap_pb2.BootstrapParams(log_level=bootstrap_pb2.LOG_LEVEL_DEBUG), "18fcffffffffffffffff01"),
        (bootstrap_pb2.BootstrapParams(socket_dir=""), "4a00"),
        (runc_options_pb2.Options(systemd_cgroup=True, task_api_version=2), "4801 6802"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
def test_bytes_on_the_wire_are_these(message: Message, wire: str) -> None:
    data = message.SerializeToString(deterministic=True)

    assert data == bytes.fromhex(wire)
    assert type(message).FromString(data) == message


def test_numbers_unknown_to_an_open_enum_survive_the_round_trip() -> None:
    params = bootstrap_pb2.BootstrapParams.FromString(bytes.fromhex("1863"))

    assert params.log_level == 99
    assert params.SerializeToString() == bytes.fromhex("1863")


def test_number_once_used_by_runc_options_stays_reserved() -> None:
    proto = descriptor_pb2.DescriptorProto()
    runc_options_pb2.Options.DESCRIPTOR.CopyToProto(proto)

    assert [(taken.start, taken.end) for taken in proto.reserved_range] == [(8, 9)]
