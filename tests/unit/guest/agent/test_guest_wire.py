"""The guest agent's own protobuf tables and codec against the generated modules."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
from google.protobuf import empty_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError as PbDecodeError
from google.protobuf.message import Message as PbMessage
from google.protobuf.message_factory import GetMessageClass

from guest.agent import service
from guest.agent.wire import codec, schema
from guest.agent.wire.jsontext import dumps
from protos.agent import agent_pb2, health_pb2, oci_pb2, types_pb2

_SCALARS = {
    FieldDescriptor.TYPE_STRING: "s",
    FieldDescriptor.TYPE_BYTES: "y",
    FieldDescriptor.TYPE_BOOL: "b",
    FieldDescriptor.TYPE_INT32: "i",
    FieldDescriptor.TYPE_INT64: "I",
    FieldDescriptor.TYPE_UINT32: "u",
    FieldDescriptor.TYPE_UINT64: "U",
    FieldDescriptor.TYPE_ENUM: "e",
}


def _descriptors() -> dict[str, Descriptor]:
    found = {"Empty": empty_pb2.Empty.DESCRIPTOR}
    for module in (agent_pb2, health_pb2, oci_pb2, types_pb2):
        for name, descriptor in module.DESCRIPTOR.message_types_by_name.items():
            assert name not in found, f"two messages called {name}"
            found[name] = descriptor
    return found


DESCRIPTORS = _descriptors()


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _kind(field: FieldDescriptor) -> str:
    return field.message_type.name if field.message_type is not None else _SCALARS[field.type]


def _as_text(field: FieldDescriptor) -> str:
    if _is_map(field):
        assert field.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
        return f"{field.name}:{field.number}:%{_kind(field.message_type.fields_by_name['value'])}"
    label = "*" if field.is_repeated else "?" if field.has_presence and field.message_type is None else ""
    return f"{field.name}:{field.number}:{label}{_kind(field)}"


def test_every_message_of_the_api_is_known() -> None:
    assert set(schema.names()) == set(DESCRIPTORS)


@pytest.mark.parametrize("name", sorted(DESCRIPTORS))
def test_fields_numbers_and_types_are_the_generated_modules(name: str) -> None:
    ours = {
        f"{field.name}:{field.number}:{field.label}{field.kind}" for field in schema.message_type(name).by_name.values()
    }

    assert ours == {_as_text(field) for field in DESCRIPTORS[name].fields}


def _random_value(kind: str, random_: random.Random) -> object:
    return {
        "s": lambda: random_.choice(["", "a", "ü€𝄞", "x" * 200]),
        "y": lambda: random_.randbytes(random_.choice([0, 1, 300])),
        "b": lambda: random_.random() < 0.5,
        "i": lambda: random_.choice([0, 1, -1, 2**31 - 1, -(2**31)]),
        "e": lambda: random_.choice([0, 1]),
        "I": lambda: random_.choice([0, -1, 2**63 - 1, -(2**63)]),
        "u": lambda: random_.choice([0, 1, 127, 128, 2**32 - 1]),
        "U": lambda: random_.choice([0, 300, 2**64 - 1]),
    }[kind]()


def _fill(message: PbMessage, random_: random.Random) -> None:
    for field in message.DESCRIPTOR.fields:
        if random_.random() < 0.2:
            continue
        target = getattr(message, field.name)
        if _is_map(field):
            value = field.message_type.fields_by_name["value"]
            for key in ("", "k1", "key two"):
                if value.message_type is not None:
                    _fill(target[key], random_)
                else:
                    target[key] = _random_value(_kind(value), random_)
        elif field.message_type is not None:
            for nested in [target.add() for _ in range(2)] if field.is_repeated else [target]:
                _fill(nested, random_)
                if not field.is_repeated:
                    nested.SetInParent()
        elif field.is_repeated:
            target.extend(_random_value(_kind(field), random_) for _ in range(3))
        else:
            setattr(message, field.name, _random_value(_kind(field), random_))


def _samples(name: str) -> Iterator[PbMessage]:
    random_ = random.Random(name)
    for _ in range(5):
        message = GetMessageClass(DESCRIPTORS[name])()
        _fill(message, random_)
        yield message


@pytest.mark.parametrize("name", sorted(DESCRIPTORS))
def test_what_protobuf_writes_is_read_and_written_back_the_same(name: str) -> None:
    for message in _samples(name):
        again = codec.encode(codec.decode(name, message.SerializeToString()))

        assert type(message).FromString(again) == message


def test_fields_read_as_attributes_with_protos_defaults() -> None:
    message = codec.decode(
        "CreateContainerRequest", agent_pb2.CreateContainerRequest(container_id="c").SerializeToString()
    )

    assert (message.container_id, message.exec_id, message.sandbox_pidns) == ("c", "", False)
    assert message.storages == []
    assert message.OCI.Process.Args == []
    assert not message.has("OCI")
    with pytest.raises(AttributeError, match="CreateContainerRequest has no field 'nonsense'"):
        _ = message.nonsense


def test_explicit_presence_tells_zero_from_absent() -> None:
    zero = codec.decode("LinuxSyscall", oci_pb2.LinuxSyscall(errnoret=0).SerializeToString())

    assert zero.has("errnoret")
    assert not codec.decode("LinuxSyscall", b"").has("errnoret")


def test_unknown_fields_are_skipped() -> None:
    foreign = oci_pb2.Spec(Version="1", Hostname="h")

    message = codec.decode("OOMEvent", foreign.SerializeToString())

    assert message.container_id == "1"


def test_a_message_split_in_two_is_merged() -> None:
    first = oci_pb2.Spec(Process=oci_pb2.Process(Args=["a"], Cwd="/x")).SerializeToString()
    second = oci_pb2.Spec(Process=oci_pb2.Process(Args=["b"])).SerializeToString()

    message = codec.decode("Spec", first + second)

    assert (message.Process.Args, message.Process.Cwd) == (["a", "b"], "/x")


def test_unpacked_numbers_are_read_like_packed_ones() -> None:
    assert codec.decode("AddSwapRequest", b"\x08\x02\x08\x03\x0a\x02\x04\x05").PCIPath == [2, 3, 4, 5]


def test_a_decode_error_names_message_and_field() -> None:
    with pytest.raises(codec.DecodeError, match=r"decode OOMEvent\.container_id: truncated"):
        codec.decode("OOMEvent", b"\x0a\x05ab")


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_sequence_does_more_than_raise_decode_error(seed: int) -> None:
    random_ = random.Random(seed)
    name = random_.choice(sorted(DESCRIPTORS))
    valid = next(_samples(name)).SerializeToString()
    for _ in range(200):
        data = bytearray(valid if random_.random() < 0.7 else random_.randbytes(random_.randrange(60)))
        for _ in range(random_.randrange(1, 6)):
            if data:
                data[random_.randrange(len(data))] = random_.randrange(256)
        del data[random_.randrange(len(data) + 1) :]
        try:
            codec.encode(codec.decode(name, bytes(data)))
        except codec.DecodeError:
            continue


@pytest.mark.parametrize("seed", range(5))
def test_what_we_refuse_protobuf_refuses(seed: int) -> None:
    random_ = random.Random(seed)
    refused = 0
    for _ in range(500):
        data = random_.randbytes(random_.randrange(1, 12))
        try:
            codec.decode("LinuxResources", data)
        except codec.DecodeError as error:
            if "wire type" in str(error):
                continue  # protobuf keeps a field of the wrong wire type as an unknown one
            refused += 1
            with pytest.raises(PbDecodeError):
                oci_pb2.LinuxResources.FromString(data)
    assert refused > 0


def test_every_method_of_the_services_has_a_function() -> None:
    wanted = {
        "grpc.AgentService": agent_pb2.DESCRIPTOR.services_by_name["AgentService"],
        "grpc.Health": health_pb2.DESCRIPTOR.services_by_name["Health"],
    }
    routes = service.routes()

    assert set(routes) == set(wanted)
    for name, descriptor in wanted.items():
        assert set(routes[name]) == set(descriptor.methods_by_name)
        for method, route in routes[name].items():
            module_name, function_name, request_name = route.lstrip("~").split()
            module = __import__(f"guest.agent.calls.{module_name}", fromlist=["x"])
            assert callable(getattr(module, function_name))
            assert request_name == descriptor.methods_by_name[method].input_type.name


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": [1, -2, 2**64 - 1, True, False, None, "x"], "b": {"c": []}},
        {'quote"\\': "line\nfeed \x00 \x7f ü 𝄞 \udc80"},
        ["", [[]], {"": ""}],
    ],
)
def test_json_text_reads_back_the_same(value: object) -> None:
    assert json.loads(dumps(value)) == value


def test_json_refuses_what_has_no_json() -> None:
    with pytest.raises(TypeError, match="no JSON for float"):
        dumps({"a": 1.5})
