"""Entries of a ledger that no shim would have written are left alone, before any undo."""

import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from pyshim.cleanup.belonging import belongs_to
from pyshim.cleanup.conventions import Places
from pyshim.cleanup.release import release_all
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ledger import LedgerEntry, ResourceKind
from tests.unit.cleanup.test_release import entry

SHARE = "/run/kata-containers/shared/sandboxes/sb1"
CHECK = belongs_to("sb1", Places(), "/run/vc/sbs")
OURS = (
    entry(ResourceKind.DIRECTORY, "/run/vc/vm/sb1"),
    entry(ResourceKind.DIRECTORY, SHARE),
    entry(ResourceKind.DIRECTORY, f"{SHARE}/mounts/app-1234-data"),
    entry(ResourceKind.SOCKET, "/run/vc/vm/sb1/vhost-fs.sock"),
    entry(ResourceKind.SOCKET, "/run/vc/sbs/sb1/shim-monitor.sock"),
    entry(ResourceKind.SOCKET, "/run/pyshim/metrics/sb1"),
    entry(ResourceKind.FILE, "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/cache/disk.img"),
    entry(ResourceKind.FILE, "/run/kata-containers/shared/direct-volumes/L3ZvbA==/sb1"),
    entry(ResourceKind.MOUNT, f"{SHARE}/shared"),
    entry(ResourceKind.MOUNT, "/run/containerd/io.containerd.runtime.v2.task/k8s.io/app/rootfs"),
    entry(ResourceKind.MOUNT, "/run/containerd/x/app/rootfs/etc/sub"),
    entry(ResourceKind.NETNS, "/run/netns/pod"),
    entry(ResourceKind.PROCESS, "11111111-2222", program="/usr/bin/qemu-system-x86_64"),
    entry(ResourceKind.CGROUP, "/kubepods/pod1/kata_sb1", roots="/sys/fs/cgroup/cpu:/sys/fs/cgroup/memory"),
    entry(ResourceKind.CGROUP, "/sys/fs/cgroup/kata_sb1"),
    entry(ResourceKind.LINK, "tap0_kata", netns="/run/netns/pod"),
    entry(ResourceKind.VFIO, "0000:3b:00.1", driver="ixgbe"),
    entry(ResourceKind.REMOTE_VM, "vm-1", socket="/run/peerpod/hypervisor.sock"),
)
FOREIGN = (
    entry(ResourceKind.DIRECTORY, "/etc"),
    entry(ResourceKind.DIRECTORY, "/run/vc/vm"),
    entry(ResourceKind.DIRECTORY, "/run/vc/vm/sb2"),
    entry(ResourceKind.DIRECTORY, "/run/vc/vm/sb10"),
    entry(ResourceKind.DIRECTORY, "/run/vc/vm/sb1/../sb2"),
    entry(ResourceKind.DIRECTORY, "run/vc/vm/sb1"),
    entry(ResourceKind.DIRECTORY, "/run/vc/vm/sb1/"),
    entry(ResourceKind.DIRECTORY, "/run/vc/vm/sb1\0"),
    entry(ResourceKind.SOCKET, "/run/containerd/containerd.sock"),
    entry(ResourceKind.SOCKET, "/run/pyshim/metrics/sb2"),
    entry(ResourceKind.FILE, "/etc/passwd"),
    entry(ResourceKind.FILE, "/var/lib/vms/disk.img"),
    entry(ResourceKind.MOUNT, "/home"),
    entry(ResourceKind.MOUNT, "/"),
    entry(ResourceKind.NETNS, "/proc/1/ns/net"),
    entry(ResourceKind.PROCESS, "containerd"),
    entry(ResourceKind.PROCESS, "containerd", program="sh"),
    entry(ResourceKind.CGROUP, "/", roots="/sys/fs/cgroup"),
    entry(ResourceKind.CGROUP, "/x", roots="/home"),
    entry(ResourceKind.CGROUP, "/home/x"),
    entry(ResourceKind.LINK, "a/b"),
    entry(ResourceKind.QDISC, ""),
    entry(ResourceKind.VFIO, "../../x"),
    entry(ResourceKind.REMOTE_VM, "vm-1", socket="hypervisor.sock"),
)


@pytest.mark.parametrize(
    ("roots", "is_ours"), [("/cgroups/memory", True), ("/cgroups/memory:/cgroups/cpu", True), ("/home", False)]
)
def test_a_cgroup_may_be_wherever_the_node_has_mounted_a_hierarchy(tmp_path: Path, roots: str, is_ours: bool) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "cgroups").write_text("cpu 1 1 1\nmemory 2 1 1\n")
    (tmp_path / "self" / "mountinfo").write_text(
        "30 1 0:26 / /cgroups/memory rw shared:9 - cgroup cgroup rw,memory\n"
        "31 1 0:27 / /cgroups/cpu rw shared:9 - cgroup cgroup rw,cpu\n"
        "32 1 8:1 / /home rw - ext4 /dev/sda1 rw\n"
    )
    check = belongs_to("sb1", Places(), "/run/vc/sbs", proc_root=str(tmp_path))
    cgroup = entry(ResourceKind.CGROUP, "/kubepods/pod1/kata_sb1", roots=roots)

    with nullcontext() if is_ours else pytest.raises(FailedPrecondition, match="it is no cgroup"):
        check(cgroup)


@pytest.mark.parametrize("ours", OURS, ids=lambda each: f"{each.kind.value} {each.key}")
def test_what_a_shim_writes_passes(ours: LedgerEntry) -> None:
    CHECK(ours)


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda each: f"{each.kind.value} {each.key!r}")
def test_what_no_shim_writes_is_left_alone_and_reported(foreign: LedgerEntry) -> None:
    with pytest.raises(FailedPrecondition, match=f"release {foreign.kind.value} .*so it is left alone"):
        CHECK(foreign)


def test_a_foreign_entry_does_not_keep_the_others_from_their_undo() -> None:
    gone = entry(ResourceKind.DIRECTORY, "/run/vc/vm/sb1/never-made")
    foreign = entry(ResourceKind.DIRECTORY, "/nowhere/at/all")
    errors: list[str] = []

    held = release_all((gone, foreign), deadline=time.monotonic() + 60, one_timeout_s=5, errors=errors, check=CHECK)

    assert held == (foreign,)
    assert len(errors) == 1
