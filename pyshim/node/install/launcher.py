"""The file that containerd executes as the shim.

The shim runs isolated from the environment and without `site` (`python -I -S`), which makes it start faster and keeps
PYTHON* variables and user directories out. So the launcher has the paths of the package and its dependencies.
"""

import os
import shlex
import sys
import sysconfig

from pyshim.host.files import replace_file
from pyshim.host.writers import writable_below, writable_by_others
from pyshim.start.dialect import BINARY

# The kernel reads this much of a script's first line (BINPRM_BUF_SIZE), and splits it at the first blank only.
_MAX_SHEBANG_BYTES = 255


def launcher_text(python: str, paths: tuple[str, ...]) -> str:
    # After the standard library, so that no module of ours replaces one of its modules.
    body = f"""\
# Written by pyshim.
import sys

sys.path += {list(paths)!r}
from pyshim.__main__ import main

sys.exit(main(launcher=__file__))
"""
    shebang = f"#!{python} -IS\n"
    if " " not in python and len(os.fsencode(shebang)) <= _MAX_SHEBANG_BYTES:
        return shebang + body
    # The text is valid in two languages: sh executes the second line, which is in a string for Python.
    return f"#!/bin/sh\n'''exec' {shlex.quote(python)} -IS \"$0\" \"$@\"\n' '''\n{body}"


def exposed(directory: str) -> tuple[str, ...]:
    """Paths that other users than root can write: the launcher's `directory`, the code it names, the built guest."""
    home, *libraries = import_paths()
    trees = [os.path.join(home, name) for name in ("pyshim", "hypervisors", "protos", ".build/guest")]
    ways = writable_by_others((directory, sys.executable, home, *libraries, *trees))
    return tuple(dict.fromkeys((*ways, *writable_below((*trees, *libraries)))))


def install(directory: str) -> str:
    """The path of the launcher, which is in place, whole, and executable."""
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(os.path.abspath(directory), BINARY)
    text = launcher_text(sys.executable, import_paths())
    replace_file(path, os.fsencode(text), mode=0o755, durable=True, many_writers=True)
    return path


def import_paths() -> tuple[str, ...]:
    """The directories that this package (a checkout or an installation) and its dependencies are imported from."""
    package_home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    candidates = (package_home, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return tuple(dict.fromkeys(candidates))
