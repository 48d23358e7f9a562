"""The grammar of a QEMU binary, by its own introspection: one short-lived process without a machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from tests.grammar.check import DEVICES, OBJECTS, OPTIONS, Grammar

_ARGV = ("-machine", "none", "-accel", "tcg", "-S", "-nodefaults", "-display", "none", "-qmp", "stdio")
_CPU = re.compile("-(x86_64|arm)-cpu$")
_EXTRA_TYPES = frozenset({"virtserialport", "isa-serial", "virtio-scsi-device", "pvpanic-pci"})
"""Device types an argv may name whose properties are left out."""


def asked(binary: str, commands: list[dict[str, Any]]) -> list[Any]:
    """The answer to each command, None where the binary has no such thing."""
    lines = [{"execute": "qmp_capabilities"}, *commands, {"execute": "quit"}]
    answers: list[Any] = []
    with subprocess.Popen([binary, *_ARGV], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as qemu:
        assert qemu.stdin is not None
        assert qemu.stdout is not None
        # One at a time: at the end of its input QEMU drops the commands that wait.
        for number, line in enumerate(lines):
            qemu.stdin.write(json.dumps({**line, "id": number}) + "\n")
            qemu.stdin.flush()
            answers.append(next(found for text in qemu.stdout if (found := json.loads(text)).get("id") == number))
    return [answer.get("return") for answer in answers[1:-1]]


def introspected(binary: str) -> Grammar:
    """The words that `binary` understands."""
    version, schema, types, options, machines = asked(
        binary,
        [
            {"execute": "query-version"},
            {"execute": "query-qmp-schema"},
            {"execute": "qom-list-types", "arguments": {"implements": "device"}},
            {"execute": "query-command-line-options"},
            {"execute": "query-machines"},
        ],
    )
    device_types = {entry["name"] for entry in types}
    devices = [name for name in DEVICES if name in device_types]
    machine_type = next(machine["name"] for machine in machines if machine.get("alias") in ("q35", "virt"))
    properties = asked(
        binary,
        [
            *({"execute": "device-list-properties", "arguments": {"typename": name}} for name in devices),
            {"execute": "qom-list-properties", "arguments": {"typename": f"{machine_type}-machine"}},
        ],
    )
    *of_devices, of_machine = [_names(found or ()) for found in properties]
    lists = {entry["option"]: _names(entry["parameters"]) for entry in options}
    numbers = version["qemu"]
    entities = {entity["name"]: entity for entity in schema}
    netdevs = _variants(entities, "netdev_add", ("tap", "vhost-user"))
    return Grammar(
        version=f"{numbers['major']}.{numbers['minor']}",
        objects=_variants(entities, "object-add", OBJECTS),
        devices=dict(zip(devices, of_devices, strict=True)),
        device_types=frozenset({*devices, *(_EXTRA_TYPES & device_types)}),
        cpus=frozenset(_CPU.sub("", name) for name in device_types if _CPU.search(name)),
        tap=frozenset(netdevs["tap"]),
        vhost_user=frozenset(netdevs["vhost-user"]),
        machine=frozenset(name.replace("_", "-") for name in of_machine | lists.get("machine", frozenset())),
        options={name: lists.get(name, frozenset()) for name in OPTIONS},
    )


def _names(entries: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The names, without those QEMU calls experimental."""
    return frozenset(entry["name"] for entry in entries if not entry["name"].startswith("x-"))


def _variants(entities: dict[str, Any], command: str, kinds: tuple[str, ...]) -> dict[str, dict[str, bool]]:
    """kind -> member -> required, for a command whose argument is a union."""
    union = entities[entities[command]["arg-type"]]
    by_case = {variant["case"]: entities[variant["type"]] for variant in union.get("variants", ())}
    return {
        kind: {
            member["name"]: "default" not in member for member in by_case[kind]["members"] if member["name"][:2] != "x-"
        }
        for kind in kinds
        if kind in by_case
    }


if __name__ == "__main__":
    sys.stdout.write(introspected(sys.argv[1]).dumped())
