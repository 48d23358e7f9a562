"""`pyshim exec`: the debug console of a guest, played by a shell on a terminal behind a vsock back end's socket."""

import base64
import contextlib
import os
import pty
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.model.errors import DeadlineExceeded, InvalidArgument
from pyshim.model.ids import SandboxId
from pyshim.node.cli.command import run
from pyshim.node.cli.debug_console import MarkedOutput, marked_line, run_in_guest
from tests.unit.state import states

PROJECT = Path(__file__).parents[4]


class Guest:
    """A hybrid vsock socket behind which each connection to port 1026 gets an interactive shell, as in a guest."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.path = f"{directory}/vsock"
        self.answer = b"OK 77\n"
        self.ends_at_once = False
        self.shell = "/bin/sh"
        self.left: queue.Queue[str] = queue.Queue()
        """What ran in place of each shell once its client had gone."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def save(self, address: str) -> None:
        states.save(self.directory, "ab12", agent_address=address)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        if self._connection is not None:
            with contextlib.suppress(OSError):  # closed; one that a client has kept would keep the shell
                self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connection = connection
            with connection:
                asked = b""
                while not asked.endswith(b"\n"):
                    byte = connection.recv(1)
                    if not byte:
                        break
                    asked += byte
                connection.sendall(self.answer if asked == b"CONNECT 1026\n" else b"")
                if self.answer.startswith(b"OK") and not self.ends_at_once:
                    self._shell(connection)

    def _shell(self, connection: socket.socket) -> None:
        master, slave = pty.openpty()
        environment = {**os.environ, "PS1": "# ", "ENV": ""}
        with subprocess.Popen(
            ["setsid", "--ctty", self.shell, "-i"], stdin=slave, stdout=slave, stderr=slave, env=environment
        ) as shell:
            os.close(slave)

            def inward() -> None:
                with contextlib.suppress(OSError):  # the shell has ended, or the client
                    while data := connection.recv(4096):
                        os.write(master, data)
                self.left.put(settled(shell.pid))
                shell.kill()  # the client has gone: a guest's shell ends with its terminal

            typing = threading.Thread(target=inward, daemon=True)
            typing.start()
            with contextlib.suppress(OSError):
                while data := os.read(master, 4096):
                    connection.sendall(data)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            typing.join(60)
            shell.kill()
        os.close(master)


def settled(pid: int) -> str:
    """The name of a process that waits for input; "ended" for one that has ended."""
    while True:
        # pid (name) state, and so on
        name, state = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")[::2]
        if state.split()[0] in "SZ":
            return name if state.split()[0] == "S" else "ended"
        time.sleep(0.01)


@pytest.fixture
def guest() -> Iterator[Guest]:
    # Not pytest's tmp_path: a socket's path must stay below 108 bytes.
    with tempfile.TemporaryDirectory(prefix="exec-") as directory:
        made = Guest(directory)
        made.save(f"hvsock://{made.path}:1024")
        yield made
        made.close()


def asked(guest: Guest, *words: str, stdin: bytes | None = None) -> "subprocess.CompletedProcess[bytes]":
    """The command in a process of its own: it takes the standard streams."""
    command = [sys.executable, "-m", "pyshim", "exec", "--state-dir", guest.directory, *words]
    given = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(command, cwd=PROJECT, capture_output=True, timeout=100, **given)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("words", "output", "code"),
    [
        (("echo", "hello  world"), b"hello  world\n", 0),
        (("printf", "no line end"), b"no line end", 0),
        (("true",), b"", 0),
        (("sh", "-c", "echo a; exit 7"), b"a\n", 7),
        (("sh", "-c", "kill -9 $$"), None, 137),
        (("cat",), b"", 0),
        (("ls", "-d", "/"), b"/\n", 0),
    ],
)
def test_a_command_has_its_output_and_its_exit_code(
    guest: Guest, words: tuple[str, ...], output: bytes | None, code: int
) -> None:
    done = asked(guest, "ab12", *words)

    assert (done.returncode, done.stderr) == (code, b"")
    assert output is None or done.stdout == output


BYTES = bytes(range(256)) * 400 + b"\r\n\n\x04"
"""More than a terminal holds at a time, with everything that one treats in its own way, and no multiple of three."""


