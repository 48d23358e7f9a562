"""`pyshim launcher install DIR`: the file that containerd executes as the shim.

The shim runs isolated from the environment and without `site` (`python -I -S`), which makes it start faster and keeps
PYTHON* variables and user directories out. So the launcher itself says where the package and its dependencies are.
"""

import argparse
import os
import shlex
import sys
import sysconfig

from pyshim.bootstrap.info import BINARY
from pyshim.host.whole_files import replace_file

# The kernel reads this much of a script's first line (BINPRM_BUF_SIZE), and splits it at the first blank only.
_MAX_SHEBANG_BYTES = 255


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    install = actions.add_parser("install", help="write the launcher script for this interpreter and installation")
    install.add_argument("directory", metavar="DIR", help="where containerd finds it: a directory of its PATH")


def run(arguments: argparse.Namespace) -> int:
    print(install(arguments.directory))
    return 0


def install(directory: str) -> str:
    """The path of the launcher, which is in place, whole, and executable."""
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(os.path.abspath(directory), BINARY)
    text = launcher_text(sys.executable, import_paths())
    replace_file(path, os.fsencode(text), mode=0o755, durable=True, many_writers=True)
    return path


def import_paths() -> tuple[str, ...]:
    """Where this package (a checkout or an installation) and its dependencies are imported from."""
    package_home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    candidates = (package_home, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return tuple(dict.fromkeys(candidates))


def launcher_text(python: str, paths: tuple[str, ...]) -> str:
    # After the standard library, not before it: names of ours never shadow it, and its modules are found first.
    body = f"""\
# Written by `pyshim launcher install`.
import sys

sys.path += {list(paths)!r}
from pyshim.__main__ import main

sys.exit(main(launcher=__file__))
"""
    shebang = f"#!{python} -IS\n"
    if " " not in python and len(os.fsencode(shebang)) <= _MAX_SHEBANG_BYTES:
        return shebang + body
    # One text for two languages: sh executes the second line, Python takes the lines up to the quotes for a string.
    return f"#!/bin/sh\n'''exec' {shlex.quote(python)} -IS \"$0\" \"$@\"\n' '''\n{body}"
