"""A stand-in for systemd-logind on a bus of its own: it lends locks that delay a shutdown, and says that one begins.

Source: org.freedesktop.login1(5), "Inhibit" and "PrepareForShutdown"; systemd's "Inhibitor Locks".
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from jeepney import DBusAddress, HeaderFields, Message, MessageType, new_method_return, new_signal
from jeepney.bus_messages import message_bus
from jeepney.io.blocking import DBusConnection, open_dbus_connection

from integration.framework.waiting import eventually

_NAME = "org.freedesktop.login1"
_MANAGER = DBusAddress("/org/freedesktop/login1", bus_name=_NAME, interface=f"{_NAME}.Manager")
_MAX_DELAY_US = 3600 * 10**6
"""More than any kubelet of a test asks for: it would have to change logind's configuration else."""
_CONFIG = """\
<busconfig>
  <type>session</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/>
    <allow eavesdrop="true"/>
    <allow own="*"/>
  </policy>
</busconfig>
"""


class Logind:
    def __init__(self, connection: DBusConnection) -> None:
        self._connection = connection
        self._locks: list[int] = []
        self._ends = threading.Event()

    @property
    def is_delayed(self) -> bool:
        """True if a lock is held."""
        return any(not select.select([lock], [], [], 0)[0] for lock in self._locks)

    def begin_shutdown(self) -> None:
        self._connection.send(new_signal(_MANAGER, "PrepareForShutdown", "b", (True,)))

    def serve(self) -> None:
        """Until `end`."""
        while not self._ends.is_set():
            with contextlib.suppress(TimeoutError):
                self._answer(self._connection.receive(timeout=0.2))

    def end(self) -> None:
        self._ends.set()
        for lock in self._locks:
            os.close(lock)

    def _answer(self, call: Message) -> None:
        if call.header.message_type is not MessageType.method_call:
            return
        member = call.header.fields[HeaderFields.member]
        if member == "Get":  # of the property InhibitDelayMaxUSec
            self._connection.send(new_method_return(call, "v", (("t", _MAX_DELAY_US),)))
        elif member == "Inhibit":
            # The holder's end closes when it is done, or dies.
            ours, theirs = os.pipe()
            self._locks.append(ours)
            self._connection.send(new_method_return(call, "h", (theirs,)))
            os.close(theirs)


@contextlib.contextmanager
def logind(socket: Path) -> Iterator[Logind]:
    """A bus at `socket` with logind's name on it, until the end of the block."""
    config = socket.with_suffix(".conf")
    config.write_text(_CONFIG.format(socket=socket))
    bus = subprocess.Popen(["dbus-daemon", "--nofork", "--nopidfile", f"--config-file={config}"])
    try:
        eventually(socket.exists, what="the bus listens")
        with open_dbus_connection(bus=f"unix:path={socket}", enable_fds=True) as connection:
            connection.send_and_get_reply(message_bus.RequestName(_NAME))
            made = Logind(connection)
            server = threading.Thread(target=made.serve, name="logind")
            server.start()
            try:
                yield made
            finally:
                made.end()
                server.join()
    finally:
        bus.terminate()
        bus.wait()
        socket.unlink(missing_ok=True)
