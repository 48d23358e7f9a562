"""A whole machine in memory, for tests of what is left behind: neighbours that make resources only under an intent.

`held` is every resource that exists, `disk` the state files, `open_fds` descriptors of the shim. A resource made
without an entry in the ledger on disk is an error at once: nobody could clean it up after a crash at that moment.
"""

import asyncio
import copy
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from hypervisors.qemu.vm import QemuVm
from pyshim.model.confinement import Group
from pyshim.model.errors import FailedPrecondition
from pyshim.model.guest import NetworkAddress, NetworkInterface, NetworkNeighbour, NetworkRoute
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.network import Wiring
from pyshim.model.task import Stdio
from pyshim.model.vm import NicDevice, VfioDevice, VmConfig
from pyshim.model.volumes import HostMount, VirtiofsdPlan
from pyshim.resources.cgroups.host.sandbox_cgroups import LinuxCgroups
from pyshim.resources.linux import LinuxHost
from pyshim.resources.network.host.pod_network import HostNetworkConnector
from pyshim.state.schema import SandboxState
from tests.fakes.cgroups import FakeCgroups
from tests.fakes.deadlines import deadlines_of
from tests.fakes.host import FakeHost, FakeStreams
from tests.fakes.hypervisor import FakeHypervisor

Resource = tuple[ResourceKind, str]


class Machine:
    def __init__(self) -> None:
        self.held: Counter[Resource] = Counter()
        self.disk: dict[str, SandboxState] = {}
        self.open_fds: Counter[str] = Counter()

    def copy(self) -> "Machine":
        """The machine at this moment; descriptors are the process's, and go with it."""
        other = Machine()
        other.held = copy.copy(self.held)
        other.disk = dict(self.disk)
        return other

    def make(self, kind: ResourceKind, key: str) -> None:
        intents = [entry for state in self.disk.values() for entry in state.ledger]
        covered = any(
            entry.kind is kind and (entry.key == key or (kind is ResourceKind.DIRECTORY and _is_in(key, entry.key)))
            for entry in intents
        )
        assert covered, f"{kind.value} {key!r} is made without an intent on disk"
        if kind is ResourceKind.DIRECTORY:
            self.held[kind, key] = 1
        else:
            self.held[kind, key] += 1

    def undo(self, entry: LedgerEntry) -> None:
        """As `cleanup/undo.py`: idempotent, a directory with all below it but never across a mount."""
        if entry.kind is ResourceKind.DIRECTORY:
            over = [key for kind, key in self.held if kind is ResourceKind.MOUNT and _is_in(key, entry.key)]
            if over:
                raise FailedPrecondition(f"release directory {entry.key!r}: mounts are in it: {over}")
            gone = [name for name in self.held if name[0] is ResourceKind.DIRECTORY and _is_in(name[1], entry.key)]
        else:
            gone = [(entry.kind, entry.key)]
        for name in gone:
            self.held.pop(name, None)

    def replay(self) -> None:
        """What containerd's `delete` call does once the shim is dead: every ledger from its end, then the files."""
        for sandbox_id, state in tuple(self.disk.items()):
            for entry in reversed(state.ledger):
                self.undo(entry)
            del self.disk[sandbox_id]

    def left(self) -> list[str]:
        """What a machine without a sandbox does not have."""
        return [
            *(f"{kind.value} {key}" for (kind, key), count in self.held.items() if count),
            *(f"state {name}" for name in self.disk),
            *(f"fd {name}" for name, count in self.open_fds.items() if count),
        ]


