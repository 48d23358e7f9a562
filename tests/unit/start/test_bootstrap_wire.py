"""The small wire format against the protobuf library."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.containerd.bootstrap_pb2 import BootstrapParams, BootstrapResult, LogLevel
from protos.containerd.task_v2_pb2 import DeleteResponse
from pyshim.start.wire import WireError, decode, encode, signed


@given(st.integers(-(2**31), 2**31 - 1), st.text(), st.text())
def test_encoded_fields_read_back_by_protobuf(version: int, address: str, protocol: str) -> None:
    message = BootstrapResult.FromString(encode((1, version), (2, address), (3, protocol)))

    assert (message.version, message.address, message.protocol) == (version, address, protocol)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**40), st.integers(0, 999_999_999))
def test_encoding_is_byte_for_byte_that_of_protobuf(pid: int, status: int, seconds: int, nanos: int) -> None:
    message = DeleteResponse(pid=pid, exit_status=status)
    message.exited_at.seconds, message.exited_at.nanos = seconds, nanos
    moment = encode((1, seconds), (2, nanos))

    expected = message.SerializeToString()

    assert encode((1, pid), (2, status), (3, moment)) == (expected if moment else expected.removesuffix(b"\x1a\x00"))


@given(st.text(), st.text(), st.sampled_from(sorted(LogLevel.values())))
def test_protobuf_messages_are_read(instance: str, namespace: str, level: int) -> None:
    data = BootstrapParams(
        instance_id=instance,
        namespace=namespace,
        log_level=level,  # type: ignore[arg-type]
    ).SerializeToString()

    fields = dict(decode(data))

    assert fields.get(1, b"") == instance.encode()
    assert fields.get(2, b"") == namespace.encode()
    value = fields.get(3, 0)
    assert isinstance(value, int)
    assert signed(value) == level


@pytest.mark.parametrize(
    "data",
    [
        b"\x08",
        b"\x08\x80",
        b"\x08" + b"\xff" * 10 + b"\x01",
        b"\x0a\x05abc",
        b"\x0b",
        b"\x00\x01",
        b"\x0d\x01",
        b"\x0f",
    ],
    ids=["no value", "cut varint", "long varint", "cut bytes", "group", "field 0", "cut fixed32", "type 7"],
)
def test_malformed_message_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)
