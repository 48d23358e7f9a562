"""`pyshim`: the calls, help and ends of every verb, and `pyshim status`."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from pyshim import __version__
from pyshim.__main__ import operator_main
from pyshim.node.cli import command, output
from pyshim.node.cli.command import PYSHIM, SUBCOMMANDS, run

RECORD = {
    "SandboxContainer": "pod1",
    "HypervisorState": {"Pid": 4711, "Type": "qemu", "APISocket": ""},
    "Network": {"Endpoints": [{"Name": "eth0", "MTU": 1450}, {}], "Tags": ["a", "b"]},
    "Devices": [],
}


def record_in(directory: Path, text: str) -> None:
    (directory / "pod1").mkdir()
    (directory / "pod1" / "persist.json").write_text(text)


def test_the_version_and_its_python_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert operator_main(["--version"]) == 0

    assert capsys.readouterr().out.startswith(f"pyshim {__version__} (Python 3.")


def test_state_is_a_readable_summary_without_empty_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_in(tmp_path, json.dumps(RECORD))

    assert operator_main(["status", "pod1", "--state-dir", str(tmp_path)]) == 0

    assert capsys.readouterr().out.splitlines() == [
        "SandboxContainer: pod1",
        "HypervisorState:",
        "  Pid: 4711",
        "  Type: qemu",
        "Network:",
        "  Endpoints:",
        "    - Name: eth0",
        "      MTU: 1450",
        "  Tags:",
        "    - a",
        "    - b",
    ]


def test_state_is_printed_as_it_is_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_in(tmp_path, json.dumps(RECORD))

    assert operator_main(["status", "pod1", "--state-dir", str(tmp_path), "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == RECORD


@pytest.mark.parametrize(("text", "error"), [("{", "not JSON: Expecting property name"), ("[]", "not a JSON object\n")])
def test_a_damaged_state_is_named_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    record_in(tmp_path, text)

    assert operator_main(["status", "pod1", "--state-dir", str(tmp_path)]) == 1

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"pyshim: parse state '{tmp_path}/pod1/persist.json': {error}")
    assert shown.err.count("\n") == 1


def test_a_group_without_a_verb_shows_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert operator_main(["factory"]) == 2

    assert capsys.readouterr().err.startswith("Usage: pyshim factory")


def test_help_names_every_subcommand_without_loading_any() -> None:
    program = """if True:
        import sys
        from pyshim.__main__ import operator_main
        operator_main(["--help"])
        print(*sys.modules)
    """

    output = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=Path(__file__).parents[4])

    shown, loaded = output.rsplit("\n", 2)[:2]
    assert re.findall(r"^  ([a-z-]+)(?: |$)", shown.partition("Subcommands:")[2], re.MULTILINE) == list(SUBCOMMANDS)
    assert not {place.partition(":")[0] for place, _ in SUBCOMMANDS.values()} - {command.__name__} & set(loaded.split())


def test_a_launcher_that_others_could_replace_is_not_installed_unless_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o777)
    directory = tmp_path / "bin"

    assert operator_main(["install", "--launcher", str(directory)]) == 1
    assert f"root would execute or boot what others can write: '{tmp_path}' by everyone" in capsys.readouterr().err
    assert list(directory.iterdir()) == []

    assert operator_main(["install", "--launcher", str(directory), "--force"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{directory}/containerd-shim-pykata-v2\n"
    assert f"'{tmp_path}' by everyone" in captured.err


PROJECT = Path(__file__).parents[4]
WITHOUT_JSON = {
    # These become something, or print what is a format of its own.
    *("install", "uninstall", "verify"),
    *("cleanup", "monitor", "metrics"),
    *("webhook serve", "nri run", "dra run", "dra slices", "dra withdraw", "node-agent run", "node-agent wait-removed"),
    *("direct-volume add", "direct-volume remove", "direct-volume resize"),
    *("iptables set", "policy set", "exec", "cp", "help", "factory init", "factory destroy"),
}


def verbs() -> dict[str, click.Command]:
    """Every verb with its words, those of groups among them."""
    found: dict[str, click.Command] = {}
    for name in SUBCOMMANDS:
        made = PYSHIM.get_command(click.Context(PYSHIM), name)
        assert made is not None
        if isinstance(made, click.Group):
            found |= {f"{name} {action}": each for action, each in made.commands.items()}
        else:
            found[name] = made
    return found


def test_help_shows_what_the_option_shows(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["list"], ["config", "show"]):
        assert run([*words, "--help"]) == 0
        wanted = capsys.readouterr().out
        assert run(["help", *words]) == 0
        assert capsys.readouterr().out == wanted


def test_the_manual_page_has_every_verb_and_is_well_formed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", "--man"]) == 0
    page = capsys.readouterr().out

    for name in verbs():
        assert f"\n.SS pyshim {name}".replace("-", "\\-") in page
    if shutil.which("groff") is None:
        pytest.skip("groff is missing (Debian's package groff-base)")
    words = ["groff", "-man", "-Tutf8", "-ww", "-P-c"]
    done = subprocess.run(words, input=page, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert "pyshim exec 1a2b sh -c 'dmesg | tail'" in done.stdout


def test_every_verb_that_prints_data_prints_it_for_programs() -> None:
    without = {name for name, verb in verbs().items() if not any("--json" in each.opts for each in verb.params)}

    assert without == WITHOUT_JSON


def test_every_verb_says_what_it_does() -> None:
    assert [name for name, verb in verbs().items() if not verb.help] == []


def test_examples_keep_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    run(["trace", "--help"])

    assert "    pyshim trace 1a2b\n    pyshim trace 1a2b --json > start.json\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["frobnicate"], "pyshim: No such command 'frobnicate'. (hint: 'pyshim --help')"),
        (["lits"], "pyshim: No such command 'lits'. Did you mean 'list'? (hint: 'pyshim --help')"),
        (["help", "lits"], "pyshim: No such command 'lits'. Did you mean 'list'? (hint: 'pyshim --help')"),
        (["trace"], "pyshim trace: Missing argument 'SANDBOX'. (hint: 'pyshim trace --help')"),
        (["status", "x", "--jsno"], "pyshim status: No such option '--jsno'."),
        (["top"], "pyshim: 'top' is 'pyshim list --watch' (hint: 'pyshim --help')"),
        (["kata-env", "--json"], "pyshim: 'kata-env' is 'pyshim check --env' (hint: 'pyshim --help')"),
        (["state", "x"], "pyshim: 'state' is 'pyshim status SANDBOX' (hint: 'pyshim --help')"),
        (["events", "x"], "pyshim: 'events' is 'pyshim logs SANDBOX --level info' (hint: 'pyshim --help')"),
        (["list", "--format", "json"], "pyshim list: No such option '--format'. (hint: --json)"),
        (["check", "--verbose"], "pyshim check: No such option '--verbose'. (hint: check prints every line; --json"),
        (["status", "--cgroups"], "pyshim status: --cgroups needs SANDBOX"),
        (["config", "cdi", "--oci", "x"], "pyshim config cdi: --oci needs the devices that are injected"),
        (["cleanup"], "pyshim cleanup: expected one of ID, --all and --strike"),
        (["cleanup", "x", "--all"], "pyshim cleanup: expected one of ID, --all and --strike"),
    ],
)
def test_wrong_usage_is_named_in_the_last_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith(line)


def _broken(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def raise_it() -> int:
        raise error

    status = PYSHIM.get_command(click.Context(PYSHIM), "status")
    assert status is not None
    monkeypatch.setattr(status, "callback", lambda **_: raise_it())


def test_a_bug_is_one_line_and_a_traceback_only_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _broken(monkeypatch, TypeError("two\nlines"))

    assert run(["status", "pod1"]) == 1
    assert capsys.readouterr().err == (
        "pyshim: run 'status pod1': TypeError: two lines "
        "(hint: this is a bug of pyshim; PYSHIM_TRACEBACK=1 shows where)\n"
    )

    monkeypatch.setenv("PYSHIM_TRACEBACK", "1")
    with pytest.raises(TypeError):
        run(["status", "pod1"])


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (PermissionError(13, "no", "/x"), 1)])
def test_an_interrupt_and_a_refusal_end_with_a_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    _broken(monkeypatch, error)

    assert run(["status", "pod1"]) == code


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_asks_the_command(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(command.COMPLETION_VARIABLE, f"{shell}_source")

    assert run([]) == 0
    assert f"{command.COMPLETION_VARIABLE}={shell}_complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("pyshim sta", ["plain,status"]),
        ("pyshim config ch", ["plain,check"]),
        ("pyshim status --state-dir {dir} ab", ["plain,ab12", "plain,ab34"]),
    ],
)
def test_words_are_completed(
    tmp_path: Path, words: str, found: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _record(tmp_path, "ab12", "ab34", "cd")
    monkeypatch.setenv(command.COMPLETION_VARIABLE, "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words.format(dir=tmp_path))
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))

    assert run([]) == 0

    assert capsys.readouterr().out.splitlines() == found


def _record(directory: Path, *ids: str) -> None:
    for each in ids:
        (directory / each).mkdir()
        (directory / each / "persist.json").write_text(json.dumps({"SandboxContainer": each}))


@pytest.mark.parametrize(("typed", "shown"), [("ab12", "ab12"), ("ab", "ab"), ("c", "cd"), ("ab3", "ab34")])
def test_a_sandbox_is_named_by_its_id_or_by_how_only_it_begins(
    tmp_path: Path, typed: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _record(tmp_path, "ab", "ab12", "ab34", "cd")

    assert run(["status", typed, "--state-dir", str(tmp_path)]) == 0

    assert capsys.readouterr().out == f"SandboxContainer: {shown}\n"


def test_a_table_has_colour_on_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("what", "how"), [("[red]a[/red]" + "x" * 200, "ok")])

    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]a[/red]" + "x" * 200 + "  ok" in shown


def test_a_table_on_a_terminal_has_colour() -> None:
    program = "from pyshim.node.cli.output import print_table; print_table(('what',), [('ok',)])"
    environment: dict[str, Any] = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)

    done = subprocess.run(
        ["script", "-qec", f'{sys.executable} -c "{program}"', "/dev/null"],
        cwd=PROJECT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert "\x1b[32mok" in done.stdout
