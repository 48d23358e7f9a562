"""The file that containerd executes as the shim.

The shim runs isolated from the environment and without `site` (`python -I -S`), which makes it start faster and keeps
PYTHON* variables and user directories out. So the launcher itself says where the package and its dependencies are.
Pure.
"""

import os
import shlex

# The kernel reads this much of a script's first line (BINPRM_BUF_SIZE), and splits it at the first blank only.
_MAX_SHEBANG_BYTES = 255


def launcher_text(python: str, paths: tuple[str, ...]) -> str:
    # Behind the standard library: its modules are found first, and ours never replace them.
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
    # One text for two languages: sh executes the second line, Python takes the lines up to the quotes for a string.
    return f"#!/bin/sh\n'''exec' {shlex.quote(python)} -IS \"$0\" \"$@\"\n' '''\n{body}"
