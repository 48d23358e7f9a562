"""Entries of a ledger that no shim would have written are left alone, before any undo."""

import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from pyshim.cleanup.names import Places, belongs_to, containers_of
from pyshim.cleanup.undo import undo_entries
from pyshim.host.processes import identity as processes
from pyshim.host.processes.stat import start_ticks_of
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ledger import LedgerEntry, ResourceKind
from tests.unit.cleanup.test_undo import entry

SHARE = "/run/kata-containers/shared/sandboxes/sb1"
CHECK = belongs_to("sb1", Places(), "/run/vc/sbs", container_ids=("app",))
DISK = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/cache/disk.img"
OURS = (
    entry(ResourceKind.DIRECTORY, "/run/vc/vm/sb1"),
    entry(ResourceKind.DIRECTORY, SHARE),
    entry(ResourceKind.DIRECTORY, f"{SHARE}/mounts/app-1234-data"),
    entry(ResourceKind.SOCKET, "/run/vc/vm/sb1/vhost-fs.sock"),
    entry(ResourceKind.SOCKET, "/run/vc/sbs/sb1/shim-monitor.sock"),
    entry(ResourceKind.SOCKET, "/run/pyshim/metrics/sb1"),
    entry(ResourceKind.FILE, DISK, sandbox="sb1"),
    entry(ResourceKind.DIRECTORY, "/run/kata-containers/swap/sb1"),
    entry(ResourceKind.FILE, "/run/kata-containers/shared/direct-volumes/L3ZvbA==/sb1"),
    entry(ResourceKind.MOUNT, f"{SHARE}/shared"),
    entry(ResourceKind.MOUNT, "/run/containerd/io.containerd.runtime.v2.task/k8s.io/app/rootfs"),
    entry(ResourceKind.MOUNT, "/run/containerd/x/app/rootfs/etc/sub"),
    entry(ResourceKind.MOUNT, "/run/containerd/x/sb1/rootfs"),
    entry(ResourceKind.CGROUP, "/a.slice/cri-containerd-sb1.scope/vcpu", roots="/sys/fs/cgroup"),
    entry(ResourceKind.CGROUP, "/kata_overhead/sb1", roots="/sys/fs/cgroup"),
    entry(ResourceKind.NETNS, "/run/netns/pod"),
    entry(ResourceKind.PROCESS, "11111111-2222", program="/usr/bin/qemu-system-x86_64"),
    entry(ResourceKind.CGROUP, "/kubepods/pod1/kata_sb1", roots="/sys/fs/cgroup/cpu:/sys/fs/cgroup/memory"),
    entry(ResourceKind.CGROUP, "/sys/fs/cgroup/kata_sb1"),
    entry(ResourceKind.LINK, "veth0_kata", netns="/run/netns/pod"),
    entry(ResourceKind.CGROUP, "/vc/kata_crio-sb1/vmm", roots="/sys/fs/cgroup/cpu"),
    entry(ResourceKind.CGROUP, "/vc/crio-sb1", roots="/sys/fs/cgroup/cpu"),
    entry(ResourceKind.CGROUP, "/a.slice/crio-sb1.scope", roots="/sys/fs/cgroup"),
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
    entry(ResourceKind.FILE, "/var/lib/vms/sb1"),
    entry(ResourceKind.FILE, "/run/kata-containers/shared/direct-volumes/L3ZvbA==/sb2"),
    entry(ResourceKind.FILE, DISK),
    entry(ResourceKind.FILE, DISK, sandbox="sb2"),
    entry(ResourceKind.MOUNT, "/run/containerd/x/other/rootfs"),
    entry(ResourceKind.MOUNT, "/run/containerd/x/other/rootfs/app/rootfs"),
    entry(ResourceKind.MOUNT, "/rootfs"),
    entry(ResourceKind.CGROUP, "/kubepods/pod1", roots="/sys/fs/cgroup"),
    entry(ResourceKind.CGROUP, "/kubepods/pod1/kata_sb10", roots="/sys/fs/cgroup"),
    entry(ResourceKind.CGROUP, "/kubepods/pod1/x_kata_sb1", roots="/sys/fs/cgroup"),
    entry(ResourceKind.CGROUP, "/system.slice/containerd.service", roots="/sys/fs/cgroup"),
    entry(ResourceKind.CGROUP, "/a.slice/cri-containerd-sb2.scope", roots="/sys/fs/cgroup"),
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

    with nullcontext() if is_ours else pytest.raises(FailedPrecondition, match="it is not a cgroup"):
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

    held = undo_entries((gone, foreign), deadline=time.monotonic() + 60, one_timeout_s=5, errors=errors, check=CHECK)

    assert held == (foreign,)
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("word", "ends"),
    [
        ("sandbox-sb1,debug-threads=on", True),
        ("--shared-dir=/run/kata-containers/shared/sandboxes/sb1/shared", True),
        ("sandbox-sb10", False),
        ("--socket=/run/vc/vm/xsb1/vsock/device.sock", False),
        ("containerd", False),
    ],
)
@pytest.mark.parametrize("is_known", [True, False], ids=["pid", "by its argv"])
def test_a_process_ends_only_if_it_bears_the_sandboxs_id(word: str, ends: bool, is_known: bool) -> None:
    """The attacker names a program that runs, with its pid and start time or with words of its command line."""
    key = f"uuid-of-it-{word}"
    program = "/bin/sh"
    with subprocess.Popen([program, "-c", "while :; do sleep 600; done", key, word]) as victim:
        try:
            while key not in processes.arguments(victim.pid):  # of the new program, a moment after its start
                time.sleep(0.01)
            pid = {"pid": victim.pid, "start_ticks": start_ticks_of(victim.pid)} if is_known else {}
            errors: list[str] = []

            undo_entries(
                (entry(ResourceKind.PROCESS, key, program=program, **pid),),
                deadline=time.monotonic() + 60,
                one_timeout_s=5,
                errors=errors,
                check=CHECK,
            )

            assert bool(errors) is not ends
            if ends:
                assert victim.wait(60) == -9
            assert (victim.poll() is None) is not ends
        finally:
            victim.kill()


def test_a_process_that_is_ending_and_has_lost_its_command_line_is_no_foreign_one() -> None:
    """QEMU's memory takes a while to free after its KILL. A kernel thread stands for it: it has no memory either."""
    kernel_thread = 2
    comm = Path(f"/proc/{kernel_thread}/comm")
    if not comm.exists() or comm.read_text() != "kthreadd\n":
        pytest.skip("needs a kernel thread in sight: this pid namespace has none")
    known = {"pid": kernel_thread, "start_ticks": start_ticks_of(kernel_thread)}

    CHECK(entry(ResourceKind.PROCESS, "11111111-2222", program="/usr/bin/qemu-system-x86_64", **known))


def test_a_container_under_creation_is_known_by_its_directory_in_the_share(tmp_path: Path) -> None:
    places = Places(shared_root=str(tmp_path))
    (tmp_path / "sb1/mounts/app").mkdir(parents=True)

    assert containers_of("sb1", places, None) == {"app"}
    assert containers_of("sb2", places, None) == frozenset()
