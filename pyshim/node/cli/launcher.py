"""`pyshim launcher install DIR`: the file that containerd executes as the shim.

It names the interpreter and the import path (`pyshim.node.install.launcher`).
"""

import os
import sys
import sysconfig

import click

from pyshim.host.files import replace_file
from pyshim.host.writers import writable_below, writable_by_others
from pyshim.node.cli.output import examples
from pyshim.node.install.launcher import launcher_text
from pyshim.start.dialect import BINARY

_MAX_SHOWN = 10
"""Places in one message: a checkout of another user has thousands of files."""


@click.group(epilog=examples("pyshim launcher install /usr/local/bin"))
def command() -> None:
    """Write the shim binary that containerd calls."""


@command.command("install")
@click.argument("directory", metavar="DIR")
@click.option("--anyway", is_flag=True, help="Only warn of what users other than root can change, for development.")
def _install(directory: str, anyway: bool) -> int:
    """Write the launcher script for this interpreter and installation.

    DIR is where containerd finds it: a directory of its PATH.
    """
    os.makedirs(directory, exist_ok=True)
    found = exposed(directory)
    if found:
        more = f" and {len(found) - _MAX_SHOWN} more places" if len(found) > _MAX_SHOWN else ""
        places = ", ".join(found[:_MAX_SHOWN])
        print(
            f"pyshim: install launcher in '{directory}': root would execute or boot what others can write:"
            f" {places}{more} (hint: 'chown -R root:root' and 'chmod -R go-w', or an installation in another place)",
            file=sys.stderr,
        )
        if not anyway:
            return 1
    print(install(directory))
    return 0


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
