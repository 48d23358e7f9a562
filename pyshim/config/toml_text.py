"""Values as TOML text."""

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any


def toml_value(value: Any) -> str:
    """One line of TOML that reads as `value`; a fraction is written as its decimal, whole seconds as whole."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is and TOML forbids.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Fraction | float):
        return str(int(value)) if value == int(value) else _decimal(Fraction(value))
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{toml_value(str(key))} = {toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return str(value)


def _decimal(value: Fraction) -> str:
    """Exact: values come from decimal texts, so some power of ten makes them whole."""
    digits = next(count for count in range(100) if (value * 10**count).denominator == 1)
    text = str(abs(int(value * 10**digits))).rjust(digits + 1, "0")
    return f"{'-' if value < 0 else ''}{text[:-digits]}.{text[-digits:]}"
