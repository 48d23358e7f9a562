"""Code and classes that no longer write to themselves when they are used.

CPython 3.11 counts the calls of a function in its code, rewrites that once it has been called often enough, and goes on
counting at each instruction it has found no faster form for. A class gets a number when it is first looked up in. All
forks of a process could share them otherwise. Source: CPython 3.11, Include/cpython/code.h, Python/specialize.c and
Lib/opcode.py for the instructions, Objects/typeobject.c for the numbers (tp_version_tag).
"""

import ctypes
import gc
import opcode
from collections.abc import Iterable
from types import CodeType

_SIZE_AT = 16  # ob_size: instructions and their caches, of two bytes each
_WARMUP_AT = 52  # co_warmup: -_CALLS, counted up to 0, where it stays and the code is rewritten
_UNIT_BYTES = 2
_CALLS = 8
_NEVER_MISSED = 53
"""The first unit of cache of a faster form, until that was tried on what it is not for."""


def stop_adapting(addresses: Iterable[int]) -> None:
    """Of the code objects there, those called often keep the faster forms that fitted, the others stay as they are.

    Neither counts any more, but for a faster form that no longer fits. Raises OSError when code is not laid
    out as it is known to be.
    """
    _require_known_layout()
    plain, faster, caches = _instructions()
    for address in addresses:
        warmup = ctypes.c_int16.from_address(address + _WARMUP_AT)
        if warmup.value:
            warmup.value = 0  # never to be rewritten
            continue
        units = ctypes.c_ssize_t.from_address(address + _SIZE_AT).value
        code = (ctypes.c_ubyte * (units * _UNIT_BYTES)).from_address(address + CodeType.__basicsize__)
        at = 0
        while at < len(code):
            found = code[at]
            if found in plain:
                code[at] = plain[found]
            elif found in faster and code[at + _UNIT_BYTES] | code[at + _UNIT_BYTES + 1] << 8 != _NEVER_MISSED:
                code[at] = faster[found]
            at += _UNIT_BYTES * (1 + caches[found])


def have_looked_up() -> None:
    """Every class that the collector knows has been looked something up in: it writes to itself the first time."""
    for kind in gc.get_objects():
        if issubclass(type(kind), type):
            getattr(kind, "no such name", None)


def _instructions() -> tuple[dict[int, int], dict[int, int], list[int]]:
    """The plain form of each instruction that counts, and of each that counts when it does not fit.

    And how many units of cache follow each instruction.
    """
    caches = list(opcode._inline_cache_entries)  # type: ignore[attr-defined]
    free = (number for number, name in enumerate(opcode.opname) if name.startswith("<"))
    numbers = dict(zip(opcode._specialized_instructions, free, strict=False))  # type: ignore[attr-defined]
    plain, faster = {}, {}
    for family, forms in opcode._specializations.items():  # type: ignore[attr-defined]
        for form in forms:
            if form in numbers:
                caches[numbers[form]] = caches[opcode.opmap[family]]
            if form.endswith("_ADAPTIVE"):
                plain[numbers[form]] = opcode.opmap[family]
            elif form in numbers and caches[opcode.opmap[family]]:
                faster[numbers[form]] = opcode.opmap[family]
    return plain, faster, caches


def _require_known_layout() -> None:
    """The words this module writes to are what it takes them for: a function shows it in its first calls."""

    def probe() -> int:
        return len(())

    def looks() -> tuple[int, int]:
        return warmup.value, first.value

    address = id(probe.__code__)
    warmup = ctypes.c_int16.from_address(address + _WARMUP_AT)
    first = ctypes.c_ubyte.from_address(address + CodeType.__basicsize__)
    units = ctypes.c_ssize_t.from_address(address + _SIZE_AT).value
    quick = opcode._specialized_instructions.index("RESUME_QUICK")  # type: ignore[attr-defined]
    numbers = [number for number, name in enumerate(opcode.opname) if name.startswith("<")]
    expected = [(-_CALLS, opcode.opmap["RESUME"]), (0, numbers[quick])]
    found = [looks()]
    for _ in range(_CALLS):
        probe()
    found.append(looks())
    if found != expected or units * _UNIT_BYTES != len(probe.__code__.co_code):
        raise OSError(f"code is not laid out as known: {found}, expected {expected}")
