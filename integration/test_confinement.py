"""The rights of the programs that serve a guest, read from the kernel in a running pod: docs/SECURITY.md's table."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest

from pyshim.host.processes.confinement import KEPT_CAPABILITIES
from pyshim.host.processes.rights import CAPABILITIES, NAMES, ThreadRights, rights_of_threads
from pyshim.resources.cgroups.host.hierarchies import place_of

from .conftest import template
from .framework import cgroups, kata_agent, oci, processes, shim_config
from .framework.cgroups import SandboxCgroups, thread_ids
from .framework.ctr import Ctr
from .framework.processes import Process
from .framework.remote_peer import RemotePeer, RemoteRun
from .framework.runtime import Runtime

pytestmark = pytest.mark.vm

FILE_SERVER = {"chown", "dac_override", "fowner", "fsetid", "setgid", "setuid", "setfcap"}
BEGINS_WITH = {"setpcap", "sys_chroot"}
"""What QEMU's virtiofsd needs until it serves, and what the thread of its libraries keeps."""
CODE = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives")
NODES = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}
HIDDEN = ("/root", "/home", "/boot", "/srv", "/mnt", "/tmp", "/var/lib", "/run/containerd", "/dev/shm")
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


def capabilities(*processes: Process) -> set[str]:
    """All that any thread of theirs has or could ever get."""
    threads = [thread for process in processes for thread in rights_of_threads(process.pid)]
    return {NAMES[number] for thread in threads for number in thread.capabilities}


def are_filtered(*processes: Process) -> bool:
    """No thread of theirs gains a right by an exec, and each has the shim's filter of system calls at least."""
    threads = [thread for process in processes for thread in rights_of_threads(process.pid)]
    return {(thread.no_new_privs, thread.filters > 0) for thread in threads} == {(True, True)}


def is_apart(process: Process, namespace: str) -> bool:
    """It is in another namespace of the kind than the host's programs."""
    return os.readlink(f"/proc/{process.pid}/ns/{namespace}") != os.readlink(f"/proc/self/ns/{namespace}")


def has(named: set[str], directory: str) -> bool:
    """Some of these files are below it."""
    return any(path.startswith(f"{directory}/") for path in named)


def is_read_only(process: Process, point: str) -> bool:
    return bool(os.statvfs(f"/proc/{process.pid}/root{point}").f_flag & os.ST_RDONLY)


def file_servers() -> list[Process]:
    """The processes of virtiofsd: one of QEMU's program, two of the Rust one, the serving one last."""
    found = [p for p in processes.running() if p.command[:1] and "virtiofsd" in p.command[0]]
    pids = {process.pid for process in found}
    return sorted(found, key=lambda process: process.parent in pids)


def test_the_programs_of_a_pod_have_the_rights_that_the_documentation_says(
    ctr: Ctr, runtime: Runtime, name: str
) -> None:
    ctr.start(name)
    (vmm,) = runtime.vmms(name)
    *_, virtiofsd = file_servers()
    vsock_programs = runtime.vsock_programs(name)

    assert are_filtered(vmm)
    assert capabilities(vmm) == (set() if reaches_its_files(vmm) else {"dac_override", "ipc_lock"})
    (user,) = {int(word) for ids in ("Uid", "Gid") for word in status(vmm)[ids].split()}
    assert user in (VMM_USERS if reaches_its_files(vmm) else {0})
    directory = os.stat(f"/run/vc/vm/{name}")
    assert (directory.st_uid, directory.st_mode & 0o777) == (0, 0o710)
    assert directory.st_gid == user or not user
    given = kata_agent.given_guest().values()
    assert [path for path in open_files(vmm) if not KNOWN_FILES.match(path) and path not in given] == []

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
    assert [point for point in mounted if not is_read_only(vmm, point)] == []

    assert are_filtered(*file_servers())
    assert capabilities(*file_servers()) <= FILE_SERVER | BEGINS_WITH
    assert {NAMES[number] for number in rights_of_threads(virtiofsd.pid)[0].capabilities} == FILE_SERVER
    assert [kind for kind in ("mnt", "net", "pid") if not is_apart(virtiofsd, kind)] == []
    seen = os.listdir(f"/proc/{virtiofsd.pid}/root")
    assert name in seen
    assert [entry for entry in seen if not entry.startswith((name, "watchable"))] == [], "it sees what is shared only"

    assert len(vsock_programs) == runtime.has_vsock_program
    assert not vsock_programs or are_filtered(*vsock_programs)
    for program in vsock_programs:
        assert capabilities(program) == set()
        (their_user,) = {int(word) for ids in ("Uid", "Gid") for word in status(program)[ids].split()}
        assert their_user == directory.st_gid + 1
        sockets = {f"/run/vc/vm/{name}/vsock/{socket}" for socket in ("device.sock", "vsock.sock")}
        assert walk(program).files <= sockets | {program.command[0]} | linked | loader | NODES


