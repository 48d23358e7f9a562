"""Reasons why a state cannot be used."""

from pyshim.model.errors import FailedPrecondition, Internal


class StateDamaged(Internal):
    """The file is not what we wrote: cut off, edited, or changed by the disk."""


class StateTooNew(FailedPrecondition):
    """A later version wrote the file, so that reading it by our rules could undo the wrong resources."""


class NotOurState(Internal):
    """Another runtime wrote the file: Kata's own shim uses the same directory. We leave it alone."""
