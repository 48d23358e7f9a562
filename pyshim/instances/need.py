"""What a pod needs of its instance, and how the annotations of CreateVM spell it."""

import math
from collections.abc import Mapping
from fractions import Fraction

import msgspec

PREFIX = "io.katacontainers.config.hypervisor."


class Need(msgspec.Struct, frozen=True, kw_only=True):
    vcpus: int = 0
    memory_mib: int = 0
    gpus: int = 0
    gpu_model: str = ""
    """Free text, such as `H100` or `NVIDIA H100 80GB`; empty for any."""
    machine_type: str = ""
    """The type's name, asked for outright; empty to choose."""


def need_of(annotations: Mapping[str, str]) -> Need:
    """The need in the annotations `PREFIX + default_vcpus, default_memory, default_gpus, default_gpu_model,
    machine_type`; a missing or empty one asks for nothing, vCPUs are rounded up.

    Raises ValueError naming the annotation that is no number: taken for 0 it would choose too small an instance.
    """
    gpus = _whole(annotations, "default_gpus")
    model = annotations.get(f"{PREFIX}default_gpu_model", "").strip()
    if model and not gpus:
        raise ValueError(f"read annotation '{PREFIX}default_gpu_model': {model!r} without default_gpus")
    return Need(
        vcpus=math.ceil(_number(annotations, "default_vcpus")),
        memory_mib=_whole(annotations, "default_memory"),
        gpus=gpus,
        gpu_model=model,
        machine_type=annotations.get(f"{PREFIX}machine_type", "").strip(),
    )


def _number(annotations: Mapping[str, str], name: str) -> Fraction:
    text = annotations.get(PREFIX + name, "").strip()
    try:
        value = Fraction(text or "0") if len(text) < 30 and "/" not in text and "e" not in text.lower() else None
    except ValueError:
        value = None
    if value is None or value < 0:
        raise ValueError(f"read annotation '{PREFIX}{name}': {text[:100]!r} is no number of 0 or more")
    return value


def _whole(annotations: Mapping[str, str], name: str) -> int:
    value = _number(annotations, name)
    if value.denominator != 1:
        raise ValueError(f"read annotation '{PREFIX}{name}': {float(value):g} is not a whole number")
    return int(value)
