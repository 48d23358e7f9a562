"""`pyshim check`: can this host run pods in virtual machines, and what is to be done about it."""

import os
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

import click
from msgspec import to_builtins

from pyshim.config.load import build_config
from pyshim.config.sources import named_file, read_source
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, NotFound, ShimError
from pyshim.node.cli.check_host import host_report
from pyshim.node.cli.check_verdicts import HostVerdict, VerdictLevel, verdicts
from pyshim.node.cli.output import config_option, examples, json_option, print_json, print_table
from pyshim.node.install.handlers import config_path_of
from pyshim.node.kubernetes.manifest import overhead_of, read_documents


@click.command(
    epilog=examples(
        "pyshim check",
        "pyshim check --handler pykata-tdx",
        "pyshim check --runtimeclass runtimeclass.yaml --strict",
        "pyshim check --json | jq '.verdicts[] | select(.level != \"ok\")'",
    )
)
@config_option
@click.option("--handler", metavar="NAME", help="In place of --config: what 'pyshim install' gave this handler.")
@click.option("--runtimeclass", "class_path", metavar="FILE", help="Compare the overhead of this RuntimeClass.")
@click.option("--strict", is_flag=True, help="Exit 1 for warnings, too.")
@json_option
def command(config_path: str | None, handler: str | None, class_path: str | None, strict: bool, as_json: bool) -> int:
    """Say whether this host can run pods in virtual machines.

    A line per thing that pods need: ok, warning (they run, but slower, or with less), missing (they do not run), with
    what to do. Exit code 1 when something is missing.
    """
    if handler is not None:
        if config_path is not None:
            raise click.UsageError("--handler and --config name a configuration each")
        config_path = config_path_of(handler)
        if not os.path.exists(config_path):
            raise NotFound(f"check handler '{handler}': no '{config_path}' (hint: 'pyshim status' lists handlers)")
    pod_fixed = _pod_fixed(class_path) if class_path else None
    config, problem = _config(config_path)
    found = verdicts(host_report(config, problem), pod_fixed)
    counted = Counter(each.level for each in found)
    failed = bool(counted[VerdictLevel.MISSING] or (strict and counted[VerdictLevel.WARNING]))
    if as_json:
        print_json({"ok": not failed, "verdicts": to_builtins(found)})
    else:
        print_table(("", "WHAT", "FOUND"), [(each.level, each.subject, _words(each)) for each in found], wrap="FOUND")
        print(", ".join(f"{counted[level]} {level}" for level in VerdictLevel))
    return 1 if failed else 0


def _words(verdict: HostVerdict) -> str:
    return f"{verdict.text} (hint: {verdict.hint})" if verdict.hint else verdict.text


def _config(path: str | None) -> tuple[Config | None, str]:
    """The configuration, or None and the error, which becomes a verdict."""
    try:
        return build_config(read_source(named_file(path), dict(os.environ))), ""
    except (ShimError, OSError) as error:
        return None, str(error)


def _pod_fixed(path: str) -> Mapping[str, Fraction]:
    found = overhead_of(read_documents(path), "", path)
    if found is None:
        raise FailedPrecondition(f"find RuntimeClass in '{path}': the file does not hold exactly one")
    return found
