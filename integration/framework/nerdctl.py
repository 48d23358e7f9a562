"""nerdctl, as a user calls it, on the tests' containerd: data and networks of its own below a directory of the test.

`python -m integration.framework.nerdctl` builds it, outside the enclosure, which has no network. Its tests run where
NERDCTL is set, which `make peers WHAT=nerdctl` does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from . import cri_session
from .containerd import Containerd, missing_programs
from .ctr import Ctr
from .releases import PROJECT, go_build, run_go

CHOICE = "NERDCTL"
VERSION = "v2.1.2"
"""The last one that a module of one's own can require: later ones replace a module by a directory of their own tree."""
_PACKAGE = "github.com/containerd/nerdctl/v2/cmd/nerdctl"
PROGRAMS = PROJECT / ".build" / "cache" / "nerdctl" / VERSION
_BRIDGE = "nerdctl0"
"""Of its default network. nerdctl would make it with the first container and leave it."""
_SETTINGS = """\
address = "{socket}"
data_root = "{ground}/data"
cni_path = "/usr/lib/cni"
cni_netconfpath = "{ground}/net.d"
cgroup_manager = "cgroupfs"
"""


def is_chosen() -> bool:
    return bool(os.environ.get(CHOICE))


def build() -> None:
    """nerdctl is in PROGRAMS. Raises OSError saying what failed."""
    if missing := missing_programs("iptables"):
        raise FileNotFoundError(f"run nerdctl: no program {missing[0]!r} (hint: Debian's package iptables)")
    with go_build(PROGRAMS, f"nerdctl {VERSION}", "some minutes") as work:
        if work is None:
            return
        run_go(work, "mod", "init", "pyshim.test/nerdctl")
        run_go(work, "get", f"{_PACKAGE}@{VERSION}")
        run_go(work, "build", "-trimpath", "-o", "bin/", _PACKAGE)


@contextlib.contextmanager
def nerdctl(daemon: Containerd, ground: Path) -> Iterator[Ctr]:
    """nerdctl on `daemon`; its files are in `ground`, its bridge is gone afterwards."""
    ground.mkdir()
    settings = ground / "nerdctl.toml"
    settings.write_text(_SETTINGS.format(socket=daemon.directories.socket, ground=ground))
    environment = {**daemon.ctr.environment, "NERDCTL_TOML": str(settings)}
    with cri_session.private_var_lib(ground / "var-lib"):
        subprocess.run(["ip", "link", "add", _BRIDGE, "type", "bridge"], check=True)
        try:
            yield Ctr(program=PROGRAMS / "nerdctl", socket=daemon.directories.socket, environment=environment)
        finally:
            subprocess.run(["ip", "link", "delete", _BRIDGE], check=True)


if __name__ == "__main__":
    try:
        build()
    except OSError as error:
        sys.exit(f"nerdctl: {error}")