_ATTACKS = r"""
import errno, json, os, signal, socket, stat, sys
from pyshim.host import syscalls
from pyshim.host.processes.rights import NAMES

wanted = json.loads(sys.argv[1])
devices = os.open("/dev", os.O_PATH)
loopback, name = ("127.0.0.1", wanted["port"]), os.uname().nodename
sleeper, disk, host_file = wanted["stranger"], wanted["disk"], wanted["file"]
number = os.stat(f"/dev/{disk}").st_rdev
user, groups = wanted["user"], wanted["groups"]
if wanted["pid"]:
    if wanted["cgroup"]:
        with open(wanted["cgroup"] + "/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
    spaces = [(os.open(f"/proc/{wanted['pid']}/ns/{kind}", os.O_RDONLY), flag) for kind, flag in (
        ("pid", 0x20000000), ("net", 0x40000000), ("uts", 0x04000000), ("ipc", 0x08000000), ("mnt", 0x00020000))]
    for fd, flag in spaces:
        syscalls.setns(fd, flag)
else:
    syscalls.unshare(syscalls.CLONE_NEWNS)  # the control may mount, and nobody sees it
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)


def connect():
    with socket.socket() as client:
        client.connect(loopback)


def make_node():
    for directory, _, _ in os.walk(wanted["writable"]):
        if os.access(directory, os.W_OK):
            os.mknod(f"{directory}/node", stat.S_IFBLK | 0o600, number)
            return os.unlink(f"{directory}/node")
    raise PermissionError(errno.EROFS, "nothing is writable")


def make_file():
    path = "/etc/pyshim-attack"
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    os.unlink(path)


ATTACKS = {
    "mount": lambda: syscalls.mount("x", "/", "tmpfs", 0),
    "make a device node": make_node,
    "open a disk of the host": lambda: os.close(os.open(disk, os.O_RDONLY, dir_fd=devices)),
    "read a file of the host": lambda: os.close(os.open(host_file, os.O_RDONLY)),
    "signal another process of root": lambda: os.kill(sleeper, 0),
    "read another process's memory": lambda: os.close(os.open(f"/proc/{sleeper}/mem", os.O_RDONLY)),
    "set the core pattern": lambda: os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY)),
    "set the host's name": lambda: os.close(os.open("/proc/sys/kernel/hostname", os.O_WRONLY)),
    "write a file of the host": make_file,
    "remove a device of the host": lambda: os.rename("/dev/full", "/dev/full"),
    "connect to the host's 127.0.0.1": connect,
}
if os.fork() == 0:  # a process namespace is entered by a child
    kept = wanted["capabilities"]
    if kept is not None:
        syscalls.limit_capabilities_of_programs(kept)
    if user:
        syscalls.become_user(user, groups)
    elif kept is not None:
        syscalls.limit_capabilities_of_thread(kept)
    done = {}
    for what, attack in reversed(ATTACKS.items()):
        try:
            attack()
            done[what] = "done"
        except OSError as error:
            done[what] = errno.errorcode[error.errno]
    print(json.dumps(done))
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""


def attacks(
    scratch: Path, disk: Path, process: Process | None = None, thread: ThreadRights | None = None, *, cgroup: str = ""
) -> dict[str, str]:
    """What each attack comes to with the thread's rights, user, namespaces and device list: `done` or an error's name.

    The filters of system calls are left out, so what is refused is refused without them. Without `process`: from the
    host, as its root; the control.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, sleeping() as stranger:
        wanted = {
            "pid": process.pid if process else 0,
            "user": thread.user_ids[0] if thread else 0,
            "groups": [],
            "capabilities": sorted(thread.capabilities) if thread else None,
            "cgroup": cgroup,
            "disk": disk.name,
            "file": "/etc/hostname" if Path("/etc/hostname").exists() else "/etc/passwd",
            "writable": str(scratch) if process is None else "/run",
            "port": listener.getsockname()[1],
            "stranger": stranger,
        }
        command = (sys.executable, "-c", _ATTACKS, json.dumps(wanted))
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)  # type: ignore[no-any-return]


