"""Configurations of tests, written to files so that keys have lines."""

from pathlib import Path

from pyshim.config.effective import Effective, examine
from pyshim.config.sources import read_source
from pyshim.model.task import RuntimeOptions


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def options(path: Path) -> RuntimeOptions:
    return RuntimeOptions(config_path=str(path), config_body=b"")


def examined(path: Path, text: str = "") -> Effective:
    """The result of the file at `path`, which is written first if `text` is given."""
    if text:
        write(path, text)
    return examine(read_source(options(path), {}))
