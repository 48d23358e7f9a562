"""What the shim gives up is refused to itself, to threads it had before, and to what it executes.

Each attempt is a system call by its number, with arguments that the kernel answers otherwise than EPERM for a root
without these walls: the control.
"""

import ctypes
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyshim.host.processes.confinement import (
    DENIED_CALLS,
    DEVICE_LIST_CALL,
    KEPT_CAPABILITIES,
    START_CALLS,
    hides_processes,
)
from pyshim.model.architecture import ARCHITECTURES, Architecture

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: others are refused these calls anyway")

ATTEMPTS = {
    "ptrace": (101, 16, 0x7FFFFFFF, 0, 0),  # PTRACE_ATTACH
    "syslog": (103, 10, 0, 0),
    "swapon": (167, 0, 0),
    "swapoff": (168, 0),
    "reboot": (169, 0, 0, 0, 0),
    "iopl": (172, 0),
    "settimeofday": (164, 0, 0),
    "acct": (163, 1),
    "modify_ldt": (154, 0, 0, 0),
    "adjtimex": (159, 1),
    "init_module": (175, 0, 0, 0),
    "delete_module": (176, 1, 0),
    "quotactl": (179, 0, 0, 0, 0),
    "clock_settime": (227, 99, 0),
    "kexec_load": (246, 0, 99, 0, 0),
    "add_key": (248, 0, 0, 0, 0, 0),
    "request_key": (249, 0, 0, 0, 0),
    "keyctl": (250, 0, 0xFFFFFFFD, 0, 0, 0),  # KEYCTL_GET_KEYRING_ID
    "perf_event_open": (298, 0, 0, 0, 0, 0),
    "fanotify_init": (300, 0xFFFFFFFF, 0),
    "process_vm_readv": (310, 0, 0, 0, 0, 0, 0),
    "process_vm_writev": (311, 0, 0, 0, 0, 0, 0),
    "kcmp": (312, 0, 0, 99, 0, 0),
    "finit_module": (313, -1, 0, 0),
    "kexec_file_load": (320, -1, -1, 0, 0, 0),
    "userfaultfd": (323, 0xFFFFFFFF),
    "pidfd_getfd": (438, -1, 0, 0),
}
"""Number and arguments for x86-64."""


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_the_numbers_of_system_calls_are_those_of_libseccomp(architecture: Architecture) -> None:
    library = ctypes.CDLL("libseccomp.so.2")
    token = ctypes.c_uint32(architecture.seccomp_family[0])
    calls = architecture.system_calls._asdict()

    found = {name: library.seccomp_syscall_resolve_name_arch(token, name.encode()) for name in calls}

    assert found == calls


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=list(ARCHITECTURES))
def test_a_filter_binds_the_other_programs_that_the_architectures_kernel_runs(architecture: Architecture) -> None:
    """The filter begins with a comparison of AUDIT_ARCH for each table; the library knows all of them."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(0x7FFF0000)))
    try:
        for token in architecture.seccomp_family:
            assert library.seccomp_arch_add(context, ctypes.c_uint32(token)) in (0, -errno.EEXIST)
    finally:
        library.seccomp_release(context)


_TRY = """
import ctypes, errno, json, sys
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for name, words in json.loads(sys.argv[1]).items():
    result = libc.syscall(*map(ctypes.c_long, words))
    found[name] = errno.errorcode[ctypes.get_errno()] if result < 0 else "done"
with open("/proc/thread-self/status") as file:
    found["status"] = dict(line.rstrip("\\n").split(":\\t", 1) for line in file)
