"""`pyshim config check|show|reference`: checks, shows and explains a configuration."""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import click

from pyshim.config.annotations import HYPERVISOR_NAME, with_annotations
from pyshim.config.effective import Effective, Finding, Level, Setting, examine
from pyshim.config.keys import Table, Verdict, document_table
from pyshim.config.load import SUPPORTED_HYPERVISORS, raise_first_error, refused
from pyshim.config.sources import Source, named_file, read_source
from pyshim.config.values import PATH, toml_value
from pyshim.model.errors import InvalidArgument, ShimError
from pyshim.node.cli.config_reference import commented_toml, markdown
from pyshim.node.cli.dry_run import plan_empty_pod
from pyshim.node.cli.output import examples, json_option, print_json
from pyshim.node.kubernetes.pod_vm import pod_config

_FILES = ("path", "kernel", "image", "initrd", "firmware", "virtio_fs_daemon")


@click.group(
    epilog=examples(
        "pyshim config check",
        "pyshim config check --elsewhere --strict configuration-qemu.toml",
        "pyshim config show --annotation io.katacontainers.config.hypervisor.default_vcpus=4",
    )
)
def command() -> None:
    """Check, show and explain the configuration."""


@command.command("check")
@click.argument("file", metavar="[FILE]", required=False)
@click.option("--all", "everything", is_flag=True, help="Honoured keys too.")
@click.option("--elsewhere", is_flag=True, help="The file is for another host, which has what it names.")
@click.option("--strict", is_flag=True, help="Exit 1 for unknown and removed keys, too.")
@json_option
def _check(file: str | None, everything: bool, elsewhere: bool, strict: bool, as_json: bool) -> int:
    """Say what each key does; exit 1 if no sandbox starts with the file.

    If the keys have no errors, an empty pod is planned with the file, as `pyshim plan` does. FILE is by default the one
    a sandbox would read.
    """
    source = _source(file)
    effective = examine(source)
    findings = [
        each._replace(level=Level.ERROR, text=f"{each.text}: no sandbox starts with this value")
        if each.verdict is Verdict.REFUSED
        else each
        for each in effective.findings
    ]
    if not any(finding.level is Level.ERROR for finding in findings):
        findings += _refusal(source, elsewhere=elsewhere)
    findings += [] if elsewhere else _missing_files(effective)
    if as_json:
        print_json([_as_document(each, source.path) for each in findings if each.level > Level.FINE or everything])
    else:
        for line in report(findings, source.path, everything=everything):
            print(line)
    limit = Level.WARNING if strict else Level.ERROR
    return 1 if any(finding.level >= limit for finding in findings) else 0


@command.command("show")
@click.argument("file", metavar="[FILE]", required=False)
@click.option("--all", "everything", is_flag=True, help="Also keys that are neither set nor have an effect.")
@click.option(
    "--annotation", "annotations", multiple=True, metavar="NAME=VALUE", help="As a pod would have it; repeatable."
)
@json_option
def _show(file: str | None, everything: bool, annotations: tuple[str, ...], as_json: bool) -> int:
    """Print the effective configuration with the origin of each value.

    FILE is by default the one a sandbox would read.
    """
    effective = _with_annotations(_source(file), annotations)
    if as_json:
        print_json(_effective_document(effective, everything=everything))
    else:
        print(effective_toml(effective, everything=everything), end="")
    return 0


@command.command("reference")
@click.option("--toml", is_flag=True, help="As a configuration file with comments.")
def _reference(toml: bool) -> int:
    """Print the description of every key and annotation."""
    print(commented_toml() if toml else markdown(), end="")
    return 0


def report(findings: list[Finding], path: str, *, everything: bool) -> Iterator[str]:
    """A line per finding, `file:line: level: key: text` as compilers write it, and a summary."""
    for finding in findings:
        if finding.level > Level.FINE or everything:
            place = finding.place or path
            yield f"{place}: {finding.level.name.lower()}: {finding.subject}: {_sentence(finding)}"
    verdicts = Counter(finding.verdict for finding in findings if finding.verdict is not None)
    counted = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in Verdict)
    errors = sum(finding.level is Level.ERROR for finding in findings)
    yield f"{path}: {counted}; {errors} error{'' if errors == 1 else 's'}"


