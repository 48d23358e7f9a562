"""The `pyshim` command: its subcommands, the exit code and error text with which each ends, and its manual page."""

import difflib
import errno
import inspect
import logging
import os
import pkgutil
import platform
import signal
import sys
from collections.abc import Iterator

import click
from click.shell_completion import shell_complete

from pyshim import __version__
from pyshim.host.os_errors import describe_os_error
from pyshim.log import fields_of
from pyshim.model.errors import ShimError

SUBCOMMANDS = {
    "install": ("pyshim.node.cli.install:command", "install pyshim on this node, or bring it up to date"),
    "uninstall": ("pyshim.node.cli.installation:uninstall", "remove what 'pyshim install' wrote"),
    "status": (
        "pyshim.node.cli.installation:status",
        "show what is installed here, or what is recorded of a sandbox",
    ),
    "verify": ("pyshim.node.cli.installation:verify", "run a test pod through the container runtime"),
    "check": ("pyshim.node.cli.check:command", "say whether this host can run pods in virtual machines"),
    "list": (
        "pyshim.node.cli.listing:list_command",
        "list the sandboxes of this node: size, use, health, also live",
    ),
    "cleanup": ("pyshim.node.cli.cleanup:command", "undo what dead shims left on this node"),
    "config": ("pyshim.node.cli.config:command", "check, show and explain the configuration, CDI specs, initdata"),
    "plan": ("pyshim.node.cli.dry_run:command", "show what would be done for a pod, without touching anything"),
    "node-agent": ("pyshim.node.cli.node_agent:command", "install pyshim on the node of this pod (Helm chart)"),
    "monitor": ("pyshim.node.cli.monitor:monitor_command", "serve the metrics of all sandboxes for Prometheus"),
    "metrics": ("pyshim.node.cli.monitor:metrics_command", "print the metrics of a sandbox"),
    "sizing": ("pyshim.node.cli.sizing:command", "explain how large a sandbox's VM is, or would be"),
    "exec": ("pyshim.node.cli.debug_console:command", "open a shell in the guest of a sandbox, or run a command there"),
    "cp": ("pyshim.node.cli.copy:command", "copy a file into the guest of a sandbox, or out of it"),
    "logs": ("pyshim.node.cli.logs:command", "show the lines of a sandbox's shim and of its guest's console"),
    "iptables": ("pyshim.node.cli.guest_rules:iptables", "read or replace the iptables rules within a sandbox's guest"),
    "policy": ("pyshim.node.cli.guest_rules:policy", "replace the policy of a sandbox's guest"),
    "direct-volume": (
        "pyshim.node.cli.direct_volume:command",
        "record, measure and resize volumes handed over as disks",
    ),
    "dra": ("pyshim.node.cli.dra:command", "offer the devices of remote VMs to the scheduler (DRA driver)"),
    "factory": ("pyshim.node.cli.factory:command", "make and remove the templates that VMs continue from"),
    "nri": ("pyshim.node.cli.nri:command", "place VMs on the CPUs and NUMA nodes of this node (NRI plugin)"),
    "trace": ("pyshim.node.cli.trace:command", "show where the time went until the first output"),
    "webhook": (
        "pyshim.node.cli.webhook:command",
        "check and size pods as Kubernetes creates them (admission webhook)",
    ),
    "help": ("pyshim.node.cli.command:help_command", "show the help of a subcommand"),
}
"""Place and summary of each subcommand. The callback of the command at that place returns the exit code; a ShimError or
OSError is shown as one line."""

_REPLACED = {
    "top": "list --watch",
    "env": "check --env",
    "kata-env": "check --env",
    "kata-check": "check",
    "state": "status SANDBOX",
    "cgroups": "status SANDBOX --cgroups",
    "cdi": "config cdi [DEVICE]",
    "initdata": "config initdata [FILE]",
    "launcher": "install --launcher DIR",
    "events": "logs SANDBOX --level info",
    "ps": "list",
    "version": "--version",
}
"""Verbs of former releases and of kata-runtime, and what replaces them."""
_REPLACED_OPTIONS = {
    ("list", "--format"): "--json",
    ("list", "-f"): "--json",
    ("list", "--kata-all"): "list shows all sandboxes",
    ("list", "-q"): "list --json | jq -r '.[].id'",
    ("list", "--quiet"): "list --json | jq -r '.[].id'",
    ("check", "--verbose"): "check prints every line; --json has them as data",
    ("check", "-v"): "check prints every line; --json has them as data",
    ("check", "--no-network-checks"): "check asks no network",
    ("check", "-n"): "check asks no network",
}
"""By verb and option of kata-runtime, what replaces it."""

COMPLETION_VARIABLE = "_PYSHIM_COMPLETE"
"""The variable of a shell's completion, as click names it for a program named pyshim."""
_TRACEBACK_VARIABLE = "PYSHIM_TRACEBACK"
_WIDEST_HELP = 120


