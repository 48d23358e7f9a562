"""The one error this room raises on purpose."""


class BuildError(Exception):
    """The image cannot be built; the text says `verb object: cause`."""
