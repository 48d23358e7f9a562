"""Objects for ever: the objects a process has are never freed again, so their counts of references mean nothing.

CPython 3.11 has a count in every object, None and each function included, and writes to it with every look. Once such
a count is so large that it never reaches zero, any value near it will do: a page that differs from an earlier state by
such counts alone can be put back to that state. Source: CPython 3.11, Include/object.h.
"""

import array
import ctypes
import gc
import mmap
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

EVER = 1 << 30
"""Added to a count. No process has as many references to one object, so putting back a count never makes it zero."""
_WORD_BYTES = 8
_MOST_OBJECTS = 1 << 22
_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock


class Everlasting(NamedTuple):
    """Addresses, the same in every fork, of objects that exist as long as their process; of code objects once more."""

    objects: "memoryview[int]"
    code: "memoryview[int]"


def require_known_interpreter() -> None:
    """What is written here about objects in memory holds for this interpreter. Raises OSError."""
    if (sys.implementation.name, sys.version_info[:2], ctypes.sizeof(ctypes.c_void_p)) != (
        "cpython",
        (3, 11),
        _WORD_BYTES,
    ):
        raise OSError(f"{sys.implementation.name} {sys.version.split()[0]} keeps its objects otherwise")


@contextmanager
def everlasting_objects() -> Iterator[Everlasting]:
    """Every object that the garbage collector knows, or that such a one refers to, is never freed again.

    Raises OSError when the interpreter is unknown or the process cannot fork.
    """
    require_known_interpreter()
    known = gc.get_objects()
    # Searched for in a child: its memory is not to be ours.
    with mmap.mmap(-1, (2 * _MOST_OBJECTS + 2) * _WORD_BYTES) as shared:
        in_child(lambda: _write(shared, known))
        words = memoryview(shared).cast("Q")
        count = words[0]
        objects, code = words[1 : 1 + count], words[2 + count : 2 + count + words[1 + count]]
        try:
            for address in objects:
                ctypes.c_ssize_t.from_address(address).value += EVER
            known.clear()  # only now: what is written to must exist
            yield Everlasting(objects, code)
        finally:
            for view in (objects, code, words):
                view.release()


def in_child(work: Callable[[], None]) -> None:
    """`work` has been done by a copy of this process, which has ended. Raises OSError when it failed.

    An exact copy: `os.fork` would have modules make objects anew in it, such as locks.
    """
    child = _libc.fork()
    if child < 0:
        raise OSError(ctypes.get_errno(), f"fork: {os.strerror(ctypes.get_errno())}")
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise OSError(f"a child for it failed: {os.waitstatus_to_exitcode(status)}")


def _write(shared: mmap.mmap, known: list[object]) -> None:
    objects, code = array.array("Q"), array.array("Q")
    for address, is_code in _reachable(known):
        objects.append(address)
        if is_code:
            code.append(address)
    for found in (objects, code):
        if len(found) > _MOST_OBJECTS:
            raise OverflowError(f"{len(found)} objects")
        shared.write(len(found).to_bytes(_WORD_BYTES, sys.byteorder))
        shared.write(found)


def _reachable(known: list[object]) -> Iterator[tuple[int, bool]]:
    """Address, and whether it is code, of each of these objects and of what they refer to."""
    # What runs now ends; and here it refers to the search itself.
    running = (types.FrameType, types.GeneratorType, types.CoroutineType)
    seen: dict[int, object] = {id(known): known}
    todo = known.copy()
    while todo:
        found = todo.pop()
        kind = type(found)  # `isinstance` would ask the object, which may make others to answer
        if id(found) in seen or kind in running:
            continue
        seen[id(found)] = found
        yield id(found), kind is types.CodeType
        todo += _parts_of_code(cast(types.CodeType, found)) if kind is types.CodeType else gc.get_referents(found)


def _parts_of_code(code: types.CodeType) -> tuple[object, ...]:
    """The collector does not look into code. What is made anew when it is asked for is left out."""
    return (
        code.co_consts,
        code.co_names,
        code.co_filename,
        code.co_name,
        code.co_qualname,
        code.co_linetable,
        code.co_exceptiontable,
    )
