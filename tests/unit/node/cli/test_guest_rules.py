"""`pyshim iptables` and `pyshim policy`: what they ask of a monitor socket, and what they make of its answers."""

import http.server
import json
import socketserver
import sys
import tempfile
import threading
from collections.abc import Iterator
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from pyshim.model.observation import MAX_MONITOR_BODY_BYTES
from pyshim.node.cli.command import run

RULES = "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n"


class Shim(socketserver.ThreadingUnixStreamServer):
    """The monitor socket of sandbox ab12: keeps what it is asked, answers what it was given."""

    def __init__(self, directory: Path) -> None:
        (directory / "ab12").mkdir()
        super().__init__(f"{directory}/ab12/shim-monitor.sock", _Requests)
        self.state_dir = str(directory)
        self.asked: list[tuple[str, str, bytes]] = []
        self.answer = (200, RULES.encode())


class _Requests(http.server.BaseHTTPRequestHandler):
    server: Shim

    def _take(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, body))
        status, text = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if text:  # even of nothing, a write fails once the client has closed
            self.wfile.write(text)

    do_GET = do_PUT = _take

    def address_string(self) -> str:
        return "shim"

    def log_message(self, *_words: object) -> None:
        pass


@pytest.fixture
def shim() -> Iterator[Shim]:
    # Not pytest's tmp_path: a socket's path must stay below 108 bytes.
    with tempfile.TemporaryDirectory(prefix="rules-") as directory, Shim(Path(directory)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(shim: Shim, *words: str) -> int:
    return run([*words, "--state-dir", shim.state_dir])


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (("get", "ab12"), "/iptables"),
        (("get", "ab"), "/iptables"),
        (("get", "--sandbox-id", "ab12"), "/iptables"),
        (("get", "--v6", "ab12"), "/ip6tables"),
    ],
)
def test_rules_are_read_from_katas_paths(
    shim: Shim, words: tuple[str, ...], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(shim, "iptables", *words) == 0

    assert capsys.readouterr().out == RULES
    assert shim.asked == [("GET", path, b"")]


def test_programs_get_rules_as_lines(shim: Shim, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(shim, "iptables", "get", "ab12", "--json") == 0

    assert json.loads(capsys.readouterr().out) == {"rules": RULES.splitlines()}


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (("iptables", "set", "ab12"), "/iptables"),
        (("iptables", "set", "--v6", "ab12"), "/ip6tables"),
        (("iptables", "set", "--sandbox-id", "ab12"), "/iptables"),
        (("policy", "set", "ab12"), "/policy"),
        (("policy", "set", "--sandbox-id", "ab12"), "/policy"),
    ],
)
def test_a_file_is_put_as_it_is(shim: Shim, tmp_path: Path, words: tuple[str, ...], path: str) -> None:
    (tmp_path / "file").write_bytes(b"a\0\xff\n")

    assert ask(shim, *words, str(tmp_path / "file")) == 0

    assert shim.asked == [("PUT", path, b"a\0\xff\n")]


def test_a_file_may_be_stdin(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"package agent_policy\n")))

    assert ask(shim, "policy", "set", "ab12", "-") == 0

    assert shim.asked == [("PUT", "/policy", b"package agent_policy\n")]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, b"set policy:\nthe guest refused it"), "set policy: the guest refused it"),
        ((404, b""), "Not Found"),
        ((501, b"x" * 5000), "x" * 1000),
    ],
)
def test_a_refusal_of_the_shim_is_one_line(
    shim: Shim, tmp_path: Path, answer: tuple[int, bytes], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shim.answer = answer
    (tmp_path / "file").write_text("x")

    assert ask(shim, "policy", "set", "ab12", str(tmp_path / "file")) == 1

    assert capsys.readouterr().err == f"pyshim: ask '{shim.state_dir}/ab12/shim-monitor.sock': {error}\n"


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (("iptables", "get", "zz"), 1, "pyshim: find sandbox 'zz': no recorded id begins with this"),
        (("metrics", "zz"), 1, "pyshim: find sandbox 'zz': no recorded id begins with this"),
        (("iptables", "get", "gone"), 1, "gone/shim-monitor.sock': No such file or directory"),
        (("iptables", "get"), 2, "expected SANDBOX"),
        (("iptables", "get", "a", "b"), 2, "expected SANDBOX"),
        (("iptables", "set", "ab12"), 2, "expected SANDBOX and FILE"),
        (("iptables", "set", "ab12", "/none/such"), 1, "'/none/such': ENOENT (no such file or directory)"),
        (("policy", "set", "ab12"), 2, "expected SANDBOX and FILE"),
        (("policy", "set", "ab12", "/dev/null"), 1, "pyshim: read policy of '/dev/null': it is empty"),
        (("policy", "set", "ab12", "/dev/zero"), 1, f"more than {MAX_MONITOR_BODY_BYTES} bytes"),
    ],
)
def test_bad_input_is_named_and_nothing_is_asked(
    shim: Shim, words: tuple[str, ...], code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(shim.state_dir, "gone").mkdir()

    assert ask(shim, *words) == code

    assert error in capsys.readouterr().err.splitlines()[-1]
    assert shim.asked == []
