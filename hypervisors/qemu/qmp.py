"""QMP, typed: the driver's commands to QEMU and their answers, over the `qemu.qmp` library (0.0.6, pinned).

The library speaks the protocol. This layer adds: a deadline for every command, errors with the command's name,
delivery of events without a store of them, one descriptor at a time, and one future for the end of the connection.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from qemu.qmp import (
    ConnectError,
    EventListener,
    ExecInterruptedError,
    ExecuteError,
    Message,
    QMPClient,
    QMPError,
    StateError,
)
from qemu.qmp import Runstate as LibraryState
from qemu.qmp.models import Greeting

from pyshim.host.untrusted_text import printable
from pyshim.model.errors import DeadlineExceeded, Internal, Unavailable
from pyshim.model.observation import span

log = logging.getLogger(__name__)

COMMAND_TIMEOUT_S = 25.0
"""Seconds for QEMU's answer to a command; less than CHANGE_S, the caller's deadline, whose error says less."""
UNPLUG_TIMEOUT_S = 15.0
"""Seconds for a guest to release a device. A guest with a driver for it does so at once."""
OLDEST_QEMU = (5, 0)
_MAX_TEXT = 500
_MAX_QUOTE = 200


class QmpError(Internal):
    """QEMU's answer does not have the shape of its schema."""


class QmpCommandFailed(Internal):
    """QEMU refused a command; `description` is QEMU's text."""

    def __init__(self, command: str, error_class: str, description: str) -> None:
        super().__init__(f"ask qemu {command!r}: {description}")
        self.error_class = error_class
        self.description = description


class QmpTimeout(DeadlineExceeded):
    """QEMU did not answer in time. The command may have taken effect, or may yet."""


class QmpGone(Unavailable):
    """The connection has ended."""


class QmpEvent(NamedTuple):
    name: str
    data: Mapping[str, Any]

    def text(self, key: str) -> str:
        """A string member, made printable; empty when missing."""
        value = self.data.get(key)
        return printable(value)[:_MAX_TEXT] if isinstance(value, str) else ""


class Vcpu(NamedTuple):
    cpu_index: int
    thread_id: int


class CpuSlot(NamedTuple):
    type: str
    props: Mapping[str, int]
    qom_path: str
    """Empty while the slot is free."""


class MemorySize(NamedTuple):
    base_bytes: int
    plugged_bytes: int


class MemoryModule(NamedTuple):
    """A DIMM or NVDIMM, and where the guest has it."""

    slot: int
    start_bytes: int
    size_bytes: int
    is_persistent: bool


class Migration(NamedTuple):
    status: str
    """Empty before the first one."""
    error: str


class _EventSink(EventListener):
    """Delivers events and stores none; the library's own listeners store every event that they accept."""

    def __init__(self, deliver: Callable[[QmpEvent], None]) -> None:
        super().__init__()
        self._deliver = deliver

    def accept(self, event: Message) -> bool:
        name, data = event.get("event"), event.get("data", {})
        if isinstance(name, str) and isinstance(data, dict):
            self._deliver(QmpEvent(name, data))
        return False


