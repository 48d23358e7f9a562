"""Our nouns as the agent's messages, and stream data as they come."""

from typing import Any

import pytest
from google.protobuf.message import DecodeError

from protos.agent import agent_pb2 as pb
from pyshim.agent import translate
from pyshim.model.errors import InvalidArgument
from pyshim.model.guest import NetworkAddress, NetworkInterface, NetworkRoute


def test_a_spec_becomes_the_agents_message() -> None:
    spec = translate.spec(
        {
            "ociVersion": "1.1.0",
            "process": {
                "args": ["sh"],
                "user": {"uid": 1, "additionalGids": [5]},
                "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 2**64 - 1, "soft": 1}],
                "capabilities": {"bounding": ["CAP_KILL"]},
                "oomScoreAdj": -998,
            },
            "linux": {
                "sysctl": {"a": "b"},
                "seccomp": {"syscalls": [{"names": ["read"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}]},
                "resources": {"memory": {"limit": 9, "disableOOMKiller": True}},
                "unknownMember": {"x": 1},
            },
        },
        "c1",
    )

    assert spec.Version == "1.1.0"
    assert spec.Process.User.UID == 1
    assert list(spec.Process.User.AdditionalGids) == [5]
    assert spec.Process.Rlimits[0].Hard == 2**64 - 1
    assert spec.Process.OOMScoreAdj == -998
    assert dict(spec.Linux.Sysctl) == {"a": "b"}
    assert spec.Linux.Seccomp.Syscalls[0].errnoret == 38
    assert spec.Linux.Resources.Memory.DisableOOMKiller


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"process": {"args": "sh"}}, "args"),
        ({"process": {"user": {"uid": -1}}}, "uid"),
        ({"process": {"user": 7}}, "user"),
        ({"linux": {"sysctl": {"a": 5}}}, "sysctl"),
        ({"mounts": [3]}, "mounts"),
        ({"process": {"rlimits": {"a": 1}}}, "rlimits"),
    ],
)
def test_a_member_that_does_not_fit_is_named(spec: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"spec of 'c1'.*{named}"):
        translate.spec(spec, "c1")


def test_network_values_keep_their_families() -> None:
    interface = translate.interface(
        NetworkInterface(
            name="eth0",
            addresses=(
                NetworkAddress(address="10.0.0.2", prefix_length=24),
                NetworkAddress(address="fd00::2", prefix_length=64),
            ),
            mtu=1400,
            mac="02:00:00:00:00:01",
            flags=0,
            type="veth",
            device_path="",
        )
    )
    route = translate.route(
        NetworkRoute(destination="", gateway="fd00::1", device="eth0", source="", scope=0, family=6, flags=0, mtu=0)
    )

    assert [(a.family, a.address, a.mask) for a in interface.IPAddresses] == [
        (0, "10.0.0.2", "24"),
        (1, "fd00::2", "64"),
    ]
    assert (route.family, route.gateway) == (1, "fd00::1")


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 1 << 20, 3 << 20])
def test_stream_data_is_what_protobuf_says(size: int) -> None:
    data = bytes(index & 0xFF for index in range(min(size, 1000))).ljust(size, b"z")

    assert bytes(translate.stream_data(pb.ReadStreamResponse(data=data).SerializeToString())) == data


@pytest.mark.parametrize(
    ("payload", "data"),
    [
        pytest.param(b"\x0a\x01a\x0a\x02bc", b"bc", id="twice: the last counts"),
        pytest.param(b"\x10\x05\x0a\x01a", b"a", id="unknown field first"),
        pytest.param(b"\x0a\x01a\x10\x05", b"a", id="unknown field last"),
        pytest.param(b"\x0a\x81\x00a", b"a", id="a length longer than need be"),
    ],
)
def test_stream_data_in_an_odd_encoding(payload: bytes, data: bytes) -> None:
    assert bytes(translate.stream_data(payload)) == data


@pytest.mark.parametrize("payload", [b"\x0a", b"\x0a\x05ab", b"\x0a\xff\xff\xff\xff\xff", b"\x0a\x80"])
def test_stream_data_that_is_cut_is_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        translate.stream_data(payload)
