"""`pyshim exec SANDBOX [CMD]`: a shell in the guest, or one command of it, through the guest's debug console.

The console (`debug_console_enabled`) gives each connection to a vsock port a shell on a terminal. It cannot run one
command or report its end, so the command is typed to the shell, between two printed lines that mark where its output
begins and ends, and its input as lines of base64.
"""

import base64
import os
import re
import select
import shlex
import socket
import sys
import termios
import threading
import time
import tty
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click

from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from pyshim.model.ids import SandboxId
from pyshim.node.cli.output import examples
from pyshim.node.cli.sandboxes import sandbox_argument, sandbox_id, snapshot_of, state_dir_option
from pyshim.node.cli.signals import undone_at_signals

CONSOLE_PORT = 1026
"""The port on which kata-agent and our guest listen; the shim passes it as a kernel parameter."""
_CONNECT_TIMEOUT_S = 10.0
_CHUNK_BYTES = 16 * 1024
_HANG_UP_S = 5.0
"""Seconds for an interrupted command and the guest's shell to end; one that ignores Ctrl-C may run on."""
_MAX_HANDSHAKE_BYTES = 64
_END_OF_INPUT = b"\x04"
"""Ctrl-D: at the beginning of a line it ends a shell."""
_INTERRUPT = b"\x03"
"""Ctrl-C."""
_HINT = "(hint: debug_console_enabled = true in [agent.kata] gives new sandboxes a console)"
_LOST = 255
"""Exit code if the connection ends before the command, as with ssh."""
_MAX_LINE_BYTES = 4000
"""A terminal takes lines of 4096 bytes. Source: termios(3), MAX_CANON of Linux."""


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples(
        "pyshim exec 1a2b",
        "pyshim exec 1a2b sh -c 'dmesg | tail'",
        "tar -c directory | pyshim exec -i 1a2b tar -x -C /tmp",
    ),
)
@click.option("-i", "--stdin", "with_input", is_flag=True, help="CMD gets the input of this command.")
@click.option("--kata-debug-port", "port", type=click.IntRange(1, 2**32 - 1), default=CONSOLE_PORT, show_default=True)
@state_dir_option
@sandbox_argument
@click.argument("command_words", metavar="[CMD]...", nargs=-1, type=click.UNPROCESSED)
def command(with_input: bool, port: int, state_dir: str, sandbox: str, command_words: tuple[str, ...]) -> int:
    """Open a shell in the guest of a sandbox, or run CMD there.

    The shell is the guest's own, outside of all containers, as root. The sandbox must have been started with
    debug_console_enabled, and its agent must be reached over vsock. Options stand before SANDBOX.

    With CMD, this command prints its output and ends with its exit code. CMD gets no input without --stdin.
    """
    found = sandbox_id(sandbox, state_dir)
    if not command_words:
        with connect(found, state_dir, port) as console, hung_up(console):
            return interact(console)
    read = (lambda: os.read(sys.stdin.fileno(), _CHUNK_BYTES)) if with_input else None
    return run_in_guest(found, state_dir, command_words, port=port, write=_write, read=read)


def run_in_guest(
    found: SandboxId,
    state_dir: str,
    words: tuple[str, ...],
    *,
    write: Callable[[bytes], object],
    read: Callable[[], bytes] | None = None,
    port: int = CONSOLE_PORT,
    silence_s: float | None = None,
) -> int:
    """The exit code of the command, whose input `read` returns in pieces, an empty one at the end; 255 if the console
    ends before it.

    Raises DeadlineExceeded when the guest neither writes nor takes input for `silence_s`; NotFound, FailedPrecondition
    and Unavailable as `connect`; InvalidArgument for words that cannot be typed.
    """
    line, begin, end = marked_line(words, with_input=read is not None)
    output = MarkedOutput(begin, end)
    sender = None
    taken = 0

    def read_counted() -> bytes:
        nonlocal taken
        assert read is not None
        taken += 1
        return read()

    with connect(found, state_dir, port) as console, hung_up(console, output):
        console.settimeout(silence_s)
        with suppress(ConnectionError):
            console.sendall(line)
        while output.exit_code is None:
            before = taken
            try:
                data = _received(console)
            except TimeoutError:
                if taken != before:
                    continue
                raise DeadlineExceeded(f"run command in sandbox '{found}': silent for {silence_s:g} s") from None
            if not data:
                break
            write(output.feed(data))
            if output.has_begun and read is not None and sender is None:
                # In a thread, as a command may write much before it reads. It may wait for input for ever: a daemon.
                sender = threading.Thread(target=_type_input, args=(console, read_counted), daemon=True)
                sender.start()
    if output.exit_code is None:
        print("pyshim: run command in guest: the console ended before the command did", file=sys.stderr)
        return _LOST
    return output.exit_code


