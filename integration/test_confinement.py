"""The rights of the programs that serve a guest, read from the kernel in a running pod: docs/SECURITY.md's table."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from pyshim.host.processes.confinement import KEPT_CAPABILITIES

from .framework import oci, processes, shim_config
from .framework.cgroups import SandboxCgroups, hierarchy, members
from .framework.ctr import Ctr
from .framework.processes import Process
from .framework.runtime import Runtime

pytestmark = pytest.mark.vm

CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, SETGID, SETUID, IPC_LOCK, SETFCAP = 0, 1, 2, 3, 4, 6, 7, 14, 31
"""Source: linux/capability.h."""
FILE_SERVER = {CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID, SETFCAP}
CODE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives")
NODES = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}
HIDDEN = ("/root", "/home", "/boot", "/srv", "/mnt", "/tmp", "/var/lib", "/run/containerd", "/dev/shm")
FILTERED = "2"
"""Field `Seccomp` of proc(5)."""
VMM_USERS = range(1879048192, 1879048192 + 65536)
KNOWN_FILES = re.compile(
    r"(socket|pipe|anon_inode|/memfd):|/dev/(null|kvm|urandom|net/tun|vhost-net|vhost-vsock)$|.*/\.build/guest[^/]*/[^/]+$"
)
"""The open files of QEMU in a pod without disks."""


def status(process: Process) -> dict[str, str]:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def open_files(process: Process) -> list[str]:
    return [os.readlink(fd) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]


def may_use_kvm() -> bool:
    found = Path("/dev/kvm").stat()
    return found.st_mode & 0o006 == 0o006 or (found.st_gid != 0 and found.st_mode & 0o060 == 0o060)


def reaches_its_files(vmm: Process) -> bool:
    """A user without rights can use KVM where that is used; the directories of this checkout do not matter."""
    return may_use_kvm() or not any("accel=kvm" in word for word in vmm.command)


class Walk(NamedTuple):
    """The files that a program finds in all directories it sees, but for those of the system's code."""

    directories: set[str]
    files: set[str]


def walk(process: Process) -> Walk:
    root, directories, files = f"/proc/{process.pid}/root", set(), set()
    for top, below, names in os.walk(root):
        inside = top.removeprefix(root) or "/"
        directories.add(inside)
        below[:] = [name for name in below if os.path.join(inside, name) not in (*CODE, "/proc", "/sys")]
        links = [name for name in below if os.path.islink(f"{top}/{name}")]
        files |= {os.path.join(inside, name) for name in (*names, *links)}
    return Walk(directories=directories, files=files)


def capabilities(process: Process) -> set[int]:
    """All it has or could ever get."""
    found = status(process)
    bits = int(found["CapEff"], 16) | int(found["CapPrm"], 16) | int(found["CapInh"], 16)
    return {number for number in range(64) if bits >> number & 1}


def is_apart(process: Process, namespace: str) -> bool:
    """It is in another namespace of the kind than the host's programs."""
    return os.readlink(f"/proc/{process.pid}/ns/{namespace}") != os.readlink(f"/proc/self/ns/{namespace}")


def has(named: set[str], directory: str) -> bool:
    """Some of these files are below it."""
    return any(path.startswith(f"{directory}/") for path in named)


def is_read_only(process: Process, point: str) -> bool:
    return bool(os.statvfs(f"/proc/{process.pid}/root{point}").f_flag & os.ST_RDONLY)


def serving(found: list[Process]) -> Process:
    """Of virtiofsd's two processes the one that answers the guest, which is the other's child."""
    pids = {process.pid for process in found}
    return next((process for process in found if process.parent in pids), found[0])


