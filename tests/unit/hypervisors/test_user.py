"""QEMU as a user of its own: what it is, what it cannot reach, and when it stays root. Real QEMU under TCG."""

import asyncio
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pytest
from msgspec.structs import replace

from hypervisors.qemu.isolation import USER_COUNT, missing_users_reason, reserve_user, root_reason, vsock_user
from hypervisors.qemu.vm import QemuVm
from pyshim.cleanup.undo import undo_entry
from pyshim.host import syscalls
from pyshim.host.processes.children import Children
from pyshim.model.errors import ResourceExhausted
from pyshim.model.vm import LocalVm, PciLayout, PortKind, VhostUserVsockChannel
from tests.fakes.disks import disk
from tests.fakes.ledger import FakeLedger
from tests.fakes.tiny_kernel import HALT
from tests.fakes.vm_config import bootable, vm_config

FIRST = 1879048192
QEMU = "/usr/bin/qemu-system-x86_64"
VSOCK_PROGRAM = shutil.which("vhost-device-vsock")
pytestmark = [pytest.mark.root, pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}")]

PROBE = """
import ctypes, json, os, socket, sys
asked = json.load(sys.stdin)
libc = ctypes.CDLL(None, use_errno=True)
def works(act, *words):
    try:
        act(*words)
    except OSError:
        return False
    return True
def trace(pid):
    if libc.ptrace(0x4206, pid, None, None) < 0:  # PTRACE_SEIZE
        raise OSError(ctypes.get_errno(), "ptrace")
def connect(path):
    socket.socket(socket.AF_UNIX).connect(path)
def make(path):
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
acts = {
    "read": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "write": lambda path: os.close(os.open(path, os.O_WRONLY)),
    "list": os.listdir, "make": make, "unlink": os.unlink, "connect": connect,
    "signal": lambda pid: os.kill(pid, 0), "trace": trace, "root": os.setuid,
}
print(json.dumps([each for each in asked if works(acts[each[0]], each[1])]))
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """One that other users can enter, unlike pytest's."""
    with TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def open_files(pid: int) -> list[str]:
    return [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]