def _received(console: socket.socket) -> bytes:
    """Empty once the console has ended."""
    with suppress(ConnectionError):
        return console.recv(_CHUNK_BYTES)
    return b""


@contextmanager
def hung_up(console: socket.socket, output: "MarkedOutput | None" = None) -> Iterator[None]:
    """At the end, also by SIGINT, SIGTERM or SIGHUP, nothing writes to the console any more, or _HANG_UP_S have passed.

    A command with `output` that has not ended is interrupted, as by Ctrl-C, unless it has left so much input unread
    that no more is taken. A connection must not end before: when kata-agent cannot pass output on, it waits for the
    shell to end by itself, and in a guest with one CPU it does nothing else any more.
    """
    with undone_at_signals():
        try:
            yield
        finally:
            with suppress(OSError):
                _hang_up(console, output)


def _hang_up(console: socket.socket, output: "MarkedOutput | None") -> None:
    """Raises OSError: TimeoutError after _HANG_UP_S, others when the console has ended."""
    deadline = time.monotonic() + _HANG_UP_S

    def received() -> bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        console.settimeout(left_s)
        return console.recv(_CHUNK_BYTES)

    if output is not None and output.exit_code is None:
        console.settimeout(_HANG_UP_S)
        console.sendall(_INTERRUPT)
        while output.exit_code is None:
            data = received()
            if not data:
                return
            output.feed(data)
    console.shutdown(socket.SHUT_WR)
    while received():
        pass


def connect(found: SandboxId, state_dir: str, port: int) -> socket.socket:
    """A connection to the debug console. Raises FailedPrecondition if there cannot be one, Unavailable if none
    answers."""
    address = snapshot_of(found, state_dir).agent_address
    if not address:
        raise FailedPrecondition(f"exec in sandbox '{found}': its VM does not run")
    where: tuple[int, int] | str
    if match := re.fullmatch(r"vsock://(\d{1,10}):\d+", address):
        family, where = socket.AF_VSOCK, (int(match[1]), port)
    elif match := re.fullmatch(r"hvsock://(.+):\d+", address):
        family, where = socket.AF_UNIX, match[1]
    else:
        how = "a serial port" if address.startswith("serial://") else f"'{address}'"
        raise FailedPrecondition(
            f"exec in sandbox '{found}': its agent is reached over {how}, and a debug console needs vsock"
            " (hint: 'pyshim check' says whether this host has vhost-vsock; agent_channel = \"vhost-user\" needs none)"
        )
    place = f"{address.rpartition(':')[0]}:{port}"
    doing = f"connect debug console of sandbox '{found}' at '{place}'"
    try:
        console = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            console.settimeout(_CONNECT_TIMEOUT_S)
            console.connect(where)
            if family == socket.AF_UNIX:
                _shake_hands(console, port, doing)
            console.settimeout(None)
        except BaseException:
            console.close()
            raise
    except OSError as error:
        text = "it does not answer" if isinstance(error, TimeoutError) else describe_os_error(error)
        raise Unavailable(f"{doing}: {text} {_HINT}") from error
    return console


def _shake_hands(console: socket.socket, port: int, doing: str) -> None:
    """The vsock back end has connected us to the guest's port. Source: Firecracker's docs/vsock.md."""
    console.sendall(b"CONNECT %d\n" % port)
    answer = b""
    while not answer.endswith(b"\n") and len(answer) < _MAX_HANDSHAKE_BYTES:
        byte = console.recv(1)  # the bytes after the line are the console's output
        if not byte:
            break
        answer += byte
    if not answer.startswith(b"OK "):
        raise Unavailable(f"{doing}: nothing listens in the guest {_HINT}")