def _is_in(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")


class MachineStore:
    """What `SandboxRecords` needs of a `StateStore`."""

    root = str(Path(__file__).parent)
    """A directory without states: those of other sandboxes are looked for there."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def enter(self, sandbox_id: str, shim: object) -> None: ...

    def save(self, state: SandboxState) -> None:
        self._machine.disk[state.sandbox_id] = state

    def remove(self, sandbox_id: str) -> None:
        self._machine.disk.pop(sandbox_id, None)


class MachineStreams(FakeStreams):
    def __init__(self, stdio: Stdio, machine: Machine, name: str) -> None:
        super().__init__(stdio)
        self._machine, self._name = machine, name
        machine.open_fds[name] += 1
        for output in (self.stdout, self.stderr):
            if output is not None:
                output.keep_bytes = 1 << 16

    async def close(self) -> None:
        if not self.closed:
            self._machine.open_fds[self._name] -= 1
        await super().close()


class MachineVirtiofsd:
    def __init__(self, machine: Machine, ledger: Ledger, entries: tuple[LedgerEntry, ...]) -> None:
        self.pid = 77
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ledger, self._entries = ledger, entries

    async def wait(self) -> str:
        return await asyncio.shield(self.ended)

    async def stop(self) -> None:
        if not self.ended.done():
            self.ended.set_result("stopped")
        for entry in self._entries:
            await self._ledger.release(entry)


@deadlines_of(LinuxCgroups)
class MachineCgroups(FakeCgroups):
    def __init__(self, machine: Machine) -> None:
        super().__init__(lambda _step: None)
        self._machine = machine

    async def make(self, groups: tuple[Group, ...]) -> tuple[str, ...]:
        for group in groups:
            self._machine.make(ResourceKind.CGROUP, group.path)
        return await super().make(groups)


@deadlines_of(LinuxHost)
class MachineHost(FakeHost):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.cgroup_tree = MachineCgroups(machine)

    async def make_directory(self, path: str, mode: int) -> None:
        await asyncio.sleep(0)
        self.machine.make(ResourceKind.DIRECTORY, path)

    async def mount(self, mount: HostMount) -> None:
        await asyncio.sleep(0)
        self.machine.make(ResourceKind.MOUNT, mount.target)

    async def start_virtiofsd(self, plan: VirtiofsdPlan, ledger: Ledger) -> MachineVirtiofsd:
        made: list[LedgerEntry] = []
        try:
            for kind, key in ((ResourceKind.SOCKET, plan.listen_path), (ResourceKind.PROCESS, plan.shared_dir)):
                made.insert(0, LedgerEntry(kind=kind, key=key))
                ledger.acquire(made[0])
                self.machine.make(kind, key)
            await asyncio.sleep(0)
        except BaseException:
            for entry in made:
                await ledger.release(entry)
            raise
        return MachineVirtiofsd(self.machine, ledger, tuple(made))

    async def open_streams(self, stdio: Stdio, *, namespace: str, process_id: str) -> MachineStreams:
        await asyncio.sleep(0)
        return MachineStreams(stdio, self.machine, f"streams of {process_id}")

    async def undo(self, entry: LedgerEntry) -> None:
        await asyncio.sleep(0)
        self.machine.undo(entry)
        if entry.kind is ResourceKind.CGROUP:
            self.cgroup_tree.release(entry.key)


@deadlines_of(QemuVm)
class MachineVm(FakeHypervisor):
    """Its process is a resource of the machine."""

    def __init__(self, ledger: Ledger, machine: Machine) -> None:
        super().__init__(ledger, files_exist=True)
        self._machine = machine

    async def create(self, config: VmConfig) -> None:
        await super().create(config)
        self._machine.make(ResourceKind.PROCESS, config.uuid)


class MachineNetwork:
    forward_listener = None
    vhost_user_nics = ()
    functions: Mapping[str, VfioDevice] = {}
    sysctls: Mapping[str, str] = {}
    nics = (NicDevice(id="net0", mac="02:00:00:00:00:01", tap_fds=(9,), vhost_fds=(), mtu=1500),)
    interfaces = (
        NetworkInterface(
            name="eth0",
            addresses=(NetworkAddress(address="10.0.0.2", prefix_length=24),),
            mtu=1500,
            mac="02:00:00:00:00:01",
            flags=0,
            type="veth",
            device_path="",
        ),
    )
    routes = (
        NetworkRoute(destination="", gateway="10.0.0.1", device="eth0", source="", scope=0, family=4, flags=0, mtu=0),
    )
    neighbours = (NetworkNeighbour(address="10.0.0.1", device="eth0", mac="02:00:00:00:00:02", state=128, flags=0),)

    def __init__(self, machine: Machine, ledger: Ledger, netns_path: str) -> None:
        self._machine, self._ledger, self._netns = machine, ledger, netns_path
        self._acquired: list[LedgerEntry] = []
        self._taps_open = False

    async def make(self) -> None:
        for kind, key in ((ResourceKind.LINK, "veth0_kata"), (ResourceKind.INGRESS, "eth0")):
            entry = LedgerEntry(kind=kind, key=key, detail={"netns": self._netns})
            self._acquired.append(entry)
            self._ledger.acquire(entry)
            await asyncio.sleep(0)
            self._machine.make(kind, key)
        self._taps_open = True
        self._machine.open_fds["veth0_kata"] += 1

    async def changed(self) -> None:
        await asyncio.get_running_loop().create_future()

    def unwatch(self) -> None: ...

    def close_taps(self) -> None:
        if self._taps_open:
            self._taps_open = False
            self._machine.open_fds["veth0_kata"] -= 1

    async def disconnect(self) -> None:
        self.close_taps()
        for entry in reversed(self._acquired):
            await self._ledger.release(entry)


@deadlines_of(HostNetworkConnector)
class MachineConnector:
    """The seam `NetworkConnector`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def connect(self, netns_path: str, wiring: Wiring, ledger: Ledger, *, iommufd: bool) -> MachineNetwork:
        network = MachineNetwork(self._machine, ledger, netns_path)
        try:
            await network.make()
        except BaseException:
            await network.disconnect()
            raise
        return network