def test_the_programs_of_a_pod_have_the_rights_that_the_documentation_says(
    ctr: Ctr, runtime: Runtime, name: str
) -> None:
    ctr.start(name)
    (vmm,) = runtime.vmms(name)
    virtiofsd = serving([p for p in processes.running() if p.command[:1] and "virtiofsd" in p.command[0]])
    vsock_programs = runtime.vsock_programs(name)

    assert (status(vmm)["NoNewPrivs"], status(vmm)["Seccomp"]) == ("1", FILTERED)
    kept = set() if reaches_its_files(vmm) else {DAC_OVERRIDE, IPC_LOCK}
    assert capabilities(vmm) == kept
    assert int(status(vmm)["CapBnd"], 16) == sum(1 << number for number in kept)
    (user,) = {int(word) for ids in ("Uid", "Gid") for word in status(vmm)[ids].split()}
    assert user in (VMM_USERS if reaches_its_files(vmm) else {0})
    directory = os.stat(f"/run/vc/vm/{name}")
    assert (directory.st_uid, directory.st_mode & 0o777) == (0, 0o710)
    assert directory.st_gid == user or not user
    assert [path for path in open_files(vmm) if not KNOWN_FILES.match(path)] == []

    assert is_apart(vmm, "mnt")
    found = walk(vmm)
    named = {path for word in vmm.command for path in re.findall(r"/[^,=]+", word) if Path(path).exists()}
    linked = {path for path in CODE if os.path.islink(path)}
    loader = {"/etc/ld.so.cache", "/etc/ld.so.preload"}
    nodes = NODES | ({"/dev/kvm"} if any("accel=kvm" in word for word in vmm.command) else set())
    assert found.files <= named | linked | loader | nodes
    assert f"/run/vc/vm/{name}/vhost-fs.sock" in found.files
    assert [path for path in HIDDEN if os.path.lexists(f"/proc/{vmm.pid}/root{path}") and not has(named, path)] == []
    assert os.listdir(f"/proc/{vmm.pid}/root/sys/fs/cgroup") == []
    assert f"/run/vc/vm/{name}/qmp.sock" not in found.files
    mounted = [line.split()[4] for line in Path(f"/proc/{vmm.pid}/mountinfo").read_text().splitlines()]
    assert [point for point in mounted if not is_read_only(vmm, point)] == ["/proc"]

    assert (status(virtiofsd)["NoNewPrivs"], status(virtiofsd)["Seccomp"]) == ("1", FILTERED)
    assert capabilities(virtiofsd) <= FILE_SERVER
    assert [kind for kind in ("mnt", "net", "pid") if not is_apart(virtiofsd, kind)] == []
    seen = os.listdir(f"/proc/{virtiofsd.pid}/root")
    assert name in seen
    assert [entry for entry in seen if not entry.startswith((name, "watchable"))] == [], "it sees what is shared only"

    assert len(vsock_programs) == runtime.has_vsock_program
    for program in vsock_programs:
        assert status(program)["NoNewPrivs"] == "1"
        assert capabilities(program) == set()
        assert int(status(program)["CapBnd"], 16) == 0
        (their_user,) = {int(word) for ids in ("Uid", "Gid") for word in status(program)[ids].split()}
        assert their_user == directory.st_gid + 1
        sockets = {f"/run/vc/vm/{name}/vsock/{socket}" for socket in ("device.sock", "vsock.sock")}
        assert walk(program).files <= sockets | {program.command[0]} | linked | loader | NODES


_ATTEMPT = """
import os, stat, sys
from pyshim.host import syscalls
cgroup, kept, node, disk = sys.argv[1:]
if cgroup:
    with open(cgroup + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
if kept != "all":
    syscalls.limit_capabilities_of_programs({int(each) for each in kept.split(",")})
    os.execv(sys.executable, [*sys.orig_argv[:3], "", "all", node, disk])
for attempt in (
    lambda: os.mknod(node, stat.S_IFBLK | 0o600, os.stat(disk).st_rdev),
    lambda: os.close(os.open(disk, os.O_RDONLY)),
):
    try:
        attempt()
        print("done")
    except PermissionError:
        print("refused")
"""


def attempts(node: Path, disk: Path, *, cgroup: str = "", kept: str = "all") -> list[str]:
    """The results of mknod and of open for a disk of the host, from the cgroup and with these capabilities."""
    command = (sys.executable, "-c", _ATTEMPT, cgroup, kept, str(node), str(disk))
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def opens(device: Path) -> bool:
    try:
        os.close(os.open(device, os.O_RDONLY))
    except OSError:
        return False
    return True


