"""The table of instance types as a JSON document: a list of objects with name, vcpus, memory_mib, gpus, gpu_model,
price.
"""

import json
import re
from fractions import Fraction
from typing import Any

from pyshim.instances.select import InstanceType

_NUMBERS = ("vcpus", "memory_mib", "gpus")
_MEMBERS = {"name", "gpu_model", "price", *_NUMBERS}
MAX_BYTES = 16 * 1024 * 1024
_PRICE = re.compile(r"-?[0-9]{1,20}\.[0-9]{1,20}")
"""Without exponents: the fraction of `1e999999999` would take hours."""


class InvalidTable(Exception):
    """The table cannot be used; the text names file, row and member."""


def read_table(path: str) -> tuple[InstanceType, ...]:
    """The types in the file. Raises InvalidTable, or OSError when it cannot be read."""
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise InvalidTable(f"read instances '{path}': more than {MAX_BYTES} bytes")
    try:
        rows = json.loads(content, parse_float=_price)
    except (ValueError, RecursionError) as error:
        raise InvalidTable(f"read instances '{path}': not JSON: {error}") from error
    if not isinstance(rows, list):
        raise InvalidTable(f"read instances '{path}': the document is not a list")
    types = tuple(_type(row, f"read instances '{path}': row {index}") for index, row in enumerate(rows))
    seen: set[str] = set()
    for instance in types:
        if instance.name in seen:
            raise InvalidTable(f"read instances '{path}': {instance.name!r} is there twice")
        seen.add(instance.name)
    return types


def _price(text: str) -> Fraction:
    """Prices as written: 0.1 is a tenth. Raises ValueError for what is written otherwise."""
    if not _PRICE.fullmatch(text):
        raise ValueError(f"{text[:100]!r} is not a number of at most 20 digits before and after the point")
    return Fraction(text)


def _type(row: Any, where: str) -> InstanceType:
    if not isinstance(row, dict):
        raise InvalidTable(f"{where} is not an object")
    for member in row:
        if member not in _MEMBERS:
            raise InvalidTable(f"{where}: {member[:100]!r} is not known")
    for member in ("name", "gpu_model"):
        if not isinstance(row.get(member, ""), str):
            raise InvalidTable(f"{where}: {member} is not a text")
    if not row.get("name"):
        raise InvalidTable(f"{where}: name is missing")
    for member in ("vcpus", "memory_mib"):
        if member not in row:
            raise InvalidTable(f"{where}: {member} is missing")
    for member in _NUMBERS:
        value = row.get(member, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidTable(f"{where}: {member} is not a whole number of 0 or more")
    price = row.get("price")
    if price is not None and (not isinstance(price, int | Fraction) or isinstance(price, bool) or price < 0):
        raise InvalidTable(f"{where}: price is no number of 0 or more")
    return InstanceType(
        name=row["name"],
        vcpus=row["vcpus"],
        memory_mib=row["memory_mib"],
        gpus=row.get("gpus", 0),
        gpu_model=row.get("gpu_model", ""),
        price=None if price is None else Fraction(price),
    )
