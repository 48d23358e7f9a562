"""Peers that send a real guest agent nonsense, too much, or never read: refused, and all others are served."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
from pathlib import Path

import pytest
from guest_agent_client import AgentClient, CallError, HostedAgent, refused

from protos.agent import agent_pb2
from pyshim.ttrpc import Code

pytestmark = pytest.mark.root


def test_unknown_service_and_method_are_unimplemented(client: AgentClient) -> None:
    for service, method in (("grpc.AgentService", "Nonsense"), ("no.such.Service", "Check")):
        with refused(Code.UNIMPLEMENTED):
            client.wait(client.send_raw(service, method, b""))


def test_a_payload_that_is_no_message_is_refused(client: AgentClient) -> None:
    with refused(Code.INVALID_ARGUMENT, "decode CreateContainerRequest"):
        client.wait(client.send_raw("grpc.AgentService", "CreateContainer", b"\xff\xff\xff"))


def test_garbage_on_one_connection_leaves_the_others_served(hosted_agent: HostedAgent, client: AgentClient) -> None:
    random_ = random.Random(7)
    for _ in range(20):
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(str(hosted_agent.folder / "agent.sock"))
        raw.settimeout(5)
        with contextlib.suppress(OSError):
            raw.sendall(random_.randbytes(random_.randrange(1, 5000)))
        raw.close()

    assert client.call("Check").status == 1


def test_random_messages_to_every_method_end_in_answers(own_agent: HostedAgent) -> None:
    harmful = {"SetGuestDateTime", "DestroySandbox", "AddSwap", "AddSwapPath", "OnlineCPUMem", "MemHotplugByProbe"}
    harmful |= {"ReseedRandomDev", "GetOOMEvent"}
    random_ = random.Random(11)
    methods = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].methods_by_name
    client = own_agent.connect()
    for name in sorted(set(methods) - harmful):
        for _ in range(5):
            fields = bytes(
                byte
                for number in range(1, 6)
                for byte in (number << 3 | 2, 3, *random_.choice([b"abc", b"\x0a\x01x", b"/x/"]))
            )
            with contextlib.suppress(CallError):
                client.wait(client.send_raw("grpc.AgentService", name, fields))
    assert client.call("Check").status == 1
    assert "Traceback" not in own_agent.log()


def test_an_oversized_message_is_refused_and_the_connection_lives(client: AgentClient) -> None:
    frame = (5 << 20).to_bytes(4, "big") + (1).to_bytes(4, "big") + b"\x01\x00"
    client._socket.sendall(frame + bytes(5 << 20))
    client._core._next_stream_id = 3

    assert client.call("Check").status == 1


def test_a_peer_that_does_not_read_its_replies_stops_being_served_but_others_are(
    hosted_agent: HostedAgent, client: AgentClient, cid: str
) -> None:
    client.run(hosted_agent.spec(["head", "-c", "100000000", "/dev/zero"]), cid)
    deaf = hosted_agent.connect()
    deaf._socket.settimeout(0.5)
    sent = 0
    try:
        for _ in range(1000):
            deaf.send("ReadStdout", agent_pb2.ReadStreamRequest(container_id=cid, len=1 << 20))
            sent += 1
    except TimeoutError:
        pass

    memory = int(Path(f"/proc/{hosted_agent.pid()}/statm").read_text().split()[1]) * 4096
    assert client.call("Check").status == 1
    assert memory < 150 << 20
    client.signal(cid, signal.SIGKILL)
