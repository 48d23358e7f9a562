"""The files, links and blocks that an installation writes, as values. Pure."""

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


Write = FileWrite | LinkWrite | BlockWrite
