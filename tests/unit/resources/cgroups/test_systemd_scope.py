"""Requests to systemd over D-Bus, and every answer it may give: a bus and a systemd in a thread."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from jeepney import DBusAddress, HeaderFields, new_error, new_method_return, new_signal
from jeepney.low_level import Message, Parser

from pyshim.model.confinement import Scope
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from pyshim.resources.cgroups.host.systemd_scope import start_scope

SCOPE = Scope(unit="cri-containerd-c1.scope", slice="kubepods-pod1.slice", description="a test")
MANAGER = DBusAddress("/org/freedesktop/systemd1", interface="org.freedesktop.systemd1.Manager")
JOB = "/org/freedesktop/systemd1/job/7"


class FakeSystemd:
    """One connection's worth of bus and manager; `answer` is what StartTransientUnit does."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Any]] = []
        self._serial = 100

    def serve(self, listener: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                parser = Parser()
                data = self._authenticate(connection)
                while data := data or connection.recv(65536):
                    parser.add_data(data)
                    data = b""
                    while (message := parser.get_next_message()) is not None:
                        for reply in self._replies(message):
                            self._serial += 1
                            reply.header.fields[HeaderFields.sender] = ":1.0"
                            connection.sendall(reply.serialise(serial=self._serial))

    def _authenticate(self, connection: socket.socket) -> bytes:
        """The last line and the bytes after it."""
        text = b""
        while b"BEGIN\r\n" not in text:
            if not (data := connection.recv(4096)):
                return b""
            text += data
            if data.lstrip(b"\0").startswith(b"AUTH"):
                connection.sendall(b"OK 0123456789abcdef0123456789abcdef\r\n")
            elif data.startswith(b"NEGOTIATE_UNIX_FD"):
                connection.sendall(b"AGREE_UNIX_FD\r\n")
        return text.partition(b"BEGIN\r\n")[2]

    def _replies(self, call: Message) -> Iterator[Message]:
        member = call.header.fields[HeaderFields.member]
        self.asked.append((member, call.body))
        if self.answer == "a deaf bus":
            return
        if member == "Hello":
            yield new_method_return(call, "s", (":1.1",))
        elif member != "StartTransientUnit":
            yield new_method_return(call)
        elif self.answer == "refuse":
            yield new_error(call, "org.freedesktop.systemd1.UnitExists", "s", ("Unit c1.scope already exists.",))
        elif self.answer != "silence":
            # Another unit's job ends first, and its own may end before the call is answered.
            for job in ("/other", JOB):
                yield new_signal(MANAGER, "JobRemoved", "uoss", (7, job, SCOPE.unit, self.answer))
            yield new_method_return(call, "o", (JOB,))


@contextmanager
def bus(directory: Path, answer: str) -> Iterator[tuple[str, FakeSystemd]]:
    systemd = FakeSystemd(answer)
    path = str(directory / "bus")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(20)
        thread = threading.Thread(target=systemd.serve, args=(listener,))
        thread.start()
        yield f"unix:path={path}", systemd
        thread.join()


def test_the_unit_is_asked_for_with_the_process_and_delegated(tmp_path: Path) -> None:
    with bus(tmp_path, "done") as (address, systemd):
        start_scope(SCOPE, 4711, bus=address)

    unit, mode, properties, auxiliary = dict(systemd.asked)["StartTransientUnit"]
    assert (unit, mode, auxiliary) == ("cri-containerd-c1.scope", "replace", [])
    found = dict(properties)
    assert found["PIDs"] == ("au", [4711])
    assert (found["Slice"], found["Delegate"]) == (("s", "kubepods-pod1.slice"), ("b", True))
    assert "DevicePolicy" not in found, "the shim is in the scope and mounts disks"
    assert [member for member, _ in systemd.asked] == ["Hello", "AddMatch", "Subscribe", "StartTransientUnit"]


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (
            "refuse",
            FailedPrecondition,
            "systemd refuses: org.freedesktop.systemd1.UnitExists.*a sandbox of this id runs",
        ),
        ("failed", FailedPrecondition, "systemd's job ended with 'failed'"),
        ("silence", DeadlineExceeded, "systemd did not answer within 0.3 s"),
        ("a deaf bus", DeadlineExceeded, "systemd did not answer within 0.3 s"),
    ],
)
def test_a_systemd_that_does_not_do_it_is_named(tmp_path: Path, answer: str, error: type[Exception], text: str) -> None:
    with (
        bus(tmp_path, answer) as (address, _),
        pytest.raises(error, match=f"start unit 'cri-containerd-c1.scope': {text}"),
    ):
        start_scope(SCOPE, 1, bus=address, timeout_s=0.3 if error is DeadlineExceeded else 10)


def test_without_a_bus_it_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="use the system bus: ENOENT"):
        start_scope(SCOPE, 1, bus=f"unix:path={tmp_path}/none")


def test_a_bus_that_hangs_up_is_unavailable(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "bus"))
        listener.listen()

        def hang_up() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        started = time.monotonic()
        with pytest.raises((Unavailable, DeadlineExceeded), match="start unit"):
            start_scope(SCOPE, 1, bus=f"unix:path={tmp_path}/bus")
        thread.join()
        assert time.monotonic() - started < 20
