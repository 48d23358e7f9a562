"""`dataclass`: the standard library's, with methods that all classes share.

The original writes six methods for each class as text and compiles them. That is half a millisecond a class, a third of
all that an executed shim would do before it can answer. Here a class gets its fields from the original, so `fields`,
`replace` and `asdict` work, and the functions below, which go through its fields when they are called. Nothing else is
different: a data class compares, hashes, prints, refuses changes, copies and matches as the original's does.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, slots, frozen=False, kw_only=False):
        """A data class is made of the class below. Its fields have slots, and no options but a default."""

        def made_of(plain):
            if not slots or hasattr(plain, "__post_init__"):
                raise TypeError(f"make data class {plain.__qualname__!r}: not without slots, nor with '__post_init__'")
            # Where there is none the original would write one, from the signature: dearer than all the rest.
            plain.__doc__ = plain.__doc__ or plain.__name__
            made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(plain)
            fields = dataclasses.fields(made)
            for each in fields:
                if not (each.init and each.repr and each.compare and each.hash is None):
                    raise TypeError(f"make field {each.name!r} of {plain.__qualname__!r}: options but a default")
            made.__field_names__ = tuple(each.name for each in fields)
            # Of the slots themselves: they are set although the class refuses changes.
            made.__set_fields__ = tuple((each.name, getattr(made, each.name).__set__) for each in fields)
            missing = dataclasses.MISSING
            made.__defaults__ = {each.name: each.default for each in fields if each.default is not missing}
            factories = ((each.name, each.default_factory) for each in fields)
            made.__factories__ = tuple((name, make) for name, make in factories if make is not missing)
            for name, method in (_FROZEN if frozen else _CHANGEABLE).items():
                # With an `__eq__` of its own a class has None for `__hash__`, which nobody wrote.
                if plain.__dict__.get(name) is None:
                    setattr(made, name, method)
            return made

        return made_of


def _init(self: Any, /, *positional: Any, **values: Any) -> None:
    fields = self.__set_fields__
    if positional:
        values = _named(type(self), positional, values)
    if len(values) != len(fields):
        values = self.__defaults__ | {name: make() for name, make in self.__factories__ if name not in values} | values
    try:
        for name, set_value in fields:
            set_value(self, values[name])
    except KeyError as error:
        raise TypeError(f"{type(self).__qualname__}.__init__() missing a required argument: {error}") from None
    if len(values) != len(fields):
        unknown = min(values.keys() - set(self.__field_names__))
        raise TypeError(f"{type(self).__qualname__}.__init__() got an unexpected keyword argument {unknown!r}")


def _named(cls: Any, positional: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
    """All arguments by their names. Raises TypeError for too many and for one given twice."""
    names = cls.__match_args__
    if len(positional) > len(names):
        raise TypeError(f"{cls.__qualname__}.__init__() takes {len(names)} positional arguments, not {len(positional)}")
    named = dict(zip(names, positional, strict=False))
    if twice := named.keys() & values.keys():
        raise TypeError(f"{cls.__qualname__}.__init__() got multiple values for argument {min(twice)!r}")
    return named | values


def _values(self: Any) -> tuple[Any, ...]:
    return tuple([getattr(self, name) for name in self.__field_names__])


def _repr(self: Any) -> str:
    values = ", ".join([f"{name}={getattr(self, name)!r}" for name in self.__field_names__])
    return f"{type(self).__qualname__}({values})"


def _eq(self: Any, other: Any) -> bool:
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _refuse_setting(self: Any, name: str, value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deleting(self: Any, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _set_state(self: Any, state: tuple[Any, ...]) -> None:
    for (_, set_value), value in zip(self.__set_fields__, state, strict=True):
        set_value(self, value)


_CHANGEABLE = {"__init__": _init, "__repr__": _repr, "__eq__": _eq, "__hash__": None}
_FROZEN = _CHANGEABLE | {
    "__hash__": _hash,
    "__setattr__": _refuse_setting,
    "__delattr__": _refuse_deleting,
    # For `copy` and `pickle`, which would set attributes.
    "__getstate__": _values,
    "__setstate__": _set_state,
}
