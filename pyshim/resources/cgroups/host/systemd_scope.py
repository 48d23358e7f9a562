"""Starts a transient scope of systemd over the system bus, with jeepney, which is imported with this module.

Sources: org.freedesktop.systemd1(5), "StartTransientUnit"; systemd.scope(5); systemd.resource-control(5).
"""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from jeepney import DBusAddress, DBusErrorResponse, MatchRule, Message, message_bus, new_method_call
from jeepney.bus import get_bus
from jeepney.io.blocking import DBusConnection, prep_socket
from jeepney.wrappers import unwrap_msg

from pyshim.host.os_errors import describe_os_error
from pyshim.model.confinement import Scope
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Unavailable

TIMEOUT_S = 10.0
SYSTEM_BUS = "unix:path=/run/dbus/system_bus_socket"
_MANAGER = DBusAddress(
    "/org/freedesktop/systemd1", bus_name="org.freedesktop.systemd1", interface="org.freedesktop.systemd1.Manager"
)
# Signals come from systemd's unique bus name, which only the bus can map, so only the contents are compared.
_OURS = {"type": "signal", "interface": _MANAGER.interface, "member": "JobRemoved", "path": _MANAGER.object_path}
_JOB_REMOVED = MatchRule(**_OURS)
_OF_SYSTEMD = MatchRule(**_OURS, sender=_MANAGER.bus_name)
_UNIT_EXISTS = "org.freedesktop.systemd1.UnitExists"

Property = tuple[str, tuple[str, object]]


def scope_properties(scope: Scope, pid: int) -> list[Property]:
    """The unit's properties. It is delegated: only this shim writes below it and into its limits."""
    return [
        ("Description", ("s", scope.description)),
        ("Slice", ("s", scope.slice)),
        ("Delegate", ("b", True)),
        ("DefaultDependencies", ("b", False)),
        ("PIDs", ("au", [pid])),
        ("CPUAccounting", ("b", True)),
        ("MemoryAccounting", ("b", True)),
        ("TasksAccounting", ("b", True)),
        ("IOAccounting", ("b", True)),
    ]


def start_scope(scope: Scope, pid: int, *, bus: str = SYSTEM_BUS, timeout_s: float = TIMEOUT_S) -> None:
    """The unit is active and has the process `pid`.

    Raises Unavailable without a bus, DeadlineExceeded when systemd says nothing, FailedPrecondition when it refuses.
    """
    action = f"start unit '{scope.unit}'"
    silence = DeadlineExceeded(f"{action}: systemd did not answer within {timeout_s:g} s")
    deadline = time.monotonic() + timeout_s
    try:
        with _connected(bus, timeout_s) as connection:
            _start(connection, scope, pid, action, deadline)
    except DBusErrorResponse as error:
        hint = " (hint: a sandbox of this id runs, or did not end cleanly)" if error.name == _UNIT_EXISTS else ""
        raise FailedPrecondition(f"{action}: systemd refuses: {error.name}: {_text(error)}{hint}") from error
    except OSError as error:
        if isinstance(error, TimeoutError) or time.monotonic() >= deadline:
            raise silence from error
        raise Unavailable(f"{action}: use the system bus: {describe_os_error(error)}") from error
    except (ValueError, EOFError) as error:
        raise Unavailable(f"{action}: use the system bus: {error}") from error


@contextmanager
def _connected(bus: str, timeout_s: float) -> Iterator[DBusConnection]:
    """A connection that ends after `timeout_s`: jeepney has no deadline for the first answer of a bus."""
    with closing(prep_socket(get_bus(bus), timeout=timeout_s)) as sock:
        cut = threading.Timer(timeout_s, _cut, (sock,))
        cut.daemon = True
        cut.start()
        try:
            with DBusConnection(sock) as connection:
                yield connection
        finally:
            cut.cancel()


def _start(connection: DBusConnection, scope: Scope, pid: int, action: str, deadline: float) -> None:
    def left_s() -> float:
        return max(deadline - time.monotonic(), 0.001)

    def ask(call: Message) -> tuple[object, ...]:
        answer: tuple[object, ...] = unwrap_msg(connection.send_and_get_reply(call, timeout=left_s()))
        return answer

    ask(message_bus.AddMatch(_OF_SYSTEMD))
    ask(new_method_call(_MANAGER, "Subscribe"))  # without a subscriber systemd sends no signals at all
    with connection.filter(_JOB_REMOVED, bufsize=1000) as ended:
        body: tuple[object, ...] = (scope.unit, "replace", scope_properties(scope, pid), [])
        (job,) = ask(new_method_call(_MANAGER, "StartTransientUnit", "ssa(sv)a(sa(sv))", body))
        while True:
            _, ended_job, _, result = connection.recv_until_filtered(ended, timeout=left_s()).body
            if ended_job == job:
                break
    if result != "done":
        raise FailedPrecondition(f"{action}: systemd's job ended with '{result}'")


def _text(error: DBusErrorResponse) -> str:
    """The text of an error; empty without one."""
    return str(error.data[0]) if error.data else ""


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