@pytest.mark.parametrize("data", [b"", b"a", BYTES], ids=["empty", "one", "many"])
def test_input_and_output_are_bytes(guest: Guest, data: bytes) -> None:
    done = asked(guest, "-i", "ab12", "cat", stdin=data)

    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == data


SHELLS = pytest.mark.parametrize("shell", ["sh", "bash"])  # of our guest, and of Kata's image


@SHELLS
@pytest.mark.parametrize("words", [("ab12", "true"), ("-i", "ab12", "cat")], ids=["plain", "input"])
def test_the_shell_says_nothing_after_the_end_of_the_command(guest: Guest, shell: str, words: tuple[str, ...]) -> None:
    """kata-agent cannot pass a prompt on to a client that has gone. Then it waits for the shell, and for nothing else
    when the guest has one CPU."""
    guest.shell = f"/bin/{shell}"

    assert asked(guest, *words, stdin=b"x").returncode == 0

    assert guest.left.get(timeout=60) == "cat"


@SHELLS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_the_command(guest: Guest, shell: str, number: signal.Signals) -> None:
    guest.shell = f"/bin/{shell}"
    words = ("ab12", "sh", "-c", "printf %0300d 0; exec sleep 10000")
    command = [sys.executable, "-m", "pyshim", "exec", "--state-dir", guest.directory, *words]

    def heed() -> None:
        """A shell has its background processes ignore SIGINT."""
        signal.signal(number, signal.SIG_DFL)

    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, preexec_fn=heed) as client:
        assert client.stdout is not None
        assert client.stdout.read(10) == b"0" * 10
        client.send_signal(number)
        client.wait(60)

    assert client.returncode == 128 + signal.SIGINT
    assert guest.left.get(timeout=60) == "cat"


@SHELLS
def test_a_reader_that_leaves_interrupts_the_command(guest: Guest, shell: str) -> None:
    guest.shell = f"/bin/{shell}"
    command = [sys.executable, "-m", "pyshim", "exec", "--state-dir", guest.directory, "ab12", "yes"]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stderr is not None
        assert client.stdout.read(6) == b"y\ny\ny\n"
        client.stdout.close()
        said = client.stderr.read()

    assert (client.returncode, said) == (128 + signal.SIGPIPE, b"")
    assert guest.left.get(timeout=60) == "cat"


def test_input_that_a_command_leaves_is_not_executed(guest: Guest) -> None:
    evil = base64.b64decode("touch" * 4) + f"touch {guest.directory}/evil\n".encode() * 20_000

    done = asked(guest, "-i", "ab12", "sh", "-c", "head -c 5; exit 3", stdin=evil)

    assert (done.returncode, done.stdout) == (3, evil[:5])
    assert not os.path.exists(f"{guest.directory}/evil")


def copied(guest: Guest, source: str, target: str) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "pyshim", "cp", "--state-dir", guest.directory, source, target]
    return subprocess.run(command, cwd=PROJECT, stdin=subprocess.DEVNULL, capture_output=True, timeout=100)


def test_a_file_is_copied_both_ways(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(BYTES)

    into = copied(guest, f"{tmp_path}/here", f"ab12:{tmp_path}/in the guest")
    out = copied(guest, f"ab:{tmp_path}/in the guest", f"{tmp_path}")

    assert (into.returncode, into.stderr, out.returncode, out.stderr) == (0, b"", 0, b"")
    assert (tmp_path / "in the guest").read_bytes() == BYTES
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "in the guest"]

    (tmp_path / "back").mkdir()
    assert copied(guest, f"ab:{tmp_path}/in the guest", f"{tmp_path}/back").returncode == 0
    assert (tmp_path / "back" / "in the guest").read_bytes() == BYTES