def can(pid: int, asked: list[tuple[str, str | int]]) -> list[tuple[str, str | int]]:
    """Those of `asked` that a program does which has the credentials and the namespaces of process `pid`."""
    known = status(pid)
    user, group = known["Uid"].split()[0], known["Gid"].split()[0]
    enter = ["/usr/bin/nsenter", f"--target={pid}", "--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup"]
    become = ["/usr/bin/setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
    # The distribution's: the interpreter of the tests may lie where only root can go.
    program = ["/usr/bin/python3", "-IS", "-c", PROBE]
    words = [*enter, *become, "--bounding-set=-all", "--inh-caps=-all", *program]
    ended = subprocess.run(words, input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=60)
    return [(name, value) for name, value in json.loads(ended.stdout)]


HIDDEN = ("/root", "/home", "/run/systemd", "/var", "/sys/fs/cgroup/cgroup.procs", "/dev/shm", "/etc/hosts")


def shown(pid: int, paths: tuple[str, ...]) -> list[str]:
    """Those of the paths that exist for process `pid`."""
    return [path for path in paths if os.path.lexists(f"/proc/{pid}/root{path}")]


class Machine:
    """VMs side by side, each in a directory of its own below one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ledger = FakeLedger(undo_entry)
        self.children = Children()

    def config(self, name: str) -> LocalVm:
        own = self.directory / f"files-{name}"
        own.mkdir(mode=0o755)
        (self.directory / "vms").mkdir(exist_ok=True)
        return replace(
            bootable(own, HALT, vm_dir=f"{self.directory}/vms/{name}", extra_monitor="hmp"),
            sandbox_id=name,
            uuid=str(uuid4()),
            first_user_id=FIRST,
        )

    async def boot(self, config: LocalVm) -> QemuVm:
        vm = QemuVm(ledger=self.ledger, children=self.children)
        await vm.create(config)
        await vm.start()
        return vm


async def test_a_qemu_has_a_user_of_its_own_and_reaches_neither_root_nor_another_sandbox(directory: Path) -> None:
    secret = directory / "secret"
    secret.write_text("of root")
    secret.chmod(0o600)

    machine = Machine(directory)
    one, other = await machine.boot(machine.config("pod1")), await machine.boot(machine.config("pod2"))
    try:
        facts = status(one.pid)
        users = {int(word) for word in facts["Uid"].split() + facts["Gid"].split()}
        others = {int(word) for word in status(other.pid)["Uid"].split()}

        assert len(users) == 1
        assert FIRST <= min(users) < FIRST + USER_COUNT
        assert users != others
        assert facts["Groups"].strip() == ""
        assert {facts[name] for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")} == {"0" * 16}
        assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
        own, neighbour = f"{directory}/vms/pod1", f"{directory}/vms/pod2"
        assert await asyncio.to_thread(shown, one.pid, HIDDEN) == []
        refused: list[tuple[str, str | int]] = [
            ("read", "/etc/passwd"),
            ("read", "/etc/shadow"),
            ("read", str(secret)),
            ("list", f"/proc/{os.getpid()}"),
            ("make", "/new"),
            ("make", "/usr/new"),
            ("list", own),
            ("make", f"{own}/new"),
            ("unlink", f"{own}/qmp.sock"),
            ("connect", f"{own}/qmp.sock"),
            ("connect", f"{own}/agent.sock"),
            ("connect", f"{own}/extra-monitor.sock"),
            ("read", f"{own}/console.log"),
            ("list", neighbour),
            ("connect", f"{neighbour}/qmp.sock"),
            ("connect", f"{neighbour}/agent.sock"),
            ("signal", other.pid),
            ("trace", other.pid),
            ("read", f"/proc/{other.pid}/mem"),
            ("list", f"/proc/{other.pid}/fd"),
            ("list", f"/proc/{other.pid}/root"),
            ("signal", os.getpid()),
            ("trace", os.getpid()),
            ("read", f"/proc/{os.getpid()}/mem"),
            ("signal", 1),
            ("root", 0),
        ]
        # What it may do shows that the probe has the right user.
        allowed: list[tuple[str, str | int]] = [("signal", one.pid), ("read", "/usr/bin/env")]
        assert await asyncio.to_thread(can, one.pid, [*refused, *allowed]) == allowed
    finally:
        await one.stop()
        await other.stop()
    assert machine.ledger.held == {}
    assert os.listdir(directory / "vms") == []


async def test_a_disk_of_root_is_plugged_by_its_descriptor_and_closed_with_its_unplug(directory: Path) -> None:
    secret = directory / "hidden"
    secret.mkdir(mode=0o700)
    image = secret / "disk.img"
    image.write_bytes(bytes(1 << 20))
    image.chmod(0o600)

    machine = Machine(directory)
    vm = await machine.boot(machine.config("pod1"))
    try:
        await vm.plug(disk("d", image))

        assert str(image) in open_files(vm.pid)
        assert await asyncio.to_thread(can, vm.pid, [("read", str(image)), ("list", str(secret))]) == []
        await vm.resize_disk("d", 2 << 20)
        assert image.stat().st_size == 2 << 20
    finally:
        await vm.stop()


async def test_qemu_reaches_its_files_in_directories_of_root(directory: Path) -> None:
    """In its view only their own modes count."""

    machine = Machine(directory)
    config = machine.config("pod1")
    os.chmod(os.path.dirname(config.boot.kernel), 0o700)
    vm = await machine.boot(config)
    try:
        assert int(status(vm.pid)["Uid"].split()[0]) >= FIRST
    finally:
        await vm.stop()


async def test_without_a_view_the_pod_runs_and_the_log_has_the_reason(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(flags: int) -> None:
        if flags & syscalls.CLONE_NEWNS:
            raise PermissionError(errno.EPERM, "operation not permitted")

    monkeypatch.setattr(syscalls, "unshare", refused)

    vm = await (machine := Machine(directory)).boot(machine.config("pod1"))
    try:
        assert os.readlink(f"/proc/{vm.pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    finally:
        await vm.stop()

    reasons = [vars(each)["reason"] for each in caplog.records if "sees the host's files" in each.getMessage()]
    assert reasons == ["EPERM (operation not permitted)"]


async def test_qemu_runs_as_root_if_its_user_cannot_open_a_file(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(directory)
    config = machine.config("pod1")
    os.chmod(config.boot.kernel, 0o600)
    vm = await machine.boot(config)
    try:
        assert status(vm.pid)["Uid"].split()[0] == "0"
    finally:
        await vm.stop()
    (warning,) = [record for record in caplog.records if record.getMessage() == "qemu runs as root"]
    assert vars(warning)["reason"] == f"{config.boot.kernel!r} cannot be opened by other users"


@pytest.mark.skipif(VSOCK_PROGRAM is None, reason="needs vhost-device-vsock (hint: cargo install vhost-device-vsock)")
async def test_the_vsock_program_has_the_next_user_and_a_view_of_its_own_directory(directory: Path) -> None:
    machine = Machine(directory)
    config = machine.config("pod1")
    own = f"{config.vm_dir}/vsock"
    channel = VhostUserVsockChannel(
        port=1024, program=str(VSOCK_PROGRAM), device_path=f"{own}/device.sock", socket_path=f"{own}/vsock.sock"
    )
    vm = await machine.boot(replace(config, agent_channel=channel))
    try:
        (program,) = vm.helper_pids
        facts, qemus = status(program), status(vm.pid)
        assert int(facts["Uid"].split()[0]) == int(qemus["Uid"].split()[0]) + 1
        assert {facts[name] for name in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb")} == {"0" * 16}
        assert await asyncio.to_thread(shown, program, (*HIDDEN, f"{config.vm_dir}/qmp.sock")) == []
        refused: list[tuple[str, str | int]] = [("signal", program), ("trace", program), ("connect", own)]
        assert await asyncio.to_thread(can, vm.pid, refused) == []
        assert await asyncio.to_thread(can, program, [("signal", vm.pid), ("make", f"{own}/new")]) == [
            ("make", f"{own}/new")
        ]
    finally:
        await vm.stop()
    assert machine.ledger.held == {}
    assert os.listdir(directory / "vms") == []


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (vm_config(is_privileged=True), "privileged_vmm"),
        (vm_config(pci=PciLayout(hot_plug=PortKind.ROOT)), "VFIO"),
        (vm_config(opens_sockets=True), "vhost_user_reconnect_timeout_sec"),
        (vm_config(), ""),
    ],
)
def test_each_need_of_root_has_its_reason(config: LocalVm, word: str) -> None:
    assert word in root_reason(config)
    assert bool(root_reason(config)) is bool(word)


@pytest.mark.parametrize(
    ("ranges", "lacks"),
    [
        ("         0          0 4294967295\n", False),
        (f"0 100000 65536\n{FIRST} 200000 {USER_COUNT}\n", False),
        ("0 100000 65536\n", True),
        (f"0 100000 1\n{FIRST} 200000 {USER_COUNT - 1}\n", True),
    ],
    ids=["all", "ours-too", "few", "one-short"],
)
def test_a_user_namespace_may_lack_the_users(directory: Path, ranges: str, lacks: bool) -> None:
    for name in ("uid_map", "gid_map"):
        (directory / name).write_text(ranges)

    assert bool(missing_users_reason(vm_config(first_user_id=FIRST), proc=str(directory))) is lacks


async def test_a_user_is_another_sandboxs_only_after_its_directory_is_gone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypervisors.qemu.isolation.USER_COUNT", 4)
    configs = [vm_config(vm_dir=f"{directory}/{name}", sandbox_id=name, first_user_id=FIRST) for name in "abc"]
    for config in configs:
        os.mkdir(config.vm_dir)

    first, second = [await reserve_user(config) for config in configs[:2]]
    with pytest.raises(ResourceExhausted):
        await reserve_user(configs[2])
    os.rmdir(configs[0].vm_dir)
    third = await reserve_user(configs[2])

    assert {first.id, second.id} == {FIRST, FIRST + 2}
    assert {vsock_user(first).id, vsock_user(second).id} == {FIRST + 1, FIRST + 3}
    assert third == first


def test_a_user_is_chosen_while_another_vm_ends(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vm_config(vm_dir=f"{directory}/vm", sandbox_id="vm", first_user_id=FIRST)
    os.mkdir(config.vm_dir)
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [*listed(path), "ended"])

    user = asyncio.run(reserve_user(config))

    assert os.stat(config.vm_dir).st_gid == user.id


def test_two_users_are_free_only_together(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shim of a version that gave out single users may have given the odd one to a QEMU that runs."""
    monkeypatch.setattr("hypervisors.qemu.isolation.USER_COUNT", 4)
    config = vm_config(vm_dir=f"{directory}/new", sandbox_id="new", first_user_id=FIRST)
    for name in ("new", "old"):
        os.mkdir(directory / name)
    os.chown(directory / "old", -1, FIRST + 1)

    assert asyncio.run(reserve_user(config)).id == FIRST + 2
