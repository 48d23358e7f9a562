"""`pyshim config check|show|cdi|initdata`: checks, shows and explains a configuration, and the documents beside it."""

import base64
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click

from pyshim.cdi import DEFAULT_DIRECTORIES, Cache, CdiError, as_json, is_qualified_name
from pyshim.config.annotations import HYPERVISOR_NAME, with_annotations
from pyshim.config.effective import SUPPORTED_HYPERVISORS, Effective, Finding, Level, Setting, examine
from pyshim.config.keys import Table, Verdict, document_table
from pyshim.config.load import raise_first_error, refused
from pyshim.config.sources import Source, named_file, read_source
from pyshim.config.values import PATH, toml_value
from pyshim.model.confidential import SNP_HOST_DATA_BYTES, TDX_CONFIG_ID_BYTES
from pyshim.model.decoding import json_value
from pyshim.model.errors import InvalidArgument, NotFound, ShimError
from pyshim.node.cli.dry_run import plan_empty_pod
from pyshim.node.cli.options import read_limited
from pyshim.node.cli.output import examples, json_option, print_json
from pyshim.node.kubernetes.pod_vm import pod_config
from pyshim.resources.confidential.plan.initdata import MAX_TEXT_BYTES, decode, disk_image, encode, parse

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
@click.option("--strict", is_flag=True, help="Exit 1 for warnings, too.")
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


@command.command("cdi", epilog=examples("pyshim config cdi", "pyshim config cdi vendor.com/gpu=0 --oci config.json"))
@click.argument("devices", metavar="[VENDOR/CLASS=NAME]...", nargs=-1)
@click.option("--oci", metavar="CONFIG.json", help="Print this OCI spec with the devices injected instead.")
@click.option(
    "--directory",
    "directories",
    multiple=True,
    metavar="DIR",
    help=f"Repeatable, a later one wins; default: {' '.join(DEFAULT_DIRECTORIES)}.",
)
@json_option
def _cdi(devices: tuple[str, ...], oci: str | None, directories: tuple[str, ...], as_json: bool) -> int:
    """List every device of this node's CDI specs, and the errors in them; exit 1 when there are errors.

    With devices, print their edits of a container, as containerEdits.
    """
    cache = Cache(directories or DEFAULT_DIRECTORIES)
    if devices:
        print_json(_edited(cache, devices, oci))
        return 0
    if oci is not None:
        raise click.UsageError("--oci needs the devices that are injected")
    found = cache.devices()
    if as_json:
        print_json([{"name": each.name, "file": each.path} for each in found])
    elif found:
        width = max(len(each.name) for each in found)
        print("\n".join(f"{each.name:<{width}}  {each.path}" for each in found))
    errors = list(dict.fromkeys(str(error) for each in cache.errors().values() for error in each))
    for error in errors:
        print(f"pyshim: {error}", file=sys.stderr)
    return 1 if errors else 0


@command.command(
    "initdata",
    epilog=examples(
        "pyshim config initdata initdata.toml", "pyshim config initdata initdata.toml | pyshim config initdata --digest"
    ),
)
@click.argument("file", metavar="[FILE]", default="-")
@click.option("--disk", metavar="FILE", help="Write the disk the guest sees instead.")
@click.option("--digest", is_flag=True, help="FILE is an annotation's text: print its digest and the fields with it.")
@json_option
def _initdata(file: str, disk: str | None, digest: bool, as_json: bool) -> int:
    """Print the text of annotation cc_init_data for a TOML document, which the owner of a confidential guest has
    measured.

    FILE is by default stdin. --digest prints also the fields of TDX and SNP that will hold the digest.
    """
    origin = "stdin" if file == "-" else f"'{file}'"
    content = read_limited(file, MAX_TEXT_BYTES)
    if digest:
        rows = _digest_rows(content, origin)
        print_json(rows) if as_json else print("\n".join(f"{name}: {value}" for name, value in rows.items()))
        return 0
    initdata = parse(content, origin)
    if disk:
        with open(disk, "wb") as image:
            image.write(disk_image(initdata))
    else:
        print_json({"annotation": encode(initdata)}) if as_json else print(encode(initdata))
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


def _edited(cache: Cache, devices: tuple[str, ...], oci: str | None) -> dict[str, Any]:
    """The edits of the devices, or the OCI spec in the file `oci` with them. Raises InvalidArgument, NotFound."""
    try:
        if oci is None:
            edits: dict[str, Any] = as_json(cache.edits(devices))
            return edits
        document = _oci_spec(oci)
        cache.inject(document, devices)
    except CdiError as error:
        wrong = [name for name in devices if not is_qualified_name(name)]
        raise (InvalidArgument if wrong else NotFound)(str(error)) from error
    return document


def _oci_spec(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        document = json_value(file.read(), lambda problem: InvalidArgument(f"read spec '{path}': {problem}"))
    if not isinstance(document, dict):
        raise InvalidArgument(f"read spec '{path}': the document is not an object")
    return document


def _digest_rows(content: bytes, origin: str) -> dict[str, str]:
    """The digest of an annotation's text, and the fields of TDX and SNP. Raises InvalidArgument."""
    try:
        initdata = decode(content.decode(), origin)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"read initdata of {origin}: not UTF-8") from error
    fields = {
        name: base64.b64encode(initdata.digest_of(length)).decode()
        for name, length in (("tdx mrconfigid", TDX_CONFIG_ID_BYTES), ("snp host-data", SNP_HOST_DATA_BYTES))
    }
    return {str(initdata.algorithm): initdata.digest.hex(), **fields}
