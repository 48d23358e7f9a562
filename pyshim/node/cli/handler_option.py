"""Option `--handler` of `pyshim install` and `pyshim node-agent run`."""

import os
from pathlib import Path

from pyshim.config.load import build_config
from pyshim.config.sources import SHIPPED_PATH, named_file, read_source
from pyshim.node.install.handlers import Handler, chosen_handlers

FORM = "NAME[:BASE][=FILE]"


def handlers_of(words: tuple[str, ...]) -> tuple[Handler, ...]:
    """The handlers, each with the settings of its FILE.

    Raises ShimError for a malformed word, and for settings with which no pod would start.
    """
    return chosen_handlers(words, _settings)


def _settings(handler: Handler, path: str) -> str:
    shipped = os.path.join(os.path.dirname(SHIPPED_PATH), handler.source)
    build_config(read_source(named_file(shipped), {}, on_top=(path,)))
    return Path(path).read_text(encoding="utf-8")
