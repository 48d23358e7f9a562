"""Kubernetes quantities, exactly: `250m`, `1.5`, `512Mi`, `1e3`, `2E`.

Source: k8s.io/apimachinery/pkg/api/resource, the grammar above Quantity. `E` alone is exa, `E3` an exponent.
"""

import re
from fractions import Fraction

from pyshim.model.errors import InvalidArgument
from pyshim.model.sizing import decimal

_QUANTITY = re.compile(r"([+-]?)([0-9]+\.?[0-9]*|\.[0-9]+)([a-zA-Z]*)([+-]?[0-9]+)?", re.ASCII)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_MAX_LENGTH = 64
_MAX_EXPONENT = 30


def quantity(text: str, where: str) -> Fraction:
    """The number that `text` denotes. Raises InvalidArgument naming `where` for a malformed or negative quantity."""
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        raise InvalidArgument(f"read {where}: not a quantity: {text[:100]!r}")
    sign, number, suffix, exponent = match.groups()
    if sign == "-" and Fraction(number):
        raise InvalidArgument(f"read {where}: negative: {text!r}")
    if exponent is not None:
        if suffix not in ("e", "E") or abs(int(exponent)) > _MAX_EXPONENT:
            raise InvalidArgument(f"read {where}: not a quantity: {text!r}")
        return Fraction(number) * _power_of_ten(int(exponent))
    if suffix in _DECIMAL:
        return Fraction(number) * _power_of_ten(_DECIMAL[suffix])
    if suffix in _BINARY:
        return Fraction(number) * (1 << 10 * _BINARY[suffix])
    raise InvalidArgument(f"read {where}: unknown suffix {suffix!r} in {text!r}")


def _power_of_ten(exponent: int) -> Fraction:
    power = Fraction(int(10 ** abs(exponent)))
    return power if exponent >= 0 else 1 / power


def cpu_text(cpus: Fraction) -> str:
    """A quantity of CPUs, rounded up to milli-CPUs: `250m`, `2`."""
    milli = -(-cpus * 1000 // 1)
    return decimal(cpus) if milli % 1000 == 0 and milli == cpus * 1000 else f"{milli}m"


def memory_text(mib: Fraction) -> str:
    """A quantity of memory, rounded up to whole MiB."""
    return f"{-(-mib // 1)}Mi"
