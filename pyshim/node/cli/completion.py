"""`pyshim completion SHELL`: the script that lets a shell complete subcommands, options and sandboxes."""

import click
from click.shell_completion import get_completion_class

from pyshim.model.errors import FailedPrecondition
from pyshim.node.cli.command import COMPLETION_VARIABLE, PYSHIM
from pyshim.node.cli.output import examples


@click.command(
    epilog=examples(
        "pyshim completion bash > /etc/bash_completion.d/pyshim",
        "pyshim completion zsh > ~/.zfunc/_pyshim",
        "pyshim completion fish > ~/.config/fish/completions/pyshim.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print the completion script of a shell."""
    made = get_completion_class(shell)
    if made is None:
        raise FailedPrecondition(f"complete for '{shell}': click has no script for it")
    script = made(PYSHIM, {}, "pyshim", COMPLETION_VARIABLE)
    print(script.source_template % script.source_vars())
    return 0