@contextmanager
def sleeping() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            yield child.pid
        finally:
            child.kill()


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


@pytest.mark.parametrize("vmm_of_root", [False, True], ids=["users of their own", "QEMU as root"])
def test_no_thread_of_a_program_that_serves_the_guest_gets_past_its_walls(
    ctr: Ctr, runtime: Runtime, name: str, scratch: Path, vmm_of_root: bool
) -> None:
    """Each attack succeeds outside the walls. Inside, none does, thread by thread."""
    config = (
        shim_config.with_keys(scratch, hypervisor={"hot_plug_vfio": "root-port"})
        if vmm_of_root
        else shim_config.SHIPPED
    )
    ctr.start(name, config=config)
    (vmm,) = runtime.vmms(name)
    disk = host_disk()
    sandbox = SandboxCgroups(name)
    listed = sandbox.directory("devices", "devices")
    *_, server = file_servers()  # what waits for it speaks with nobody
    programs = [vmm, server, *runtime.vsock_programs(name)]

    control = attacks(scratch, disk)
    done = {
        f"{program.name}: {thread.name} {thread.tid}: {what}"
        for program in programs
        for thread in rights_of_threads(program.pid)
        for what, result in attacks(
            scratch, disk, program, thread, cgroup=device_cgroup(program.pid, thread.tid)
        ).items()
        if result == "done"
    }

    assert set(control.values()) == {"done"}, "the control"
    assert {program.pid for program in programs} <= thread_ids(listed)
    if vmm_of_root:
        assert rows("QEMU as root", vmm, sandbox)[0] in DOCUMENT.read_text().splitlines()
    still = {"signal another process of root"} if vmm_of_root else set()
    assert {each for each in done if each.rpartition(": ")[2] not in still} == set()


def device_cgroup(pid: int, tid: int) -> str:
    """That by whose device list the thread is bound."""
    place = place_of(f"{pid}/task/{tid}", () if cgroups.is_v2() else ("devices",))
    return f"{cgroups.hierarchy('devices')}{place}"


SHIM_ONLY = {*KEPT_CAPABILITIES}
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
DOCUMENT = Path(__file__).parents[1] / "docs/SECURITY.md"


def rows(what: str, process: Process, sandbox: SandboxCgroups) -> list[str]:
    """Lines of the documentation's table, as the kernel has them: one for each set of threads with the same rights."""
    limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
    core = next(line.split()[-3:-1] for line in limits if "core" in line)
    apart = ", ".join(kind for kind in NAMESPACES if is_apart(process, kind)) or "none"
    cores = "none" if core == ["1", "1"] else "the node's"
    threads = rights_of_threads(process.pid)
    own = dict.fromkeys(
        (*thread_cells(thread), apart, *cgroup_cells(process.pid, thread.tid, sandbox), cores) for thread in threads
    )
    words = {len(own) - 1: "others", 0: "first" if len(own) > 1 else "all"}
    return [f"| {' | '.join((what, words.get(number, 'more'), *cells))} |" for number, cells in enumerate(own)]


