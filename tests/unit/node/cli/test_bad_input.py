"""Every verb of `pyshim` on bad input: one line that names the cause, an exit code, no traceback."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pyshim.node.cli.command import run
from tests.unit.node.cli.test_command import verbs

PROJECT = Path(__file__).parents[4]
NAMED = (
    *("status", "trace", "status --cgroups", "sizing show", "logs", "metrics", "iptables get"),
    *("exec", "iptables set", "policy set"),
)
"""The verbs that take a sandbox, and nothing, or a file."""
BAD = {
    "install": "--containerd-config {dir}/broken.toml --root {dir}/none --wheel /none --dry-run",
    "status": "--prefix {dir}/none --root {dir}/none",
    "verify": "--prefix {dir}/none --socket {dir}/none",
    "check": "--runtimeclass {dir}/none",
    "list": "none --state-dir {dir}/sbs",
    "cleanup": "../none",
    "config check": "{dir}/broken.toml",
    "config show": "{dir}/broken.toml",
    "plan": "{dir}/word",
    "node-agent run": "--node n --payload {dir}/none --handler h --remove-when x --ready-file {dir}/r --token /none",
    "node-agent wait-removed": "--token {dir}/none",
    "monitor": "--listen-address 192.0.2.1:1",
    "metrics": "none --state-dir {dir}/sbs",
    "sizing show": "none --state-dir {dir}/sbs",
    "sizing explain": "{dir}/word",
    "sizing podfixed": "--config {dir}/broken.toml",
    "exec": "--state-dir {dir}/sbs none",
    "cp": "none:/x {dir}/copy --state-dir {dir}/sbs",
    "logs": "none --file {dir}/word --state-dir {dir}/sbs",
    "iptables get": "none --state-dir {dir}/sbs",
    "iptables set": "none {dir}/word --state-dir {dir}/sbs",
    "policy set": "none {dir}/word --state-dir {dir}/sbs",
    "direct-volume add": "--volume-path {dir}/none --mount-info word",
    "direct-volume remove": "--volume-path {dir}/none",
    "direct-volume stats": "--volume-path {dir}/none",
    "direct-volume resize": "--volume-path {dir}/none --size 1",
    "config cdi": "vendor.com/class=none --directory {dir}",
    "dra run": "--types {dir}/none --server x --token {dir}/word --authority {dir}/word",
    "dra slices": "--types {dir}/broken.toml",
    "dra withdraw": "--server https://127.0.0.1:1 --token {dir}/word --authority {dir}/none",
    "factory init": "--config {dir}/broken.toml",
    "factory status": "--config {dir}/broken.toml",
    "factory destroy": "--config {dir}/broken.toml",
    "config initdata": "{dir}/none",
    "nri plan": "{dir}/none",
    "nri run": "--socket {dir}/none --index word",
    "trace": "none --state-dir {dir}/sbs",
    "webhook serve": "--class pykata={dir}/none --certificate {dir}/none --key {dir}/none",
}
"""By verb: its arguments."""
TAKE_NO_INPUT = {"uninstall", "help"}
"""Nothing to uninstall is no failure; an unknown verb is wrong usage."""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A directory with two sandboxes, a broken configuration and a file of one word."""
    for name in ("ab12", "ab34"):
        (tmp_path / "sbs" / name).mkdir(parents=True)
        (tmp_path / "sbs" / name / "persist.json").write_text(json.dumps({"SandboxContainer": name}))
    (tmp_path / "broken.toml").write_text("[hypervisor")
    (tmp_path / "word").write_text("word")
    return tmp_path


def test_the_table_has_every_verb() -> None:
    assert BAD.keys() | TAKE_NO_INPUT == verbs().keys()


def is_one_line(shown: str) -> bool:
    return shown.startswith("pyshim: ") and shown.count("\n") == 1 and "bug of pyshim" not in shown


OPTIONS = {
    "list --watch": "--count 1 --interval 0.1 --state-dir {dir}/word",
    "check --env": "--config {dir}/broken.toml",
    "status none": "--state-dir {dir}/sbs",
    "status none --cgroups": "--state-dir {dir}/sbs",
    "config initdata --digest": "{dir}/word",
    "install --launcher": "{dir}/word",
}
"""By verb with an option that makes it answer another question: its arguments."""


@pytest.mark.parametrize("verb", [*BAD, *OPTIONS])
def test_bad_input_is_one_line_that_names_the_cause(verb: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*verb.split(), *shlex.split((BAD | OPTIONS)[verb].format(dir=files))]) == 1

    shown = capsys.readouterr()
    assert shown.out == ""
    assert is_one_line(shown.err), shown.err


@pytest.mark.parametrize("verb", ["install --dry-run", "uninstall", "status", "verify"])
@pytest.mark.parametrize("prefix", ["opt/pyshim", "", "/", "/opt/.."])
def test_a_prefix_that_files_cannot_name_is_refused(verb: str, prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*verb.split(), "--prefix", prefix]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{prefix!r} is not the absolute path of a directory below the root" in shown.err


def naming(verb: str, sandbox: str, files: Path) -> list[str]:
    file = [str(files / "word")] if verb.endswith(" set") else []
    return [*verb.split(), "--state-dir", str(files / "sbs"), sandbox, *file]


@pytest.mark.parametrize("verb", NAMED)
@pytest.mark.parametrize(
    ("sandbox", "error"),
    [
        ("ab", "find sandbox 'ab': 2 ids begin with this: ab12, ab34"),
        ("x", "find sandbox 'x': no recorded id begins with this"),
        ("../ab12", "check sandbox id '../ab12': not a valid identifier"),
        ("shop/none", "find pod 'shop/none': no sandbox of it is recorded here (hint: pyshim list)"),
    ],
)
def test_a_sandbox_that_is_not_one_is_named(
    verb: str, sandbox: str, error: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(naming(verb, sandbox, files)) == 1

    shown = capsys.readouterr()
    assert (shown.out, is_one_line(shown.err)) == ("", True)
    assert shown.err.startswith(f"pyshim: {error}")


@contextmanager
def nobody() -> Iterator[None]:
    """This process has the rights of another user meanwhile."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.root
@pytest.mark.parametrize("verb", [*NAMED, "list"])
def test_who_is_not_root_is_told_to_run_it_as_root(verb: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "sbs").chmod(0o700)

    with nobody():
        code = run(naming(verb, "ab12", files))

    shown = capsys.readouterr()
    assert (code, shown.out) == (1, "")
    assert is_one_line(shown.err), shown.err
    assert "EACCES (permission denied)" in shown.err
    assert shown.err.endswith("(hint: run it as root)\n")


@pytest.mark.parametrize("verb", verbs())
def test_a_reader_that_is_gone_is_no_failure_to_tell_of(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    with open(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        code = run([*verb.split(), "--help"])

    assert (code, capsys.readouterr().err) == (141, "")
