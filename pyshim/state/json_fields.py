"""Reading a JSON object whose shape is known but not trusted: each value comes typed, or with an error naming it."""

from collections.abc import ItemsView, Mapping
from typing import NoReturn

from pyshim.model.errors import Internal

_MISSING = object()


class StateDamaged(Internal):
    """The file is not what we write: cut off, edited, or of a disk gone bad."""


class Fields:
    """One JSON object; `where` names it in errors. A default makes a missing key acceptable, never a wrong type."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise StateDamaged(f"read state {where!r}: not a JSON object")
        self.where = where
        self._value = value

    def text(self, key: str, default: object = _MISSING) -> str:
        value = self._get(key, default)
        return value if isinstance(value, str) else self._wrong(key, "a string")

    def number(self, key: str, default: object = _MISSING) -> int:
        value = self._get(key, default)
        # bool is an int to Python, not to JSON.
        return value if isinstance(value, int) and not isinstance(value, bool) else self._wrong(key, "a whole number")

    def truth(self, key: str, default: object = _MISSING) -> bool:
        value = self._get(key, default)
        return value if isinstance(value, bool) else self._wrong(key, "true or false")

    def child(self, key: str, default: object = _MISSING) -> "Fields":
        return Fields(self._get(key, default), f"{self.where}: {key}")

    def children(self, key: str) -> tuple["Fields", ...]:
        value = self._get(key, _MISSING)
        if not isinstance(value, list):
            self._wrong(key, "a list")
        return tuple(Fields(item, f"{self.where}: {key}[{index}]") for index, item in enumerate(value))

    def is_null(self, key: str) -> bool:
        return self._value.get(key) is None

    def items(self) -> ItemsView[str, object]:
        return self._value.items()

    def _get(self, key: str, default: object) -> object:
        value = self._value.get(key, default)
        return self._wrong(key, "there") if value is _MISSING else value

    def _wrong(self, key: str, expected: str) -> NoReturn:
        raise StateDamaged(f"read state {self.where!r}: {key} is not {expected}")