class Subcommands(click.Group):
    """Imports only the module of the called subcommand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        place, summary = SUBCOMMANDS[cmd_name]
        command: click.Command = pkgutil.resolve_name(place)
        command.short_help = summary
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if instead := _REPLACED.get(args[0]):
                raise click.UsageError(f"'{args[0]}' is 'pyshim {instead}'", ctx) from error
            near = difflib.get_close_matches(args[0], SUBCOMMANDS, n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.format_message()} Did you mean '{near[0]}'?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Subcommands"):
            formatter.write_dl([(name, summary) for name, (_module, summary) in SUBCOMMANDS.items()])


PYSHIM = click.version_option(__version__, message=f"pyshim %(version)s (Python {platform.python_version()})")(
    Subcommands(
        name="pyshim",
        help="The operator's command for containerd pods in virtual machines.",
        subcommand_metavar="SUBCOMMAND [ARGUMENTS]...",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST_HELP},
    )
)


def run(words: list[str]) -> int:
    """The exit code of `pyshim <words>`: 2 for wrong usage, 1 for a failure, printed to stderr."""
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        return shell_complete(PYSHIM, {}, "pyshim", COMPLETION_VARIABLE, instruction)
    shown = _Warnings(logging.WARNING)
    logging.getLogger().addHandler(shown)
    try:
        return _run(words)
    finally:
        logging.getLogger().removeHandler(shown)


def _run(words: list[str]) -> int:
    try:
        with PYSHIM.make_context("pyshim", list(words)) as context:
            code = PYSHIM.invoke(context)
        sys.stdout.flush()
        return code or 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.UsageError as error:
        print(_usage(error), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader has what it wants, for instance `| head`. The interpreter's own flush must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ShimError as error:
        print(f"pyshim: {_one_line(error)}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"pyshim: {_of_the_system(words, error)}", file=sys.stderr)
        return 1
    except Exception as error:
        if os.environ.get(_TRACEBACK_VARIABLE):
            raise
        hint = f"(hint: this is a bug of pyshim; {_TRACEBACK_VARIABLE}=1 shows where)"
        print(f"pyshim: run '{' '.join(words)}': {type(error).__name__}: {_one_line(error)} {hint}", file=sys.stderr)
        return 1


class _Warnings(logging.Handler):
    """Prints warnings of the shim's rooms, each once, as lines of this command. A verb that serves has its own log."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        fields = fields_of(record)
        if {"file", "problem"} <= fields.keys():
            text = f"{fields['file']}: {fields['problem']}"
        else:
            text = ": ".join((record.getMessage(), *(f"{name} {value}" for name, value in fields.items())))
        if text not in self._printed:
            self._printed.add(text)
            print(f"pyshim: warning: {_one_line(text)}", file=sys.stderr)


def _usage(error: click.UsageError) -> str:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error.format_message()
    usage = f"{error.ctx.get_usage()}\n" if error.ctx is not None else ""
    path = error.ctx.command_path if error.ctx is not None else "pyshim"
    if isinstance(error, click.NoSuchOption):
        instead = _REPLACED_OPTIONS.get((path.removeprefix("pyshim "), error.option_name))
        if instead is not None:
            return f"{usage}{path}: {_one_line(error.format_message())} (hint: {instead})"
    return f"{usage}{path}: {_one_line(error.format_message())} (hint: '{path} --help')"


def _of_the_system(words: list[str], error: OSError) -> str:
    what = f"'{error.filename}': " if error.filename else ""
    refused = error.errno in (errno.EACCES, errno.EPERM) and os.geteuid() != 0
    return f"run '{_one_line(' '.join(words))}': {what}{describe_os_error(error)}" + (
        " (hint: run it as root)" if refused else ""
    )


def _one_line(text: object) -> str:
    return " ".join(str(text).splitlines())


@click.command()
@click.argument("words", metavar="[SUBCOMMAND]...", nargs=-1)
@click.option("--man", is_flag=True, help="Print the manual page, of all subcommands, that 'pyshim install' writes.")
def help_command(words: tuple[str, ...], man: bool) -> int:
    """Show the help of SUBCOMMAND, or of pyshim."""
    from pyshim.node.cli.command import PYSHIM, run

    if not man:
        return run([*words, "--help"])
    print(manual_page(PYSHIM), end="")
    return 0


def manual_page(program: click.Group) -> str:
    """The page in the macros of man(7)."""
    name = program.name or ""
    context = click.Context(program, info_name=name)
    lines = [
        f'.TH {name.upper()} 1 "" "{name} {__version__}"',
        ".SH NAME",
        _roff(f"{name} - {(program.help or '').rstrip('.')}"),
        ".SH SYNOPSIS",
        _roff(" ".join((name, *program.collect_usage_pieces(context)))),
        ".SH SUBCOMMANDS",
        *(line for word in program.list_commands(context) for line in _page_of(program, word, context)),
    ]
    return "".join(f"{line}\n" for line in lines)


def _page_of(group: click.Group, word: str, parent: click.Context) -> Iterator[str]:
    made = group.get_command(parent, word)
    assert made is not None, "the group lists it"
    context = click.Context(made, info_name=word, parent=parent)
    yield ".SS " + _roff(" ".join((context.command_path, *made.collect_usage_pieces(context))))
    yield from _paragraphs(made.help or "")
    for parameter in made.params:
        record = parameter.get_help_record(context)
        if record is not None:
            yield from (".TP", _roff(record[0]), _roff(record[1]))
    yield from _paragraphs(made.epilog or "")
    if isinstance(made, click.Group):
        for action in made.list_commands(context):
            yield from _page_of(made, action, context)


def _paragraphs(text: str) -> Iterator[str]:
    """A paragraph whose first line is a backspace keeps its line breaks, as in click."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        first, _, rest = paragraph.partition("\n")
        if first == "\b":
            yield from (".PP", ".nf", *map(_roff, rest.split("\n")), ".fi")
        elif paragraph:
            yield from (".PP", _roff(" ".join(paragraph.split())))


def _roff(line: str) -> str:
    """The line with the formatter's special characters escaped."""
    escaped = line.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
