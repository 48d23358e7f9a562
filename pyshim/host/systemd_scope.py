"""A transient scope of systemd's, asked for over the system bus; jeepney speaks D-Bus and is imported when this is.

Sources: org.freedesktop.systemd1(5), "StartTransientUnit"; systemd.scope(5); systemd.resource-control(5).
"""

import time

from jeepney import DBusAddress, DBusErrorResponse, MatchRule, MessageType, message_bus, new_method_call
from jeepney.io.blocking import DBusConnection, open_dbus_connection

from pyshim.host.launch import describe_os_error
from pyshim.model.cgroups import Scope
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Unavailable

TIMEOUT_S = 10.0
_MANAGER = DBusAddress(
    "/org/freedesktop/systemd1", bus_name="org.freedesktop.systemd1", interface="org.freedesktop.systemd1.Manager"
)
_JOB_REMOVED = MatchRule(
    type="signal",
    sender=_MANAGER.bus_name,
    interface=_MANAGER.interface,
    member="JobRemoved",
    path=_MANAGER.object_path,
)
_UNIT_EXISTS = "org.freedesktop.systemd1.UnitExists"

Property = tuple[str, tuple[str, object]]


def scope_properties(scope: Scope, pid: int) -> list[Property]:
    """What the unit is asked to be. Delegated: below it, and into its limits, nobody but this shim writes.

    Where systemd manages cgroup v2 it is also the one who can attach device programs: the shim mounts what it is
    given, so block devices are allowed as a whole, character devices by name.
    """
    properties: list[Property] = [
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
    if scope.devices:
        properties += [
            ("DevicePolicy", ("s", "closed")),
            ("DeviceAllow", ("a(ss)", [(name, "rwm") for name in scope.devices])),
        ]
    return properties


def start_scope(scope: Scope, pid: int, *, bus: str = "SYSTEM", timeout_s: float = TIMEOUT_S) -> None:
    """The unit is active and has the process `pid`.

    Raises Unavailable without a bus, DeadlineExceeded when systemd says nothing, FailedPrecondition when it refuses.
    """
    action = f"start unit '{scope.unit}'"
    deadline = time.monotonic() + timeout_s
    try:
        with open_dbus_connection(bus) as connection:
            _start(connection, scope, pid, action, deadline)
    except DBusErrorResponse as error:
        hint = " (hint: a sandbox of this id runs, or did not end cleanly)" if error.name == _UNIT_EXISTS else ""
        raise FailedPrecondition(f"{action}: systemd refuses: {error.name}: {error.data}{hint}") from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"{action}: systemd did not answer within {timeout_s:g} s") from error
    except OSError as error:
        raise Unavailable(f"{action}: use the system bus: {describe_os_error(error)}") from error
    except (ValueError, EOFError) as error:
        raise Unavailable(f"{action}: use the system bus: {error}") from error


def _start(connection: DBusConnection, scope: Scope, pid: int, action: str, deadline: float) -> None:
    def left_s() -> float:
        return max(deadline - time.monotonic(), 0.001)

    connection.send_and_get_reply(message_bus.AddMatch(_JOB_REMOVED), timeout=left_s(), unwrap=True)
    # Without a subscriber systemd sends no signals at all.
    connection.send_and_get_reply(new_method_call(_MANAGER, "Subscribe"), timeout=left_s(), unwrap=True)
    body: tuple[object, ...] = (scope.unit, "replace", scope_properties(scope, pid), [])
    call = new_method_call(_MANAGER, "StartTransientUnit", "ssa(sv)a(sa(sv))", body)
    with connection.filter(_JOB_REMOVED, bufsize=1000) as ended:
        (job,) = connection.send_and_get_reply(call, timeout=left_s(), unwrap=True)
        while True:
            signal = connection.recv_until_filtered(ended, timeout=left_s())
            if signal.header.message_type is MessageType.signal and signal.body[1] == job:
                break
    result = signal.body[3]
    if result != "done":
        raise FailedPrecondition(f"{action}: systemd's job ended with '{result}'")
