"""`pyshim version`."""

import argparse
import platform

from pyshim import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    print(f"pyshim {__version__} (Python {platform.python_version()}, {platform.machine()})")
    return 0