@pytest.mark.parametrize(
    ("source", "target", "code", "error"),
    [
        ("ab12:{}/none", "{}/x", 1, "/none' in sandbox 'ab12' to '"),
        ("{}/here", "ab12:{}/no/such", 1, "/no/such' in sandbox 'ab12': sh: "),
        ("{}/none", "ab12:/tmp/x", 1, "/none': ENOENT"),
        ("{}", "ab12:/tmp/x", 1, "EISDIR"),
        ("{}/here", "{}/x", 2, "expected one SANDBOX:FILE"),
        ("ab12:/a", "ab12:/", 2, "expected one SANDBOX:FILE"),
        ("zz:/a", "{}/x", 1, "find sandbox 'zz': no recorded id begins with this"),
    ],
)
def test_a_copy_that_fails_is_one_line_and_leaves_nothing(
    guest: Guest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    source: str,
    target: str,
    code: int,
    error: str,
) -> None:
    (tmp_path / "here").write_bytes(b"x")

    assert run(["cp", "--state-dir", guest.directory, source.format(tmp_path), target.format(tmp_path)]) == code

    shown = capsys.readouterr()
    assert shown.out == ""
    assert error in shown.err.splitlines()[-1]
    assert [each.name for each in tmp_path.iterdir()] == ["here"]


def test_a_copy_keeps_the_mode_and_replaces_only_a_regular_file(guest: Guest, tmp_path: Path) -> None:
    source, fifo = tmp_path / "tool", tmp_path / "fifo"
    source.write_bytes(b"#!/bin/sh\n")
    source.chmod(0o4751)
    os.mkfifo(fifo)
    assert copied(guest, str(source), f"ab12:{tmp_path}/there").returncode == 0
    assert copied(guest, f"ab12:{tmp_path}/there", f"{tmp_path}/back").returncode == 0
    assert [(tmp_path / name).stat().st_mode & 0o7777 for name in ("there", "back")] == [0o751, 0o751]

    for target in (str(fifo), f"ab12:{fifo}"):
        with subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE) as reader:
            done = copied(guest, f"ab12:{tmp_path}/there" if target == str(fifo) else str(source), target)
            assert (done.returncode, reader.communicate(timeout=60)[0]) == (0, b"#!/bin/sh\n")
    assert fifo.is_fifo()

    done = copied(guest, f"ab12:{tmp_path}/there", "/dev/null")
    assert done.returncode == 0
    assert Path("/dev/null").is_char_device()


def test_a_copy_has_a_limit_of_size_and_a_deadline_on_silence(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * (2 << 20))
    words = [sys.executable, "-m", "pyshim", "cp", "--max-size", "1", "--state-dir", guest.directory]
    for source, target in ((f"{tmp_path}/large", "ab12:/x"), (f"ab12:{tmp_path}/large", f"{tmp_path}/copy")):
        done = subprocess.run([*words, source, target], capture_output=True, cwd=PROJECT, timeout=60, check=False)
        assert (done.returncode, b"(hint: --max-size)" in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "copy").exists()

    with pytest.raises(DeadlineExceeded, match=r"run command in sandbox 'ab12': silent for 0.5 s"):
        run_in_guest(SandboxId("ab12"), guest.directory, ("sleep", "2"), write=len, silence_s=0.5)


def test_long_output_comes_whole(guest: Guest) -> None:
    done = asked(guest, "ab", "seq", "1", "20000")

    assert done.stdout == b"".join(b"%d\n" % number for number in range(1, 20001))


def test_without_a_command_standard_input_is_typed(guest: Guest) -> None:
    done = asked(guest, "ab12", stdin=b"echo $((40 + 2))\n")

    assert done.returncode == 0
    assert b"42\r\n" in done.stdout


_CONSOLE = """if True:
    import asyncio, socket, sys
    from guest.agent.children import Children
    from guest.agent.console import serve_shell

    async def main():
        children, loop = Children(), asyncio.get_running_loop()
        children.start()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(sys.argv[1])
        listener.listen()
        listener.setblocking(False)
        print("ready", flush=True)
        while True:
            connection, _ = await loop.sock_accept(listener)
            await loop.sock_recv(connection, 64)
            await loop.sock_sendall(connection, b"OK 1\\n")
            await serve_shell(children, connection)

    asyncio.run(main())
"""


