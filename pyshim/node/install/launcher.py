"""The file that containerd executes as the shim.

The shim runs isolated from the environment and without `site` (`python -I -S`), which makes it start faster and keeps
PYTHON* variables and user directories out. So the launcher has the paths of the package and its dependencies.
Pure.
"""

import os
import shlex

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
