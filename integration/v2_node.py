"""`make peers WHAT=v2`: the integration tests on a node that has cgroup v2 only, whatever this machine has.

The node is a VM of our own: a privileged container with the rights of its guest's root, in a pod whose guest has all
controllers in cgroup v2. Its files are this machine's, with what is written kept in memory. The VMs that its tests boot
are VMs in a VM; without KVM that is an emulation within an emulation, and a boot takes minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pyshim.resources.probe import probe_host

from .framework import enclosure, shim_config
from .framework.containerd import Containerd, remove_daemon_files
from .framework.daemon import Directories
from .framework.leaks import HostState, assert_nothing_left

PROJECT = Path(__file__).resolve().parents[1]
GROUND = Path("/run/pyshim-v2-node")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MEMORY_MIB = int(os.environ.get("MEMORY_MIB", "8192"))
# The root is private, since pivot_root takes no shared one; what the tests write goes to memory. Processes are in the
# root cgroup, as those of an installation's first login: only there may a cgroup have both processes and controllers.
_NODE = """\
mount --make-rprivate /
mount -t tmpfs -o mode=0755,size=60% memory /run
mkdir /run/upper /run/work /run/node
mount -t overlay -o lowerdir=/,upperdir=/run/upper,workdir=/run/work node /run/node
cd /run/node
for top in proc sys dev; do mount --rbind /$top $top; done
mount -t cgroup2 cgroup2 sys/fs/cgroup
echo $$ >sys/fs/cgroup/cgroup.procs
pivot_root . run; umount -l run; mount -t tmpfs memory run; mount -t tmpfs memory tmp
cd "$1"
if [ -n "$2" ]; then
    for file in vmlinux vmlinuz initrd.img rootfs.img; do mount --bind "$2/$file" ".build/guest/$file"; done
fi
shift 2
exec "$@"
"""


def main(words: list[str]) -> int:
    """The exit status of `scripts/integration WORDS` on the node. Nothing of the node is left."""
    if enclosure.MARK not in os.environ:
        sys.exit("v2_node: run it with `make peers WHAT=v2`")
    if PROJECT.stat().st_dev != Path("/").stat().st_dev:
        sys.exit(f"v2_node: share {PROJECT}: it is not on the file system of /, which the node has")
    before = HostState.look((GROUND,))
    daemon = Containerd(Directories(root=GROUND, state=Path("/run/containerd")), binaries=PROJECT / "bin")
    daemon.start()
    try:
        files = GROUND / "files"
        files.mkdir()
        subprocess.run(["mount", "--bind", "/", files], check=True)
        config = shim_config.variant(GROUND, default_vcpus=os.cpu_count() or 1, default_memory=_MEMORY_MIB)
        options = ("--rm", "--privileged", "--rootfs", "--env", f"PATH={_PATH}", "--env", "HOME=/root")
        run = daemon.ctr.run_words(*options, config=config)
        guest = "" if probe_host().kvm_usable else str(shim_config.BOOKWORM_GUEST)  # docs/HACKING.md
        within = ("sh", "-ec", _NODE, "node", str(PROJECT), guest, "scripts/integration", *words)
        return subprocess.run(daemon.ctr.argv(*run, files, "v2-node", *within), env=daemon.ctr.environment).returncode
    finally:
        daemon.stop()
        subprocess.run(["umount", "-R", GROUND / "files"])
        remove_daemon_files(daemon.directories)
        assert_nothing_left(before, (GROUND,))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
