"""An argv against one version's grammar: every object, device, property and option it names must exist there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parents[1] / "golden" / "qemu" / "grammar"
AARCH64_TABLES = TABLES / "aarch64"
OBJECTS = (
    *("memory-backend-ram", "memory-backend-memfd", "memory-backend-file", "rng-random", "iothread", "iommufd"),
    *("sev-guest", "sev-snp-guest", "tdx-guest"),
)
DEVICES = (
    *("pci-bridge", "pcie-pci-bridge", "pcie-root-port", "pxb-pcie", "pvpanic", "nvdimm", "pc-dimm", "scsi-hd"),
    *("virtconsole", "vfio-pci", "intel-iommu", "x3130-upstream", "xio3130-downstream"),
    *(f"virtio-{kind}-pci" for kind in ("balloon", "blk", "mem", "net", "pmem", "rng", "scsi", "serial")),
    *(f"virtio-{kind}-device" for kind in ("blk", "net", "rng", "serial")),
    *("vhost-user-fs-pci", "vhost-user-fs-device", "vhost-vsock-pci", "vhost-vsock-device", "vhost-user-blk-pci"),
    *("vhost-user-vsock-pci", "vhost-user-vsock-device", "vmgenid"),
)
"""Types whose properties are looked up one by one."""
OPTIONS = ("chardev", "drive", "memory", "mon", "name", "numa", "rtc", "sandbox", "smp-opts")
_BARE = frozenset({"-no-user-config", "-nodefaults", "-no-reboot", "-S"})
_FREE = frozenset(
    {
        "-append",
        "-bios",
        "-blockdev",
        "-display",
        "-global",
        "-incoming",
        "-initrd",
        "-kernel",
        "-serial",
        "-uuid",
        "-vga",
    }
)
"""Options whose value is a name, or is judged when QEMU opens what it names."""
_KEYED = {
    "-chardev": ("chardev", "backend"),
    "-drive": ("drive", "file"),
    "-m": ("memory", "size"),
    "-mon": ("mon", "chardev"),
    "-name": ("name", "guest"),
    "-rtc": ("rtc", "base"),
    "-sandbox": ("sandbox", "enable"),
    "-smp": ("smp-opts", "cpus"),
}
"""Option -> (its list of keys, the key a first word without `=` stands for)."""
_NUMA: dict[str, set[str]] = {"node": {"nodeid", "memdev", "cpus"}, "dist": {"src", "dst", "val"}}
"""QEMU lists no key of -numa; these are there since 2.10. Source: qapi/machine.json, NumaOptions."""
_UNLISTED_MACHINE = frozenset({"accel", "kernel-irqchip", "nvdimm", "pit", "rtc", "type"})
"""Properties of machines that query-command-line-options does not list; every version here has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    version: str
    objects: Mapping[str, Mapping[str, bool]]
    """Type -> member -> whether it is required."""
    devices: Mapping[str, frozenset[str]]
    device_types: frozenset[str]
    cpus: frozenset[str]
    tap: frozenset[str]
    vhost_user: frozenset[str]
    machine: frozenset[str]
    options: Mapping[str, frozenset[str]]

    def dumped(self) -> str:
        """The text of a table."""
        document = {
            "version": self.version,
            "objects": {name: dict(sorted(members.items())) for name, members in sorted(self.objects.items())},
            "devices": {name: " ".join(sorted(found)) for name, found in sorted(self.devices.items())},
            "device_types": " ".join(sorted(self.device_types)),
            "cpus": " ".join(sorted(self.cpus)),
            "tap": " ".join(sorted(self.tap)),
            "vhost_user": " ".join(sorted(self.vhost_user)),
            "machine": " ".join(sorted(self.machine)),
            "options": {name: " ".join(sorted(found)) for name, found in sorted(self.options.items())},
        }
        return json.dumps(document, indent=1) + "\n"