def host_disk() -> Path:
    """A block device of the host that this machine lets its root open."""
    found = [path for path in sorted(Path("/dev").iterdir()) if path.is_block_device() and opens(path)]
    if not found:
        pytest.skip("root may open no block device of /dev")
    return found[0]


def test_the_virtiofsd_that_serves_the_guest_reaches_no_disk_of_the_host(ctr: Ctr, name: str, scratch: Path) -> None:
    ctr.start(name)
    sandbox = SandboxCgroups(name)
    family = [p for p in processes.running() if p.command[:1] and "virtiofsd" in p.command[0]]
    server = serving(family)
    cgroup = f"{hierarchy('devices')}{sandbox.path('devices')}"
    disk = host_disk()
    capable = ",".join(map(str, sorted(capabilities(server))))

    assert attempts(scratch / "outside", disk) == ["done", "done"], "the control: root outside the walls"
    assert {process.pid for process in family} <= members(Path(cgroup))
    place = next(line for line in Path(f"/proc/{server.pid}/cgroup").read_text().splitlines() if ":devices:" in line)
    assert place.endswith(sandbox.path("devices"))
    assert attempts(scratch / "in-list", disk, cgroup=cgroup) == ["done", "refused"], "the device list alone"
    assert attempts(scratch / "rights", disk, kept=capable)[0] == "refused", "its capabilities alone"
    assert attempts(scratch / "both", disk, cgroup=cgroup, kept=capable) == ["refused", "refused"]


SHIM_ONLY = {*KEPT_CAPABILITIES.values()}
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
DOCUMENT = Path(__file__).parents[1] / "docs/SECURITY.md"


def row(what: str, process: Process, cgroup: str) -> str:
    """A line of the documentation's table, as the kernel has it. `cgroup` is the one with the device list."""
    found = status(process)
    (user,) = {int(word) for ids in ("Uid", "Gid") for word in found[ids].split()}
    places = [line.split(":") for line in Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()]
    limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
    core = next(line.split()[-3:-1] for line in limits if "core" in line)
    names = [name for name, number in KEPT_CAPABILITIES.items() if number in capabilities(process)]
    # This machine's root may have fewer.
    lacking = {*KEPT_CAPABILITIES.values()} - own_capabilities()
    kept = "the shim's" if capabilities(process) == SHIM_ONLY - lacking else ", ".join(names) or "none"
    cells = (
        what,
        "root" if user == 0 else "its own",
        kept,
        "yes" if found["NoNewPrivs"] == "1" else "no",
        found["Seccomp_filters"],
        ", ".join(kind for kind in NAMESPACES if is_apart(process, kind)) or "none",
        "yes" if any(path == cgroup for _, controllers, path in places if controllers in ("devices", "")) else "no",
        "none" if core == ["1", "1"] else "the node's",
    )
    return f"| {' | '.join(cells)} |"


def own_capabilities() -> set[int]:
    bits = int(re.search(r"CapBnd:\t(\w+)", Path("/proc/self/status").read_text())[1], 16)  # type: ignore[index]
    return {number for number in range(64) if bits >> number & 1}


def test_the_table_of_a_pods_processes_is_the_documented_one(ctr: Ctr, runtime: Runtime, name: str) -> None:
    """Each line is made from the kernel's answers; the documentation has them as they are."""
    ctr.start(name)
    (vmm,) = runtime.vmms(name)
    cgroup = SandboxCgroups(name).path("devices")
    family = [p for p in processes.running() if p.command[:1] and "virtiofsd" in p.command[0]]
    server = serving(family)
    shim = next(p for p in processes.running() if p.pid == vmm.parent)
    vsock_programs = runtime.vsock_programs(name)
    named = {p.pid for p in (vmm, *family, *vsock_programs)}
    others = [p for p in processes.running() if p.parent == shim.pid and p.pid not in named]

    made = [row("shim", shim, cgroup), row("QEMU", vmm, cgroup)]
    made += [row("virtiofsd, waiting", p, cgroup) for p in family if p is not server]
    made += [row("virtiofsd, serving", server, cgroup)]
    made += [row("vhost-device-vsock", p, cgroup) for p in vsock_programs]
    made += [row(" ".join(p.command[:3]), p, cgroup) for p in others]

    documented = DOCUMENT.read_text().splitlines()
    assert not (new := [line for line in made if line not in documented]), "\n".join(new)


