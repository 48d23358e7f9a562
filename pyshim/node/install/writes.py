"""The files, links, blocks and members that an installation writes, as values. Pure.

A block is marked, and lies in another program's text file. Its removal restores every byte. JSON has no comments to
mark a block with: of such a file we have members (`daemon_json.py`).
"""

from typing import Any

import msgspec


class FileWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A file of our own."""

    path: str
    content: str
    mode: int = 0o644


class LinkWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A symbolic link of our own."""

    path: str
    target: str


class BlockWrite(msgspec.Struct, frozen=True, kw_only=True):
    """A marked block in a file that is not ours."""

    path: str
    body: str
    first: bool = False
    """Before all else in the file; False: after it."""
    before: str = ""
    """The file's text before the block, if the file does not exist yet."""


class MembersWrite(msgspec.Struct, frozen=True, kw_only=True):
    """Members of `runtimes` in Docker's daemon.json."""

    path: str
    members: dict[str, dict[str, Any]]
    former: tuple[str, ...] = ()
    """Names that an earlier installation wrote, and that go."""
    before: str = "{}\n"
    """The file's text before the members, if the file does not exist yet."""


PartWrite = BlockWrite | MembersWrite
"""In a file that is not ours."""
Write = FileWrite | LinkWrite | PartWrite

_BEGIN = "# begin pyshim: written by `pyshim install`, removed by `pyshim uninstall`"
_CUT = ". The line before had no end"
_END = "# end pyshim\n"
_BYTE_ORDER_MARK = "\ufeff"
"""Some editors put it at the beginning of a file, where it is not part of the text."""


def block_in(text: str) -> str | None:
    """The text within the block; None without one. Raises ValueError for a block that does not end."""
    block = _marked(text)
    return None if block is None else block.partition("\n")[2].removesuffix(_END)


def with_block(text: str, body: str, *, first: bool) -> str:
    """`text`, which has no block, with a block of `body` before it (`first`) or after it."""
    if first:
        mark = _BYTE_ORDER_MARK if text.startswith(_BYTE_ORDER_MARK) else ""
        return f"{mark}{_BEGIN}\n{body}{_END}{text.removeprefix(mark)}"
    cut = text != "" and not text.endswith("\n")
    return f"{text}{chr(10) if cut else ''}{_BEGIN}{_CUT if cut else ''}\n{body}{_END}"


def without_block(text: str) -> str:
    """The text that `with_block` was given, with later additions around the block.

    Raises ValueError for a block that does not end.
    """
    block = _marked(text)
    if block is None:
        return text
    before, _, after = text.partition(block)
    if block.startswith(_BEGIN + _CUT) and not after:  # else lines were added since
        before = before.removesuffix("\n")
    return before + after


def _marked(text: str) -> str | None:
    """The block with its markers."""
    start = text.find(_BEGIN)
    if start < 0:
        return None
    end = text.find(_END, start)
    if end < 0:
        raise ValueError(f"a line {_BEGIN!r} has no line {_END.strip()!r} after it")
    return text[start : end + len(_END)]
