"""The smallest instance that has what is needed.

Every type is looked at: a table sorted by one size is not sorted by the others, so no search may stop early. Smaller
means fewer GPUs, then less memory, then fewer vCPUs; among equals the cheaper, then the first by name. A pod that needs
no GPU gets none, however little its price.
"""

import re
from collections.abc import Iterable
from fractions import Fraction

import msgspec

from pyshim.instances.need import Need


class InstanceType(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    vcpus: int
    memory_mib: int
    gpus: int = 0
    gpu_model: str = ""
    price: Fraction | None = None
    """Per hour, in any one currency; None where it is not known, which counts as dearer than any."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    instance: InstanceType
    reason: str
    """One sentence for the log."""


class NoInstance(Exception):
    """No type has what is needed; the text says what is missing."""


def select(table: Iterable[InstanceType], need: Need) -> Choice:
    """The instance for `need`. A machine type asked for by name is taken as it is. Raises NoInstance."""
    types = list(table)
    if need.machine_type:
        for instance in types:
            if instance.name == need.machine_type:
                return Choice(instance=instance, reason=f"{instance.name!r} was asked for by name")
        raise NoInstance(f"choose instance {need.machine_type!r}: it is not among the {len(types)} types of the table")
    fitting = [instance for instance in types if not _missing(instance, need)]
    if not fitting:
        raise NoInstance(f"choose instance for {describe(need)}: {_why(types, need)}")
    best = min(fitting, key=_size)
    return Choice(
        instance=best, reason=f"{best.name!r} is the smallest of {len(fitting)} types that have {describe(need)}"
    )


def has_model(instance: InstanceType, wanted: str) -> bool:
    """Whether every word of `wanted` is a word of the type's model, whatever the case: `h100` in `NVIDIA H100 80GB`."""
    return set(_words(wanted)) <= set(_words(instance.gpu_model))


def describe(need: Need) -> str:
    parts = [f"{need.vcpus} vCPUs", f"{need.memory_mib} MiB"]
    if need.gpus:
        parts.append(f"{need.gpus} GPUs{f' {need.gpu_model!r}' if need.gpu_model else ''}")
    return ", ".join(parts)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.casefold())


def _missing(instance: InstanceType, need: Need) -> tuple[str, ...]:
    checks = (
        ("GPU model", need.gpus == 0 or has_model(instance, need.gpu_model)),
        ("GPUs", instance.gpus >= need.gpus if need.gpus else instance.gpus == 0),
        ("memory", instance.memory_mib >= need.memory_mib),
        ("vCPUs", instance.vcpus >= need.vcpus),
    )
    return tuple(name for name, holds in checks if not holds)


def _size(instance: InstanceType) -> tuple[object, ...]:
    price = (1, Fraction(0)) if instance.price is None else (0, instance.price)
    return (instance.gpus, instance.memory_mib, instance.vcpus, *price, instance.name)


def _why(types: list[InstanceType], need: Need) -> str:
    if not types:
        return "the table is empty"
    nearest = min(types, key=lambda instance: (len(_missing(instance, need)), _size(instance)))
    lacks = " and ".join(_missing(nearest, need))
    return f"none of {len(types)} types has it all; the nearest, {nearest.name!r}, does not fit in {lacks}"