def test_every_thread_of_the_shim_is_confined(ctr: Ctr, runtime: Runtime, name: str) -> None:
    """Those that read the configuration, before the shim gave up its rights, have ended."""
    ctr.start(name)
    (vmm,) = runtime.vmms(name)

    threads = [
        dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines() if ":\t" in line)
        for thread in Path(f"/proc/{vmm.parent}/task").iterdir()
    ]

    mask = ~sum(1 << number for number in SHIM_ONLY)
    assert [thread["Name"] for thread in threads if int(thread["CapPrm"], 16) & mask] == []
    assert {(thread["NoNewPrivs"], thread["Seccomp"]) for thread in threads} == {("1", FILTERED)}


_HOOK = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
with open(sys.argv[1], "w") as out:
    for number in (101, 168, 176, 250, 305, 310):  # ptrace, swapoff, delete_module, keyctl, clock_adjtime, process_vm_*
        libc.syscall(ctypes.c_long(number), *[ctypes.c_long(99)] * 3, *[ctypes.c_long(0)] * 3)
        print(errno.errorcode[ctypes.get_errno()], file=out)
"""


@pytest.mark.parametrize("confined", [True, False], ids=["confined", "the control"])
def test_a_hook_is_refused_what_the_shim_has_given_up(
    ctr: Ctr, name: str, plain_rootfs: Path, scratch: Path, confined: bool
) -> None:
    config = shim_config.with_keys(scratch, runtime={"confine_shim": confined})
    spec = oci.spec("true", name=name, rootfs=plain_rootfs)
    command = ["hook", "-I", "-c", _HOOK, str(scratch / "out")]
    spec["hooks"] = {"createRuntime": [{"path": sys.executable, "args": command}]}

    ctr(*ctr.run_words("--rm", "--config", oci.write(spec, scratch), config=config), name)

    answers = (scratch / "out").read_text().split()
    assert len(answers) == 6
    assert (set(answers) == {"EPERM"}) is confined
    assert confined or "EPERM" not in answers


RUST_VIRTIOFSD = shutil.which("virtiofsd")


@pytest.mark.skipif(RUST_VIRTIOFSD is None, reason="needs the Rust virtiofsd on PATH (hint: cargo install virtiofsd)")
@pytest.mark.parametrize(
    ("arguments", "more"),
    [([], set()), (["--inode-file-handles=prefer"], {DAC_READ_SEARCH})],
    ids=["file handles off", "the control"],
)
def test_the_rust_virtiofsd_has_the_documented_rights_and_serves_files_of_any_owner(
    ctr: Ctr, name: str, scratch: Path, arguments: list[str], more: set[int]
) -> None:
    keys = {"virtio_fs_extra_args": arguments}
    config = shim_config.with_keys(scratch, {"virtio_fs_daemon": RUST_VIRTIOFSD}, hypervisor=keys)
    shared = scratch / "shared"
    shared.mkdir(mode=0o700)
    os.chown(shared, 4_000_000_000, 4_000_000_001)

    ctr.start(name, "--mount", f"type=bind,src={shared},dst=/shared,options=rbind:rw", config=config)
    server = serving([p for p in processes.running() if p.command[:1] and "virtiofsd" in p.command[0]])
    script = "cd /shared; touch f; chown 1879048192:65534 f; chmod 2750 f; mkfifo p; mknod n b 7 0 && echo made; "
    seen = ctr.inside(name, "sh", "-c", f"{script} stat -c %u:%g:%a . f p", check=False)

    assert capabilities(server) == FILE_SERVER | more
    assert (status(server)["NoNewPrivs"], status(server)["Seccomp"]) == ("1", FILTERED)
    assert [kind for kind in ("mnt", "net", "pid") if not is_apart(server, kind)] == []
    made = (shared / "f").stat()
    assert (made.st_uid, made.st_gid, made.st_mode & 0o7777) == (1879048192, 65534, 0o2750)
    assert seen.lines == ["4000000000:4000000001:700", "1879048192:65534:2750", "0:0:644"]
    assert not (shared / "n").exists()