def test_the_console_of_our_own_guest_runs_commands(guest: Guest) -> None:
    path = f"{guest.directory}/own"
    guest.save(f"hvsock://{path}:1024")
    command = [sys.executable, "-c", _CONSOLE, path]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE) as console:
        try:
            assert console.stdout is not None
            assert console.stdout.readline() == b"ready\n"
            done = [asked(guest, "ab12", "sh", "-c", f"echo {code}; exit {code}") for code in (0, 3)]
        finally:
            console.kill()

    assert [(each.returncode, each.stdout) for each in done] == [(0, b"0\n"), (3, b"3\n")]


@pytest.mark.parametrize(
    ("address", "words", "code", "error"),
    [
        (None, ("zz",), 1, "find sandbox 'zz': no recorded id begins with this (hint: pyshim list)"),
        ("serial:///run/x", ("ab12",), 1, "its agent is reached over a serial port, and a debug console needs vsock"),
        ("unix:///run/x", ("ab12",), 1, "reached over 'unix:///run/x'"),
        ("", ("ab12",), 1, "exec in sandbox 'ab12': its VM does not run"),
        ("hvsock:///none/such:1024", ("ab12",), 1, "at 'hvsock:///none/such:1026': ENOENT"),
        ("vsock://4294967295:1024", ("ab12",), 1, "at 'vsock://4294967295:1026': "),
        (None, (), 2, "Missing argument 'SANDBOX'"),
        (None, ("ab12", "a\nb"), 1, "type command: it has a line break"),
        (None, ("ab12", "x" * 5000), 1, "at most 4000"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    guest: Guest,
    capsys: pytest.CaptureFixture[str],
    address: str | None,
    words: tuple[str, ...],
    code: int,
    error: str,
) -> None:
    if address is not None:
        guest.save(address)

    assert run(["exec", "--state-dir", guest.directory, *words]) == code

    shown = capsys.readouterr()
    assert shown.out == ""
    assert error in shown.err.splitlines()[-1]
    assert code == 2 or shown.err.count("\n") == 1


@pytest.mark.parametrize("answer", [b"", b"FAILURE\n", b"x" * 100])
def test_a_guest_without_a_console_is_named_with_the_key(
    guest: Guest, capsys: pytest.CaptureFixture[str], answer: bytes
) -> None:
    guest.answer = answer

    assert run(["exec", "--state-dir", guest.directory, "ab12", "true"]) == 1
    assert "debug_console_enabled = true" in capsys.readouterr().err


def test_a_console_that_ends_early_is_exit_code_255(guest: Guest) -> None:
    guest.ends_at_once = True

    done = asked(guest, "ab12", "true")

    assert done.returncode == 255
    assert b"the console ended before the command did" in done.stderr


def test_marks_are_found_however_the_bytes_come() -> None:
    stream = b"# printf 'b T...'\r\n\r\nbT\r\nab\r\n\x1b[1mc\r\n\r\neT:300\r\n# exit\r\n"
    for size in (1, 2, 7, 1000):
        output = MarkedOutput(b"bT", b"eT:")
        pieces = [output.feed(stream[at : at + size]) for at in range(0, len(stream), size)]

        assert b"".join(pieces) == b"ab\n\x1b[1mc\n"
        assert output.exit_code == 300 & 0xFF


@pytest.mark.parametrize("before", [1, 1000])
@pytest.mark.parametrize("kept", [3, 5, 16 * 1024, 64 * 1024])
def test_a_mark_within_a_line_does_not_count_and_one_after_much_text_does(before: int, kept: int) -> None:
    """The text before the mark is dropped on the way, up to some byte of which `kept` others have come since."""
    size = before + kept
    stream = b"x" * before + b"bT\nnot output\n" + b"y" * 64 * 1024 + b"\nbT\nab\neT:0\n"

    output = MarkedOutput(b"bT", b"eT:")
    pieces = [output.feed(stream[at : at + size]) for at in range(0, len(stream), size)]

    assert (b"".join(pieces), output.exit_code) == (b"ab", 0)


def test_the_echo_of_the_typed_line_has_no_mark() -> None:
    line, begin, end = marked_line(("echo", "a b"))

    assert b"echo 'a b'" in line
    assert begin not in line
    assert end not in line


def test_control_characters_are_not_typed() -> None:
    with pytest.raises(InvalidArgument):
        marked_line(("echo", "\x03"))