def thread_cells(thread: ThreadRights) -> tuple[str, ...]:
    has = thread.effective | thread.permitted | thread.inheritable | thread.ambient
    return (
        "root" if {*thread.user_ids, *thread.group_ids} == {0} else "its own",
        named(has),
        "the same" if thread.bounding == has else named(thread.bounding),
        "yes" if thread.no_new_privs else "no",
        str(thread.filters),
    )


def named(capabilities: frozenset[int]) -> str:
    held = {NAMES[number] for number in capabilities}
    # This machine's root may have fewer.
    if held == SHIM_ONLY - ({*NAMES.values()} - own_capabilities()):
        return "the shim's"
    return ", ".join(name for name in CAPABILITIES if name in held) or "none"


def cgroup_cells(pid: int, tid: int, sandbox: SandboxCgroups) -> tuple[str, str]:
    """The controllers by whose cgroups of the pod the thread is bound, and whether the device list is among them."""
    groups = {group["Path"]: group["Role"] for group in sandbox.record["Groups"]}
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/task/{tid}/cgroup").read_text().splitlines()]
    bound = {name for _, names, path in lines if path in groups for name in names.split(",")}
    # In version 2 vCPU threads have a cgroup of their own, with the same list.
    lists = {names for _, names, path in lines if groups.get(path) in ("devices", "vcpus")}
    counted = [name for name in ("cpu", "memory") if name in bound or "" in bound]
    return ", ".join(counted) or "none", "yes" if lists & {"devices", ""} else "no"


def own_capabilities() -> set[str]:
    return {NAMES[number] for number in rights_of_threads(os.getpid())[0].bounding}


@pytest.mark.parametrize("is_clone", [False, True], ids=["booted", "from a template"])
def test_the_table_of_a_pods_processes_is_the_documented_one(
    ctr: Ctr, runtime: Runtime, name: str, is_clone: bool
) -> None:
    """Each line is made from the kernel's answers about each thread; the documentation has them as they are."""
    with template.bound() if is_clone else nullcontext():
        ctr.start(name)
    (vmm,) = runtime.vmms(name)
    assert ("-incoming" in vmm.command) is is_clone
    sandbox = SandboxCgroups(name)
    *waiting, server = file_servers()
    shim = next(p for p in processes.running() if p.pid == vmm.parent)
    vsock_programs = runtime.vsock_programs(name)
    named = {p.pid for p in (vmm, server, *waiting, *vsock_programs)}
    others = [p for p in processes.running() if p.parent == shim.pid and p.pid not in named]

    made = [*rows("shim", shim, sandbox), *rows("QEMU", vmm, sandbox)]
    for what, found in (
        ("virtiofsd in Rust, waiting", waiting),
        ("virtiofsd in Rust" if waiting else "virtiofsd", [server]),
        ("vhost-device-vsock", vsock_programs),
    ):
        made += [line for process in found for line in rows(what, process, sandbox)]
    made += [line for p in others for line in rows(" ".join(p.command[:3]), p, sandbox)]

    documented = DOCUMENT.read_text().splitlines()
    assert not (new := [line for line in made if line not in documented]), "\n".join(new)


def test_the_shim_of_a_remote_pod_is_the_documented_one_and_alone(
    ctr: Ctr, runtime: Runtime, peer: RemotePeer, remote_run: RemoteRun, name: str, scratch: Path
) -> None:
    with ctr.background(scratch, *remote_run("walls"), name, "sh", "-c", "echo up; sleep 100000") as running:
        running.wait_for("up", within_s=120)
        (shim,) = runtime.shims(name)
        beside = [p for p in processes.running() if p.parent == shim.pid]
        made = rows("shim", shim, SandboxCgroups(name))
        ctr("task", "kill", "--signal", "KILL", name)
        running.wait()

    assert beside == []
    assert not (new := [line for line in made if line not in DOCUMENT.read_text().splitlines()]), "\n".join(new)