def _as_document(finding: Finding, path: str) -> dict[str, str]:
    return {
        "place": str(finding.place or path),
        "level": finding.level.name.lower(),
        "key": finding.subject,
        "verdict": str(finding.verdict or ""),
        "text": finding.text,
    }


def _sentence(finding: Finding) -> str:
    match finding.verdict:
        case Verdict.HONOURED:
            return "honoured"
        case Verdict.NO_EFFECT:
            return f"no effect: {finding.text}"
        case _:
            return finding.text


def _refusal(source: Source, *, elsewhere: bool) -> Iterator[Finding]:
    """The error with which an empty pod cannot be planned."""
    try:
        plan_empty_pod(pod_config(source, {}), on_another_host=elsewhere)
    except ShimError as error:
        yield Finding(Level.ERROR, "no sandbox starts", str(error))


def _missing_files(effective: Effective) -> Iterator[Finding]:
    """Files that this host lacks: no sandbox starts without them."""
    if effective.hypervisor not in SUPPORTED_HYPERVISORS:
        return
    shares_files = effective.of(Table.HYPERVISOR, "shared_fs").value != "none"
    for name in _FILES:
        setting = effective.of(Table.HYPERVISOR, name)
        if setting.key.kind is not PATH or (name == "virtio_fs_daemon" and not shares_files):
            continue
        if setting.key.verdict is Verdict.HONOURED and setting.value and not os.path.exists(setting.value):
            text = f"'{setting.value}' does not exist on this host: no sandbox starts"
            yield Finding(Level.ERROR, effective.dotted(setting.key), text, place=setting.place)


def _source(file: str | None) -> Source:
    return read_source(named_file(file), os.environ)


def _with_annotations(source: Source, words: Iterable[str]) -> Effective:
    annotations = _annotations(words)
    effective = examine(source, annotations.get(HYPERVISOR_NAME, ""))
    raise_first_error(effective)
    effective = with_annotations(effective, annotations)
    for setting in refused(effective):
        asked = f"{effective.dotted(setting.key)} = {toml_value(setting.value)}"
        print(
            f"pyshim: no sandbox starts with {asked} ({setting.origin}): {setting.key.why_of(setting.value)}",
            file=sys.stderr,
        )
    return effective


def _annotations(words: Iterable[str]) -> Mapping[str, str]:
    pairs = [word.partition("=") for word in words]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise InvalidArgument(f"read --annotation '{name}': expected NAME=VALUE")
    return {name: value for name, _, value in pairs}


def effective_toml(effective: Effective, *, everything: bool) -> str:
    """TOML of the same configuration; `everything` adds the keys that are neither set nor have an effect."""
    lines = [f"# {effective.source.path}"]
    for table in Table:
        rows = [
            setting
            for setting in effective.settings.values()
            if setting.key.table is table and (everything or _counts(setting))
        ]
        if rows:
            lines += ["", f"[{document_table(table, effective.hypervisor)}]", *_rows(rows)]
    return "\n".join(lines) + "\n"


def _effective_document(effective: Effective, *, everything: bool) -> dict[str, object]:
    return {
        "file": effective.source.path,
        "settings": [
            {
                "key": effective.dotted(setting.key),
                "value": setting.value,
                "origin": setting.origin,
                "verdict": str(setting.key.verdict),
            }
            for setting in effective.settings.values()
            if everything or _counts(setting)
        ],
    }


def _rows(rows: list[Setting]) -> Iterator[str]:
    for setting in rows:
        remark = "" if setting.key.verdict is Verdict.HONOURED else f"; {setting.key.verdict}: {setting.key.why}"
        yield f"{setting.key.name} = {toml_value(setting.value)}  # {_one_line(setting.origin)}{remark}"


def _counts(setting: Setting) -> bool:
    return setting.key.verdict is Verdict.HONOURED or not setting.is_default or bool(setting.annotation)


def _one_line(text: str) -> str:
    """Replaces the characters of a file name that a TOML comment cannot have."""
    return "".join(char if char.isprintable() else "?" for char in text)