print(json.dumps(found))
"""
_CONFINED = """
import sys
from pyshim.host.processes.confinement import deny_calls, give_up_capabilities
give_up_capabilities()
assert deny_calls()
"""
_EXECUTE = "import os; os.execv(sys.executable, [sys.executable, '-c', sys.argv[2], sys.argv[1]])"


def attempted(program: str, attempts: dict[str, tuple[int, ...]] = ATTEMPTS, *more: str) -> dict[str, str]:
    words = [sys.executable, "-c", program, json.dumps(attempts), _TRY, *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    status = found.pop("status")
    return {
        **found,
        **{name: status[name] for name in ("CapPrm", "CapBnd", "NoNewPrivs", "Seccomp", "Seccomp_filters")},
    }


@needs_root
def test_a_child_of_the_confined_shim_is_refused_each_denied_call() -> None:
    outside = attempted(f"import sys\n{_EXECUTE}")
    inside = attempted(_CONFINED + _EXECUTE)

    assert [name for name in ATTEMPTS if outside[name] == "EPERM"] == [], "the control: root outside the walls"
    assert [name for name in ATTEMPTS if inside[name] != "EPERM"] == []
    assert (outside["NoNewPrivs"], outside["Seccomp"]) == ("0", "0")
    assert (inside["NoNewPrivs"], inside["Seccomp"]) == ("1", "2")
    kept = sum(1 << number for number in KEPT_CAPABILITIES.values())
    for kind in ("CapPrm", "CapBnd"):
        assert int(inside[kind], 16) == int(outside[kind], 16) & kept
    assert int(outside["CapPrm"], 16) & ~kept, "the control: there was something to give up"


def test_each_attempt_is_at_a_call_that_the_filter_names() -> None:
    assert set(ATTEMPTS) <= set(DENIED_CALLS)


AFTER_START = {
    "io_uring_setup": (425, 0, 0),
    "io_uring_enter": (426, -1, 0, 0, 0, 0),
    "io_uring_register": (427, -1, 0, 0, 0),
    "bpf": (321, 0x7FFF, 0, 0),
}
_STARTED = f"from pyshim.host.processes.confinement import *; assert deny_calls({(*START_CALLS, DEVICE_LIST_CALL)!r})\n"


@needs_root
def test_what_only_the_start_of_a_vm_needs_is_refused_after_it() -> None:
    """QEMU, which starts before, uses io_uring; a device list of cgroup v2 is written with bpf."""
    at_start = attempted(_CONFINED + _EXECUTE, AFTER_START)
    later = attempted(_CONFINED + _STARTED + _EXECUTE, AFTER_START)

    assert "EPERM" not in [at_start[name] for name in AFTER_START], "the control"
    assert [later[name] for name in AFTER_START] == ["EPERM"] * len(AFTER_START)
    assert later["Seccomp_filters"] == "2"


_STRANGERS = """
import json, os, sys
if sys.argv[1] == "confined":
    from pyshim.host.processes.confinement import give_up_capabilities
    give_up_capabilities()
from pyshim.host.processes.identity import as_user_of
def attempt(path):
    try:
        with open(path, "rb", buffering=0) as file:
            return path.endswith("/mem") and "done" or file.read(1) is not None and "done"
    except OSError as error:
        return type(error).__name__
root, user = map(int, sys.argv[2:])
files = ("mem", "fd/0", "io")
direct = [attempt(f"/proc/{pid}/{name}") for pid in (root, user) for name in files]
print(json.dumps([direct, as_user_of(user, lambda: [attempt(f"/proc/{user}/{name}") for name in ("fd/0", "io")])]))
"""


@needs_root
def test_the_memory_and_files_of_strangers_are_refused_and_those_of_qemus_user_read_as_that_user() -> None:
    """A program of root with more rights than the shim, as a node has many, and one of another user."""
    user = 1879048192
    with (
        subprocess.Popen(["sleep", "600"]) as of_root,
        subprocess.Popen(["sleep", "600"], user=user, group=user, extra_groups=()) as of_user,
    ):
        try:
            found = {
                who: json.loads(
                    subprocess.check_output(
                        [sys.executable, "-c", _STRANGERS, who, str(of_root.pid), str(of_user.pid)], text=True
                    )
                )
                for who in ("control", "confined")
            }
        finally:
            of_root.kill()
            of_user.kill()

    assert found == {"control": [["done"] * 6, ["done"] * 2], "confined": [["PermissionError"] * 6, ["done"] * 2]}


_TAKEN_OVER = """
import json, os, subprocess, sys
from pyshim.host import syscalls
from pyshim.host.processes.confinement import *
give_up_capabilities()
assert deny_calls()
def enter(pid):
    os.close(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY))
def mount():
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    syscalls.mount("x", "/mnt", "tmpfs", 0)
stronger, pod, memory = map(int, sys.argv[1:])
weaker = subprocess.Popen(["sleep", "600"])
attempts = {
    "read a file of root": lambda: os.close(os.open("/etc/shadow", os.O_RDONLY)),
    "mount": mount,
    "enter the namespaces of a program with no more rights": lambda: enter(weaker.pid),
    "enter the namespaces of a program with more": lambda: enter(stronger),
    "load a module": lambda: syscalls._system_call(175, 0, 0, 0),
    "become any user": lambda: (weaker.kill(), syscalls.become_user(1879048192, ())),
    "open the memory of another pod": lambda: os.close(os.open(f"/proc/{pod}/fd/{memory}", os.O_RDWR)),
}
found = {}
for what, attempt in attempts.items():
    try:
        attempt()
        found[what] = "done"
    except OSError as error:
        found[what] = type(error).__name__

