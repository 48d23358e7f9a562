"""`pyshim zygote`: becomes the node's zygote, in the foreground, for a service manager.

The zygote has to be started as the shim is (`python -I -S`): its forks keep the interpreter's settings.
"""

import argparse
import os
import sys

from pyshim.bootstrap.start import ZYGOTE_DIR
from pyshim.operator.launcher import import_paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--idle", type=_seconds, default=0.0, metavar="SECONDS", help="end when unasked for so long; default 0: never"
    )
    parser.add_argument("--directory", default=ZYGOTE_DIR, metavar="DIR", help=f"of its socket; default {ZYGOTE_DIR}")


def run(arguments: argparse.Namespace) -> int:
    code = f"import sys; sys.path += {list(import_paths())!r}; from pyshim.__main__ import main; sys.exit(main())"
    words = ["-idle", str(arguments.idle), "-directory", os.path.abspath(arguments.directory), "zygote"]
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, *words])


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise ValueError
    return value