def loaded(text: str) -> Grammar:
    document: dict[str, Any] = json.loads(text)

    def words(value: str) -> frozenset[str]:
        return frozenset(value.split())

    return Grammar(
        version=document["version"],
        objects=document["objects"],
        devices={name: words(found) for name, found in document["devices"].items()},
        device_types=words(document["device_types"]),
        cpus=words(document["cpus"]),
        tap=words(document["tap"]),
        vhost_user=words(document["vhost_user"]),
        machine=words(document["machine"]),
        options={name: words(found) for name, found in document["options"].items()},
    )


def tables(directory: Path = TABLES) -> dict[str, Grammar]:
    """Every version there is a table of, oldest first."""
    found = [loaded(path.read_text()) for path in directory.glob("*.json")]
    return {grammar.version: grammar for grammar in sorted(found, key=lambda one: _numbers(one.version))}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def minimum_version(argv: tuple[str, ...]) -> str:
    """The oldest version with a table that, like all after it, understands `argv`; empty for none."""
    minimum = ""
    for version, grammar in reversed(tables().items()):
        if problems(argv, grammar):
            break
        minimum = version
    return minimum


def problems(argv: tuple[str, ...], grammar: Grammar) -> list[str]:
    """The words that this version does not understand, in the argv's order."""
    return [
        f"{option} {value}: {text}" if value else f"{option}: {text}"
        for option, value in _pairs(argv[1:])
        for text in _judged(option, value, grammar)
    ]


def _pairs(words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    rest = iter(words)
    for option in rest:
        yield (option, "") if option in _BARE else (option, next(rest, ""))


def _judged(option: str, value: str, grammar: Grammar) -> list[str]:
    if option in _BARE or option in _FREE:
        return []
    if option in _KEYED:
        list_name, implied = _KEYED[option]
        fields = keyed(value, implied)
        return _unknown(fields, grammar.options[list_name] | {"id"})  # every option group may be named
    match option:
        case "-object":
            return _object(value, grammar)
        case "-device":
            return _device(keyed(value, "driver"), grammar)
        case "-numa":
            fields = keyed(value, "type")
            return _unknown(fields, _NUMA[fields["type"]] | {"type"})
        case "-machine":
            names = {key.replace("_", "-") for key in keyed(value, "type")}
            return _unknown(names, grammar.machine | _UNLISTED_MACHINE)
        case "-cpu":
            model = value.partition(",")[0]
            return [] if model in grammar.cpus else [f"unknown model {model!r}"]
        case "-netdev":
            fields = keyed(value, "type")
            return _unknown(
                fields, {"tap": grammar.tap, "vhost-user": grammar.vhost_user}[fields["type"]] | {"type", "id"}
            )
    return ["unknown option"]


def _object(value: str, grammar: Grammar) -> list[str]:
    fields = json.loads(value) if value.startswith("{") else keyed(value, "qom-type")
    kind = fields["qom-type"]
    if kind not in grammar.objects:
        return [f"unknown object {kind!r}"]
    members = grammar.objects[kind]
    missing = [name for name, is_required in members.items() if is_required and name not in fields]
    return _unknown(fields, {*members, "qom-type", "id"}) + [f"{name!r} is missing" for name in missing]


def _device(fields: Mapping[str, str], grammar: Grammar) -> list[str]:
    kind = fields["driver"]
    if kind not in grammar.device_types:
        return [f"unknown device {kind!r}"]
    if kind not in grammar.devices:
        return []
    return _unknown(fields, grammar.devices[kind] | {"driver", "id", "bus"})


def _unknown(fields: Mapping[str, Any] | set[str], known: set[str] | frozenset[str]) -> list[str]:
    """QEMU's experimental properties, `x-...`, are in no table: QEMU promises nothing about them."""
    return [f"unknown {name!r}" for name in sorted(set(fields) - known) if not name.startswith("x-")]


def keyed(text: str, implied: str) -> dict[str, str]:
    """`word,key=value,...` as a mapping; two commas are one that belongs to the value."""
    fields: dict[str, str] = {}
    for index, part in enumerate(text.replace(",,", "\0").split(",")):
        key, equals, value = part.replace("\0", ",").partition("=")
        if equals:
            fields[key] = value
        elif index == 0:
            fields[implied] = key
        else:
            fields[key] = "on"
    return fields