print(json.dumps(found), flush=True)
os._exit(0)
"""


@needs_root
def test_what_a_guest_can_do_that_has_taken_over_the_shim_is_what_the_documentation_says() -> None:
    """docs/SECURITY.md: this is hygiene and no wall."""
    memory, user = os.memfd_create("ram"), 1879048192
    os.fchown(memory, user, user)
    with (
        os.fdopen(memory),
        subprocess.Popen(["sleep", "600"]) as stronger,
        subprocess.Popen(["sleep", "600"], user=user, group=user, extra_groups=(), pass_fds=(memory,)) as pod,
    ):
        try:
            words = [sys.executable, "-c", _TAKEN_OVER, *map(str, (stronger.pid, pod.pid, memory))]
            found = json.loads(subprocess.check_output(words, text=True, timeout=60))
        finally:
            stronger.kill()
            pod.kill()

    assert found == {
        "read a file of root": "done",
        "mount": "done",
        "enter the namespaces of a program with no more rights": "done",
        "enter the namespaces of a program with more": "PermissionError",
        "load a module": "PermissionError",
        "become any user": "done",
        "open the memory of another pod": "done",
    }


@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ("rw,nosuid", False),
        ("rw,hidepid=2", True),
        ("rw,hidepid=invisible,gid=4", True),
        ("rw,hidepid=0", False),
        ("rw,hidepid=off", False),
    ],
)
def test_a_proc_that_hides_processes_is_found(tmp_path: Path, options: str, hidden: bool) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nproc /proc proc {options} 0 0\nproc /srv/proc proc rw,hidepid=2 0 0\n")

    assert hides_processes(str(mounts)) is hidden


_OTHER_THREAD = """
import threading
ready, confined = threading.Event(), threading.Event()
def work():
    ready.set()
    confined.wait()
    exec(sys.argv[2], {})
thread = threading.Thread(target=work)
thread.start()
ready.wait()
"""


@needs_root
def test_a_thread_from_before_is_refused_them_too() -> None:
    inside = attempted("import sys" + _OTHER_THREAD + _CONFINED + "confined.set(); thread.join()")

    assert [name for name in ATTEMPTS if inside[name] != "EPERM"] == []
    assert (inside["NoNewPrivs"], inside["Seccomp"]) == ("1", "2")


@needs_root
def test_the_x32_table_of_calls_is_no_way_around() -> None:
    x32 = {name: (0x40000000 | ATTEMPTS[name][0], *ATTEMPTS[name][1:]) for name in ("delete_module", "iopl")}

    outside = attempted(f"import sys\n{_EXECUTE}", x32)
    inside = attempted(_CONFINED + _EXECUTE, x32)

    assert "EPERM" not in [outside[name] for name in x32], "the control"
    assert [inside[name] for name in x32] == ["EPERM"] * len(x32)


_DAEMON = """
import asyncio, json, sys
from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.ids import HostPath
from pyshim.model.task import Identity
from pyshim.serve import _Daemon

machine = {"path": "/q", "kernel": "/k", "image": "/i", "virtio_fs_daemon": "/v"}
keys = json.loads(sys.argv[3])
tables = {"hypervisor": {"qemu": machine | keys.get("qemu", {})}, "agent": {}, "runtime": keys.get("runtime", {})}
config = build_config(Source(path="/c.toml", directory="/", document=tables))
identity = Identity(
    namespace="n", sandbox_id="s", containerd_ttrpc_address="",
    bundle=HostPath(""), debug=False,
)

async def first_create():
    daemon = _Daemon(identity, made_by="exec")
    asyncio.get_running_loop().set_default_executor(daemon._threads)
    await asyncio.to_thread(id, 1)
    daemon._confine(config)
    daemon._confine(config)
    await asyncio.to_thread(exec, sys.argv[2], {})

asyncio.run(first_create())
"""


@needs_root
@pytest.mark.parametrize(
    ("keys", "filters", "has_all"),
    [
        ({}, "1", False),
        ({"runtime": {"confine_shim": False}}, "0", True),
        ({"qemu": {"privileged_vmm": True}}, "1", True),
    ],
    ids=["default", "confine_shim is false", "privileged_vmm"],
)
def test_the_configuration_decides_once_and_for_the_threads_that_follow(
    keys: dict[str, dict[str, bool]], filters: str, has_all: bool
) -> None:
    outside = attempted(f"import sys\n{_EXECUTE}", {})

    inside = attempted(_DAEMON, {}, json.dumps(keys))

    assert inside["Seccomp_filters"] == filters
    assert (inside["CapPrm"] == outside["CapPrm"]) is has_all
