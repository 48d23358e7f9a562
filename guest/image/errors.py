"""The error of this room."""


class BuildError(Exception):
    """The image cannot be built; the text says `verb object: cause`."""