def _type_input(console: socket.socket, read: Callable[[], bytes]) -> None:
    rest = b""
    with suppress(OSError):  # the console has ended, which its reader reports
        while data := read():
            rest += data
            whole = len(rest) // 3 * 3  # groups of 3 bytes need no padding, which would end the text
            console.sendall(base64.encodebytes(rest[:whole]))
            rest = rest[whole:]
        console.sendall(base64.encodebytes(rest) + _END_OF_INPUT)


def interact(console: socket.socket) -> int:
    """Copies standard input to the console and its output back, until either ends."""
    stdin = sys.stdin.fileno()
    saved = termios.tcgetattr(stdin) if os.isatty(stdin) else None
    try:
        if saved is not None:
            tty.setraw(stdin)
        _copy(console, stdin)
    except ConnectionError:
        pass
    finally:
        if saved is not None:
            termios.tcsetattr(stdin, termios.TCSADRAIN, saved)
    return 0


def _copy(console: socket.socket, stdin: int) -> None:
    reading = [console.fileno(), stdin]
    while True:
        ready, _, _ = select.select(reading, [], [])
        if stdin in ready:
            data = os.read(stdin, _CHUNK_BYTES)
            if not data:
                reading.remove(stdin)
            console.sendall(data or _END_OF_INPUT)
        if console.fileno() in ready:
            data = console.recv(_CHUNK_BYTES)
            if not data:
                return
            _write(data)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def marked_line(words: tuple[str, ...], *, with_input: bool = False) -> tuple[bytes, bytes, bytes]:
    """The line to type, and the markers that begin the lines before and after the output.

    The typed line has each marker in two parts, so that the terminal's echo is not taken for it; the shell prints it
    whole. No "exit" is typed at the end: a guest may close the console at once and lose the last output. `cat` takes
    the shell's place, also after Ctrl-C, until the console is closed: it reads any input that the command leaves, which
    the shell would execute, and prints no prompt, for which there may be no client any more.
    """
    token = uuid.uuid4().hex
    quoted = shlex.join(words)
    if any(character < " " and character != "\t" for character in quoted):
        raise InvalidArgument("type command: it has a line break or another control character")
    before, run = ("stty -echo || exit; ", f"base64 -d | {quoted}") if with_input else ("", f"{quoted} </dev/null")
    begin, end = f"printf '\\n%s%s\\n' b {token}", f'printf "\\n%s%s:%d\\n" e {token} $?; exec cat >/dev/null'
    line = f"{before}trap '{end}' INT; {begin}; {run}; {end}\n".encode()
    if len(line) > _MAX_LINE_BYTES:
        raise InvalidArgument(f"type command: {len(line)} bytes with its marks, at most {_MAX_LINE_BYTES}")
    return line, f"b{token}".encode(), f"e{token}:".encode()


class MarkedOutput:
    """The output between the markers, piece by piece, with the program's line ends in place of the terminal's."""

    def __init__(self, begin: bytes, end: bytes) -> None:
        self._begin = re.compile(b"\n" + re.escape(begin) + b"\r?\n")
        self._begin_bytes = len(begin) + 3
        """The longest part of a begin marker that may have arrived."""
        self._end = re.compile(b"\r?\n" + re.escape(end) + b"(\\d{1,3})\r?\n")
        self._kept_bytes = len(end) + 16
        """The last bytes are not written yet: they may begin an end marker."""
        self._waiting = b"\n"
        self.has_begun = False
        self.exit_code: int | None = None

    def feed(self, data: bytes) -> bytes:
        """The bytes that are certainly output."""
        if self.exit_code is not None:
            return b""
        self._waiting += data
        if not self.has_begun:
            found = self._begin.search(self._waiting)
            if found is None:
                self._waiting = self._waiting[-self._begin_bytes :]
                return b""
            self.has_begun = True
            self._waiting = self._waiting[found.end() :]
        if found := self._end.search(self._waiting):
            self.exit_code = int(found[1]) & 0xFF
            return _plain(self._waiting[: found.start()])
        ready = len(self._waiting) - self._kept_bytes
        if ready <= 0:
            return b""
        if self._waiting[ready - 1 : ready] == b"\r":
            ready -= 1
        out, self._waiting = self._waiting[:ready], self._waiting[ready:]
        return _plain(out)


def _plain(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n")