def test_every_thread_of_the_shim_is_confined(ctr: Ctr, runtime: Runtime, name: str) -> None:
    """Those that read the configuration, before the shim gave up its rights, have ended."""
    ctr.start(name)
    (vmm,) = runtime.vmms(name)

    shim = next(p for p in processes.running() if p.pid == vmm.parent)
    assert capabilities(shim) <= SHIM_ONLY
    assert are_filtered(shim)


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


RUST_VIRTIOFSD = shutil.which("virtiofsd", path=f"{os.environ['PATH']}:/usr/libexec")
needs_rust_virtiofsd = pytest.mark.skipif(
    RUST_VIRTIOFSD is None,
    reason="needs the Rust virtiofsd on PATH (hint: Debian 13's package, or cargo install virtiofsd)",
)


@needs_rust_virtiofsd
@pytest.mark.parametrize(
    ("arguments", "more"),
    [([], set()), (["--inode-file-handles=prefer"], {"dac_read_search"})],
    ids=["file handles off", "the control"],
)
def test_the_rust_virtiofsd_has_the_documented_rights_and_serves_files_of_any_owner(
    ctr: Ctr, name: str, scratch: Path, arguments: list[str], more: set[str]
) -> None:
    keys = {"virtio_fs_extra_args": arguments}
    config = shim_config.with_keys(scratch, {"virtio_fs_daemon": RUST_VIRTIOFSD}, hypervisor=keys)
    shared = scratch / "shared"
    shared.mkdir(mode=0o700)
    os.chown(shared, 4_000_000_000, 4_000_000_001)

    ctr.start(name, "--mount", f"type=bind,src={shared},dst=/shared,options=rbind:rw", config=config)
    *waiting, server = file_servers()
    script = "cd /shared; touch f; chown 1879048192:65534 f; chmod 2750 f; mkfifo p; mknod n b 7 0 && echo made; "
    seen = ctr.inside(name, "sh", "-c", f"{script} stat -c %u:%g:%a . f p", check=False)

    assert capabilities(server) == FILE_SERVER | more
    assert capabilities(*waiting) == set()
    assert are_filtered(server, *waiting)
    assert [kind for kind in ("mnt", "net", "pid") if not is_apart(server, kind)] == []
    made = (shared / "f").stat()
    assert (made.st_uid, made.st_gid, made.st_mode & 0o7777) == (1879048192, 65534, 0o2750)
    assert seen.lines == ["4000000000:4000000001:700", "1879048192:65534:2750", "0:0:644"]
    assert not (shared / "n").exists()


@needs_rust_virtiofsd
def test_the_rust_virtiofsd_creates_with_a_supplementary_group(
    ctr: Ctr, name: str, plain_rootfs: Path, scratch: Path
) -> None:
    """As fsGroup gives it."""
    manifest = Path(__file__).parents[1] / ".build/guest/manifest.json"
    release = json.loads(manifest.read_text())["kernel_release"]
    if tuple(map(int, re.findall(r"\d+", release)[:2])) < (6, 3):
        pytest.skip(f"the guest's kernel {release} sends no supplementary group (hint: make guest)")
    config = shim_config.with_keys(scratch, {"virtio_fs_daemon": RUST_VIRTIOFSD})
    shared = scratch / "shared"
    shared.mkdir()
    os.chown(shared, 0, 1001)
    shared.chmod(0o2775)
    script = "touch /v/a; mkdir /v/d; ln -s x /v/l; mkfifo /v/p; mv /v/a /v/b; ln /v/b /v/h; stat -c '%n %u:%g' /v/*"
    spec = oci.spec("sh", "-ec", script, name=name, rootfs=plain_rootfs)
    spec["process"]["user"] = {"uid": 1002, "gid": 1003, "additionalGids": [1001]}
    spec["mounts"].append({"destination": "/v", "type": "bind", "source": str(shared), "options": ["rbind", "rw"]})

    done = ctr(*ctr.run_words("--rm", "--config", oci.write(spec, scratch), config=config), name)

    assert done.lines == [f"/v/{entry} 1002:1001" for entry in "bdhlp"]
    assert {(shared / entry).lstat().st_gid for entry in "bdhlp"} == {1001}
