"""`pyshim config check|show|reference`: a configuration judged, as it counts, and explained."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping

from pyshim.config.annotations import HYPERVISOR_NAME, with_annotations
from pyshim.config.effective import Effective, Finding, Level, examine
from pyshim.config.keys import Table, Verdict
from pyshim.config.load import SUPPORTED_HYPERVISORS, raise_first_error, refused
from pyshim.config.sources import Source, read_source
from pyshim.config.toml_text import toml_value
from pyshim.model.errors import InvalidArgument
from pyshim.model.task import RuntimeOptions
from pyshim.operator.config_reference import commented_toml, markdown
from pyshim.operator.config_show import effective_toml

_FILES = ("path", "kernel", "image", "initrd", "firmware", "virtio_fs_daemon")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="say for each key what becomes of it; exit 1 when there are errors")
    check.add_argument("--all", action="store_true", help="honoured keys too")
    check.add_argument("--strict", action="store_true", help="exit 1 for unknown and removed keys, too")
    show = actions.add_parser("show", help="print the effective configuration with the origin of each value")
    show.add_argument("--all", action="store_true", help="keys without effect that nobody set, too")
    show.add_argument(
        "--annotation", action="append", default=[], metavar="NAME=VALUE", help="as a pod would have it; repeatable"
    )
    for action in (check, show):
        action.add_argument("file", nargs="?", metavar="FILE", help="default: the one a sandbox would read")
    reference = actions.add_parser("reference", help="print the description of every key and annotation")
    reference.add_argument("--toml", action="store_true", help="as a configuration file with comments")


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "reference":
        print(commented_toml() if arguments.toml else markdown(), end="")
        return 0
    source = _source(arguments.file)
    if arguments.action == "show":
        print(effective_toml(_with_annotations(source, arguments.annotation), everything=arguments.all), end="")
        return 0
    effective = examine(source)
    findings = [*effective.findings, *_about_the_whole(effective)]
    for line in report(findings, source.path, everything=arguments.all):
        print(line)
    limit = Level.WARNING if arguments.strict else Level.ERROR
    return 1 if any(finding.level >= limit for finding in findings) else 0


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


def _sentence(finding: Finding) -> str:
    match finding.verdict:
        case Verdict.HONOURED:
            return "honoured"
        case Verdict.NO_EFFECT:
            return f"no effect: {finding.text}"
        case Verdict.REFUSED if finding.decisive:
            return f"{finding.text}: no sandbox starts with this value"
        case Verdict.REFUSED:
            return f"{finding.text}: only this value is accepted"
        case _:
            return finding.text


def _about_the_whole(effective: Effective) -> Iterator[Finding]:
    """What no single key is to blame for: another hypervisor, files that are not on this host."""
    if effective.hypervisor not in SUPPORTED_HYPERVISORS:
        text = "not supported, only qemu and remote: no sandbox starts with this file"
        yield _note(effective, "hypervisor", Level.WARNING, text)
        return
    for name in _FILES:
        setting = effective.of(Table.HYPERVISOR, name)
        if setting.value and not os.path.exists(setting.value):
            text = f"'{setting.value}' does not exist on this host"
            yield Finding(
                level=Level.NOTE,
                verdict=None,
                subject=effective.dotted(setting.key),
                place=setting.place,
                text=text,
                decisive=False,
            )


def _note(effective: Effective, group: str, level: Level, text: str) -> Finding:
    path = (group, effective.hypervisor)
    place = effective.source.places.get(path)
    return Finding(level=level, verdict=None, subject=".".join(path), place=place, text=text, decisive=True)


def _source(file: str | None) -> Source:
    options = RuntimeOptions(config_path=os.path.abspath(file), config_body=b"") if file else None
    return read_source(options, os.environ)


def _with_annotations(source: Source, words: list[str]) -> Effective:
    annotations = _annotations(words)
    effective = examine(source, annotations.get(HYPERVISOR_NAME, ""))
    raise_first_error(effective)
    effective = with_annotations(effective, annotations)
    for setting in refused(effective):
        asked = f"{effective.dotted(setting.key)} = {toml_value(setting.value)}"
        print(f"pyshim: no sandbox starts with {asked} ({setting.origin}): {setting.key.why}", file=sys.stderr)
    return effective


def _annotations(words: list[str]) -> Mapping[str, str]:
    pairs = [word.partition("=") for word in words]
    for name, equals, _ in pairs:
        if not equals or not name:
            raise InvalidArgument(f"read --annotation '{name}': expected NAME=VALUE")
    return {name: value for name, _, value in pairs}
