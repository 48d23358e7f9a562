"""`pyshim help`: the help of a subcommand, and the manual page that is made of all of it."""

import inspect
from collections.abc import Iterator

import click

from pyshim import __version__


@click.command()
@click.argument("words", metavar="[SUBCOMMAND]...", nargs=-1)
@click.option("--man", is_flag=True, help="Print the manual page, of all subcommands, that 'pyshim install' writes.")
def command(words: tuple[str, ...], man: bool) -> int:
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
        _text(f"{name} - {(program.help or '').rstrip('.')}"),
        ".SH SYNOPSIS",
        _text(" ".join((name, *program.collect_usage_pieces(context)))),
        ".SH SUBCOMMANDS",
        *(line for word in program.list_commands(context) for line in _subcommand(program, word, context)),
    ]
    return "".join(f"{line}\n" for line in lines)


def _subcommand(group: click.Group, word: str, parent: click.Context) -> Iterator[str]:
    made = group.get_command(parent, word)
    assert made is not None, "the group lists it"
    context = click.Context(made, info_name=word, parent=parent)
    yield ".SS " + _text(" ".join((context.command_path, *made.collect_usage_pieces(context))))
    yield from _paragraphs(made.help or "")
    for parameter in made.params:
        record = parameter.get_help_record(context)
        if record is not None:
            yield from (".TP", _text(record[0]), _text(record[1]))
    yield from _paragraphs(made.epilog or "")
    if isinstance(made, click.Group):
        for action in made.list_commands(context):
            yield from _subcommand(made, action, context)


def _paragraphs(text: str) -> Iterator[str]:
    """A paragraph whose first line is a backspace keeps its line breaks, as in click."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        first, _, rest = paragraph.partition("\n")
        if first == "\b":
            yield from (".PP", ".nf", *map(_text, rest.split("\n")), ".fi")
        elif paragraph:
            yield from (".PP", _text(" ".join(paragraph.split())))


def _text(line: str) -> str:
    """The line with the formatter's special characters escaped."""
    escaped = line.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
