"""A configuration whose VMM and virtiofsd are stand-ins, for what the shim itself costs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from integration.framework import shim_config

_HERE = Path(__file__).resolve().parent
_VMM = """\
#!{python} -IS
import sys

sys.path.append({here!r})
import stub_vm

stub_vm.main()
"""
# Says that it is the Rust one, then waits to be ended, at a FIFO without a writer: it keeps its own command line, which
# shows the clean-up that the process is the sandbox's, and has no child.
_VIRTIOFSD = """\
#!/bin/sh
case "$1" in
--print-capabilities) echo '{"type": "fs", "features": ["separate-options", "migrate-precopy"]}' ;;
*) read -r _ <"${0%/*}/never-written" ;;
esac
"""


def config(directory: Path) -> Path:
    """The shipped configuration with stand-ins, in a new directory below `directory`."""
    home = directory / "stubs"
    home.mkdir()
    vmm, virtiofsd = home / "qemu-system-stub", home / "virtiofsd"
    vmm.write_text(_VMM.format(python=sys.executable, here=str(_HERE)))
    virtiofsd.write_text(_VIRTIOFSD)
    os.mkfifo(home / "never-written")
    for program in (vmm, virtiofsd):
        program.chmod(0o755)
    return shim_config.variant(home, path=vmm, virtio_fs_daemon=virtiofsd)