class Monitor:
    """One QMP session. `on_event` sees every event, synchronously and in order."""

    def __init__(self, *, name: str, on_event: Callable[[QmpEvent], None]) -> None:
        self._name = name
        self._client = QmpClient(name, log.getChild("wire"))
        self._client.register_listener(_EventSink(self._dispatch))
        self._on_event = on_event
        self._expectations: list[tuple[Callable[[QmpEvent], bool], asyncio.Future[QmpEvent]]] = []
        self._fd_lock = asyncio.Lock()
        self._socket: socket.socket | None = None
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watcher: asyncio.Task[None] | None = None
        self.version = (0, 0, 0)

    async def connect(self, connected: socket.socket, timeout_s: float) -> None:
        """The session is open over `connected`, which this object owns now. Raises QmpTimeout, QmpGone or QmpError."""
        connected.setblocking(False)
        self._socket = connected
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.connect(connected)
        except TimeoutError:
            connected.close()
            raise QmpTimeout(f"greet qemu of {self._name!r}: no answer within {timeout_s:g} s") from None
        except ConnectError as error:
            connected.close()
            kind = QmpGone if isinstance(error.exc, EOFError | OSError) else QmpError
            raise kind(f"greet qemu of {self._name!r}: {_cause(error.exc)}") from error
        except BaseException:
            connected.close()
            raise
        self._watcher = asyncio.create_task(self._watch(), name=f"qmp/{self._name}")
        self._check_version()

    def _check_version(self) -> None:
        greeting = self._client.greeting
        version = greeting.QMP.version.get("qemu", {}) if greeting is not None else {}
        numbers = tuple(version.get(key) if isinstance(version, dict) else None for key in ("major", "minor", "micro"))
        if not all(isinstance(number, int) for number in numbers):
            raise QmpError(f"greet qemu of {self._name!r}: no version in its greeting")
        self.version = (int(numbers[0] or 0), int(numbers[1] or 0), int(numbers[2] or 0))
        if self.version[:2] < OLDEST_QEMU:
            found = ".".join(map(str, self.version))
            raise QmpError(
                f"greet qemu of {self._name!r}: version {found} is older than {OLDEST_QEMU[0]}.{OLDEST_QEMU[1]}"
            )

    async def _watch(self) -> None:
        """Waits for the end of the connection, disconnects, and sets `_closed`. The only caller of `disconnect`."""
        while self._client.runstate is LibraryState.RUNNING:
            await self._client.runstate_changed()
        reason = "closed by qemu"
        try:
            await self._client.disconnect()
        except EOFError:
            pass
        except (OSError, QMPError, asyncio.QueueFull, ValueError, TypeError, RecursionError) as error:
            # The library does not wrap ValueError (invalid UTF-8, a line beyond its limit), TypeError (an id that
            # cannot be hashed) and RecursionError (JSON nested too deeply).
            reason = _cause(error)
        self._closed.set_result(reason)
        for _, future in self._expectations:
            if not future.done():
                future.set_exception(self._gone("wait for an event"))

    @property
    def is_open(self) -> bool:
        return self._watcher is not None and not self._closed.done()

    async def closed(self) -> str:
        """Waits until the connection has ended and all its events are delivered. Returns why it ended."""
        return await asyncio.shield(self._closed)

    async def close(self) -> None:
        """The connection has ended. Idempotent."""
        if self._watcher is None:
            return
        if self._socket is not None and not self._closed.done():
            # Shut down the socket: the library's disconnect would first wait for a peer that may never read.
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        await asyncio.shield(self._watcher)

    def _gone(self, doing: str) -> QmpGone:
        reason = self._closed.result() if self._closed.done() else "not connected"
        return QmpGone(f"{doing} of {self._name!r}: qmp connection {reason}")

    async def execute(
        self, command: str, arguments: Mapping[str, object] | None = None, *, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> object:
        """QEMU's answer. Raises QmpCommandFailed, QmpTimeout, QmpGone or QmpError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.execute(command, arguments)
        except TimeoutError:
            raise QmpTimeout(f"ask qemu {command!r}: no answer within {timeout_s:g} s") from None
        except ExecuteError as error:
            text = printable(str(error))[:_MAX_TEXT]
            raise QmpCommandFailed(command, error.error_class, text) from error
        except (ExecInterruptedError, StateError) as error:
            raise self._gone(f"ask qemu {command!r}") from error
        except QMPError as error:
            raise QmpError(f"ask qemu {command!r}: {_cause(error)}") from error

    def _dispatch(self, event: QmpEvent) -> None:
        log.debug("event", extra={"vm": self._name, "event": event.name})
        for matches, future in self._expectations:
            if not future.done() and matches(event):
                future.set_result(event)
        self._on_event(event)

    @contextmanager
    def expecting(self, matches: Callable[[QmpEvent], bool]) -> Iterator[asyncio.Future[QmpEvent]]:
        """The first matching event from now on. To be entered before the command that causes the event."""
        future: asyncio.Future[QmpEvent] = asyncio.get_running_loop().create_future()
        entry = (matches, future)
        self._expectations.append(entry)
        try:
            yield future
        finally:
            self._expectations.remove(entry)
            if not future.cancel() and not future.cancelled():
                future.exception()  # retrieved, so that asyncio does not report it

    # Commands, most of them with QEMU's names.

    async def cont(self) -> None:
        await self.execute("cont")

    async def stop(self) -> None:
        await self.execute("stop")

    async def quit(self, timeout_s: float) -> None:
        await self.execute("quit", timeout_s=timeout_s)

    async def leave_out_shared_memory(self) -> None:
        """Migration leaves out shared memory. QEMU has had this capability since 4.0 and calls it unstable."""
        capability = {"capability": "x-ignore-shared", "state": True}
        await self.execute("migrate-set-capabilities", {"capabilities": [capability]})

    async def migrate(self, uri: str) -> None:
        """QEMU has begun to write the machine's state; `migration` returns its progress."""
        await self.execute("migrate", {"uri": uri})

    async def migrate_incoming(self, uri: str) -> None:
        """QEMU, started with `-incoming defer`, has begun to read the machine's state."""
        await self.execute("migrate-incoming", {"uri": uri})

    async def migration(self) -> Migration:
        name = "query-migrate"
        answer = _mapping(await self.execute(name), name)
        status, error = answer.get("status", ""), answer.get("error-desc", "")
        return Migration(str(status), printable(str(error))[:_MAX_TEXT])

    async def status(self) -> str:
        return _text(_mapping(await self.execute("query-status"), "query-status"), "status", "query-status")

    async def is_vhost_started(self, path: str) -> bool | None:
        """True once the guest's driver uses the virtio device at `path` and its back end is started.

        None if this QEMU does not say. `x-` commands are unstable: an answer of another shape counts as none.
        Source: QEMU's qapi/virtio.json, since 7.2.
        """
        try:
            answer = await self.execute("x-query-virtio-status", {"path": path})
        except QmpCommandFailed as error:
            log.debug("no status of virtio device", extra={"vm": self._name, "error": str(error)})
            return None
        started = answer.get("vhost-started") if isinstance(answer, dict) else None
        return started if isinstance(started, bool) else None

    async def cpus(self) -> tuple[Vcpu, ...]:
        """All vCPUs, sorted by index."""
        name = "query-cpus-fast"
        items = _list(await self.execute(name), name)
        return tuple(sorted(Vcpu(_int(item, "cpu-index", name), _int(item, "thread-id", name)) for item in items))

    async def cpu_slots(self) -> tuple[CpuSlot, ...]:
        """All slots for vCPUs, used or free, lowest socket first; QEMU lists the highest first."""
        name = "query-hotpluggable-cpus"
        slots = []
        for item in _list(await self.execute(name), name):
            props = {key: value for key, value in _mapping(item.get("props"), name).items() if isinstance(value, int)}
            path = item.get("qom-path", "")
            slots.append(CpuSlot(_text(item, "type", name), props, path if isinstance(path, str) else ""))
        return tuple(sorted(slots, key=lambda slot: sorted(slot.props.items(), reverse=True)))

    async def memory_size(self) -> MemorySize:
        """The guest's RAM. QEMU counts persistent memory as plugged, too: the root image, which is none."""
        name = "query-memory-size-summary"
        answer = _mapping(await self.execute(name), name)
        plugged = answer.get("plugged-memory", 0)
        plugged_bytes = plugged if isinstance(plugged, int) else 0
        if plugged_bytes:
            persistent = sum(module.size_bytes for module in await self.memory_modules() if module.is_persistent)
            plugged_bytes = max(0, plugged_bytes - persistent)
        return MemorySize(_int(answer, "base-memory", name), plugged_bytes)

    async def memory_modules(self) -> tuple[MemoryModule, ...]:
        name = "query-memory-devices"
        modules = []
        for item in _list(await self.execute(name), name):
            kind, data = item.get("type"), _mapping(item.get("data"), name)
            if kind in ("dimm", "nvdimm"):
                slot, start_bytes, size_bytes = (_int(data, key, name) for key in ("slot", "addr", "size"))
                modules.append(MemoryModule(slot, start_bytes, size_bytes, kind == "nvdimm"))
        return tuple(modules)

    async def device_add(
        self, driver: str, device_id: str, fields: Mapping[str, object], timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        await self.execute("device_add", {"driver": driver, "id": device_id, **fields}, timeout_s=timeout_s)

    async def device_remove(self, device_id: str, timeout_s: float = UNPLUG_TIMEOUT_S) -> None:
        """The guest has released the device and QEMU has removed it. Idempotent.

        Raises QmpTimeout when the guest does not release it in time, QmpError when it refuses. For the inner half of a
        virtio device there is another DEVICE_DELETED, without the id.
        """

        def concerns(event: QmpEvent) -> bool:
            names = ("DEVICE_DELETED", "DEVICE_UNPLUG_GUEST_ERROR")
            return event.name in names and event.data.get("device") == device_id

        with self.expecting(concerns) as answered:
            try:
                await self.execute("device_del", {"id": device_id})
            except QmpCommandFailed as error:
                if error.error_class == "DeviceNotFound":
                    return
                if "in the process of unplug" not in error.description:
                    raise
            try:
                async with asyncio.timeout(timeout_s):
                    event = await answered
            except TimeoutError:
                raise QmpTimeout(f"unplug {device_id!r}: the guest did not let go within {timeout_s:g} s") from None
        if event.name != "DEVICE_DELETED":
            raise QmpError(f"unplug {device_id!r}: the guest refused")

    async def blockdev_add(self, node: Mapping[str, object]) -> None:
        await self.execute("blockdev-add", node)

    async def blockdev_del(self, node_name: str) -> None:
        await self.execute("blockdev-del", {"node-name": node_name})

    async def block_resize(self, node_name: str, size_bytes: int) -> None:
        """QEMU has announced the new size of the node's disk to the guest."""
        await self.execute("block_resize", {"node-name": node_name, "size": size_bytes})

    async def chardev_add(self, fields: Mapping[str, object]) -> None:
        await self.execute("chardev-add", fields)

    async def chardev_remove(self, chardev_id: str) -> None:
        await self.execute("chardev-remove", {"id": chardev_id})

    async def object_add(self, fields: Mapping[str, object]) -> None:
        await self.execute("object-add", fields)

    async def object_del(self, object_id: str) -> None:
        await self.execute("object-del", {"id": object_id})

    async def netdev_add(self, fields: Mapping[str, object]) -> None:
        await self.execute("netdev_add", fields)

    async def netdev_del(self, netdev_id: str) -> None:
        await self.execute("netdev_del", {"id": netdev_id})

    async def qom_get(self, path: str, name: str) -> object:
        return await self.execute("qom-get", {"path": path, "property": name})

    async def qom_set(self, path: str, name: str, value: object) -> None:
        await self.execute("qom-set", {"path": path, "property": name, "value": value})

    async def getfd(self, name: str, fd: int) -> None:
        """QEMU has a copy of `fd` called `name`."""
        await self._execute_with_fd("getfd", {"fdname": name}, fd)

    async def closefd(self, name: str) -> None:
        await self.execute("closefd", {"fdname": name})

    async def add_fd(self, fd: int) -> int:
        """QEMU has a copy of `fd` in a new set. Returns the set's number: QEMU opens it as `/dev/fdset/NUMBER`."""
        return _int(_mapping(await self._execute_with_fd("add-fd", None, fd), "add-fd"), "fdset-id", "add-fd")

    async def remove_fd(self, fdset: int) -> None:
        await self.execute("remove-fd", {"fdset-id": fdset})

    async def _execute_with_fd(self, command: str, arguments: Mapping[str, object] | None, fd: int) -> object:
        """Like `execute`, with a copy of `fd` for the command. One at a time: QEMU keeps only the newest descriptor."""
        name = (arguments or {}).get("fdname")
        what = f"descriptor {name!r}" if name else "descriptor"
        async with self._fd_lock:
            try:
                self._client.send_fd_scm(fd)
            except (QMPError, OSError) as error:
                raise QmpGone(f"send {what} to qemu for {command!r}: {_cause(error)}") from error
            return await self.execute(command, arguments)

    async def dump_guest_memory(self, fd_name: str, *, paging: bool) -> None:
        """QEMU has begun to write the guest's memory to the descriptor `fd_name`; the event DUMP_COMPLETED ends it."""
        fields = {"paging": paging, "protocol": f"fd:{fd_name}", "detach": True}
        await self.execute("dump-guest-memory", fields)


def _cause(error: BaseException) -> str:
    if isinstance(error, EOFError):
        return "closed by qemu"
    return printable(str(error) or type(error).__name__)[:_MAX_TEXT]


def _malformed(command: str, problem: str, value: object) -> QmpError:
    """The error quotes the beginning of the malformed value."""
    quoted = printable(json.dumps(value)[:_MAX_QUOTE])
    return QmpError(f"ask qemu {command!r}: its answer {problem}: {quoted}")


def _mapping(value: object, command: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _malformed(command, "has no object where one belongs", value)
    return value


def _list(value: object, command: str) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise _malformed(command, "is not a list", value)
    return [_mapping(item, command) for item in value]


def _int(item: Mapping[str, Any], key: str, command: str) -> int:
    value = item.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _malformed(command, f"lacks the number {key!r}", item)
    return value


def _text(item: Mapping[str, Any], key: str, command: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _malformed(command, f"lacks the text {key!r}", item)
    return value


MAX_LINE_BYTES = 256 * 1024
"""Bytes of the largest message that is read; a list of 1,000 vCPUs has fewer. A message is decoded on the event loop:
one of this size takes up to 10 ms, one of the library's default of 10 MiB up to 1,400 ms and 500 MiB."""

BURST, PAUSE_S = 256, 0.1
"""Messages that are read in a row, and the seconds of pause after them: a QEMU that sends messages all the time costs a
tenth of a CPU. A pod's QEMU sends some tens of messages in its life."""


class QmpClient(QMPClient):
    """Stores no events; logs everything at debug."""

    def __init__(self, name: str, log: logging.Logger) -> None:
        super().__init__(name, readbuflen=MAX_LINE_BYTES)
        self.logger = _AtDebugLevel(log, {})  # type: ignore[assignment]
        self._received = 0
        self.events.event_filter = lambda _event: False

    async def _get_greeting(self) -> Greeting:
        # The time in which QEMU starts is not the shim's own.
        with span("wait for vmm"):
            return await super()._get_greeting()

    async def _bh_recv_message(self) -> None:
        await super()._bh_recv_message()
        # The library reads as long as there are bytes: thousands of events would block the loop.
        self._received += 1
        await asyncio.sleep(0 if self._received % BURST else PAUSE_S)

    # The library formats every message, even if the log drops it.

    def _cb_outbound(self, msg: Message) -> Message:
        return super()._cb_outbound(msg) if self.logger.isEnabledFor(logging.DEBUG) else msg

    def _cb_inbound(self, msg: Message) -> Message:
        return super()._cb_inbound(msg) if self.logger.isEnabledFor(logging.DEBUG) else msg


class _AtDebugLevel(logging.LoggerAdapter[logging.Logger]):
    """Logs at debug: each failure that the library logs is also raised."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        super().log(logging.DEBUG, msg, *args, **kwargs)
