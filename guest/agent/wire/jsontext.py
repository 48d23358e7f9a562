"""JSON text without the json package, whose import costs the guest ten times what this module does."""

from __future__ import annotations

from _json import encode_basestring_ascii as _quoted


def dumps(value: object) -> str:
    """`value`, made of dict with str keys, list, tuple, str, int, bool and None, as JSON; else TypeError."""
    out: list[str] = []
    _write(value, out)
    return "".join(out)


def _write(value: object, out: list[str]) -> None:
    if value is True:
        out.append("true")
    elif value is False:
        out.append("false")
    elif value is None:
        out.append("null")
    elif isinstance(value, str):
        out.append(_quoted(value))
    elif isinstance(value, int):
        out.append(str(value))
    elif isinstance(value, dict):
        out.append("{")
        for index, (key, item) in enumerate(value.items()):
            out.append(f"{',' if index else ''}{_quoted(key)}:")
            _write(item, out)
        out.append("}")
    elif isinstance(value, (list, tuple)):
        out.append("[")
        for index, item in enumerate(value):
            if index:
                out.append(",")
            _write(item, out)
        out.append("]")
    else:
        raise TypeError(f"no JSON for {type(value).__name__}")
