"""Protocols of the pod's neighbours: the guest's agent, the host, the event publisher."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from pyshim.model.agent_address import AgentAddress
from pyshim.model.caller import PodName
from pyshim.model.cgroups import Group, GroupSetting, HostOom, Scope
from pyshim.model.copies import CopiedPiece, TreeEntry
from pyshim.model.events import TaskEvent
from pyshim.model.guest import (
    AgentDetails,
    GuestContainer,
    GuestSandbox,
    NetworkInterface,
    NetworkNeighbour,
    NetworkRoute,
    Storage,
)
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ledger import Ledger, LedgerEntry
from pyshim.model.mounts import HostMount
from pyshim.model.network import DirectNetwork, Wiring
from pyshim.model.observation import Observation
from pyshim.model.oci import OciHook
from pyshim.model.snapshot import SandboxSnapshot
from pyshim.model.stats import ContainerStats
from pyshim.model.task import Stdio
from pyshim.model.vm import NicDevice, VfioDevice, VhostUserNic, VmConfig
from pyshim.model.volumes import SourceFacts, VirtiofsdPlan, VolumeStats


class ContainerAgent(Protocol):
    """The agent's calls about one container. Every call raises ShimError (code as the agent gave it) or AgentGone;
    `exec_id` is the container id for the init process, as kata-agent has it."""

    async def create_container(self, container: GuestContainer, timeout_s: float) -> None: ...
    async def start_container(self, container_id: str) -> None: ...
    async def remove_container(self, container_id: str, timeout_s: int) -> None: ...
    async def exec_process(self, container_id: str, exec_id: str, process: Mapping[str, Any]) -> None: ...
    async def signal_process(self, container_id: str, exec_id: str, signal: int) -> None:
        """An empty `exec_id` signals every process of the container."""

    async def wait_process(self, container_id: str, exec_id: str, within_s: float | None = None) -> int:
        """The exit status (code, or 128 + signal), once it has ended. kata-agent then forgets process and output.

        With `within_s` the agent waits no longer than that: DeadlineExceeded, and nothing has changed.
        """

    async def update_container(self, container_id: str, resources: Mapping[str, Any]) -> None: ...
    async def update_ephemeral_mounts(self, storages: tuple[Storage, ...]) -> None:
        """Each tmpfs is mounted again with the options now given."""

    async def stats_container(self, container_id: str) -> ContainerStats: ...
    async def pause_container(self, container_id: str) -> None: ...
    async def resume_container(self, container_id: str) -> None: ...
    async def write_stdin(self, container_id: str, exec_id: str, data: bytes | memoryview) -> int: ...
    async def read_stdout(self, container_id: str, exec_id: str, max_bytes: int) -> bytes | memoryview:
        """The next chunk; empty at end of stream."""

    async def read_stderr(self, container_id: str, exec_id: str, max_bytes: int) -> bytes | memoryview: ...
    async def keeps_output(self) -> bool:
        """Output can be read after `wait_process`, until its last writer has closed it or `end_output`.

        False for kata-agent, which forgets a process when it answers `wait_process`.
        """

    async def end_output(self, container_id: str, exec_id: str) -> None:
        """No more of the process's output will be read; for an agent that keeps it."""

    async def close_stdin(self, container_id: str, exec_id: str) -> None: ...
    async def copy_file(self, piece: CopiedPiece) -> None: ...
    async def resize_terminal(self, container_id: str, exec_id: str, rows: int, columns: int) -> None: ...


class Agent(ContainerAgent, Protocol):
    """The guest's agent: its containers and the sandbox. `None` as a timeout means until the connection ends."""

    async def check(self, timeout_s: float) -> None:
        """It answers. Raises DeadlineExceeded when it does not, Unavailable when it says that it does not serve."""

    async def set_policy(self, policy: str) -> None: ...
    async def create_sandbox(self, sandbox: GuestSandbox) -> None: ...
    async def destroy_sandbox(self) -> None: ...
    async def guest_details(self) -> AgentDetails: ...
    async def joins_by_name(self) -> bool:
        """A container can join the pid namespace of any other; kata-agent shares that of the first one only."""

    async def metrics(self) -> str:
        """The guest's metrics, in Prometheus' text format."""

    async def iptables(self, *, ipv6: bool) -> bytes: ...
    async def set_iptables(self, data: bytes, *, ipv6: bool) -> None: ...
    async def update_interface(self, interface: NetworkInterface) -> None: ...
    async def update_routes(self, routes: tuple[NetworkRoute, ...]) -> None: ...
    async def add_neighbours(self, neighbours: tuple[NetworkNeighbour, ...]) -> None: ...
    async def online_cpu_memory(self, cpus: int, *, cpu_only: bool) -> None: ...
    async def reseed_random(self, seed: bytes) -> None:
        """The guest's generator of random numbers goes on from `seed`."""

    async def set_time(self, time_ns: int) -> None:
        """The guest's clock shows these nanoseconds since 1970."""

    async def add_swap(self, pci_path: str) -> None:
        """The guest swaps to the virtio-blk disk at that place, which has a swap area on it."""

    async def volume_stats(self, guest_path: str) -> VolumeStats: ...
    async def resize_volume(self, guest_path: str, size_bytes: int) -> None: ...
    async def next_oom_event(self) -> str:
        """The id of the next container that met an OOM kill; no deadline."""

    async def gone(self) -> str:
        """Returns the reason once the connection has ended."""

    async def close(self) -> None: ...


class AgentConnector(Protocol):
    async def connect(self, address: AgentAddress, timeout_s: float) -> Agent:
        """An agent that has answered its health check; raises DeadlineExceeded or Unavailable naming the address."""


class InputStream(Protocol):
    """Host end of a process's stdin."""

    async def read(self) -> bytes:
        """The next bytes of the client; empty once every writer has closed and CloseIO was called."""

    def close_io(self) -> None:
        """CloseIO: our own write handle is closed, so that EOF follows the bytes already written. Idempotent."""

    async def close(self) -> None: ...


class OutputStream(Protocol):
    """Host end of a process's stdout or stderr."""

    async def write(self, data: bytes | memoryview) -> None:
        """All of `data` is with the reader; a slow reader makes this wait (back-pressure)."""

    async def finish(self) -> None:
        """Closed, and the reader has taken all that was written; a reader that stands still is waited for a second."""

    async def close(self) -> None: ...


class ProcessStreams(Protocol):
    @property
    def stdin(self) -> InputStream | None: ...
    @property
    def stdout(self) -> OutputStream | None: ...
    @property
    def stderr(self) -> OutputStream | None: ...

    async def close(self) -> None:
        """All streams closed, log programs ended; idempotent."""


class Virtiofsd(Protocol):
    pid: int

    async def wait(self) -> str:
        """Returns how it ended, with its last output, once it has."""

    async def stop(self) -> None:
        """The daemon and its socket are gone. Idempotent."""


class Cgroups(Protocol):
    """The host's cgroups (`resources/cgroups/host`). Every call raises ShimError naming the cgroup."""

    def roots(self, group: Group) -> tuple[str, ...]: ...
    async def occupants(self, groups: tuple[Group, ...]) -> Mapping[str, int]: ...
    async def hasten_moves(self) -> None: ...
    async def make(self, groups: tuple[Group, ...]) -> tuple[str, ...]: ...
    async def start_scope(self, scope: Scope) -> None: ...
    async def join(self, group: Group, pids: Iterable[int]) -> None: ...
    async def join_family(self, group: Group, pids: Iterable[int]) -> None: ...
    async def join_threads(self, group: Group, tids: Iterable[int]) -> None: ...
    async def leave(self, groups: tuple[Group, ...]) -> None: ...
    async def apply(self, group: Group, settings: Iterable[GroupSetting]) -> Mapping[GroupSetting, str]: ...
    async def allowed(self, group: Group, name: str) -> str: ...
    async def oom(self, group: Group) -> HostOom | None: ...
    async def usage(self, group: Group) -> Mapping[str, int]: ...
    async def device_rules(self, paths: Iterable[str]) -> tuple[tuple[str, str], ...]: ...
    async def join_class(self, name: str, pids: Iterable[int]) -> None: ...
    async def pin(self, tid: int, cpus: Iterable[int]) -> str: ...
    async def pin_family(self, pid: int, cpus: Iterable[int], but: Collection[int]) -> str: ...


class Host(Protocol):
    """All contact with Linux that orchestration needs. Every method raises ShimError naming the object."""

    async def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """The file's content; NotFound when missing, InvalidArgument when larger than `max_bytes`."""

    async def source_facts(self, path: str, vhost_user_store: str) -> SourceFacts:
        """The kind of file at `path`, links followed; MISSING rather than an error when it is not there.

        With `vhost_user_store`, block devices with numbers of that store are its disks.
        """

    async def with_mounts_below(self, paths: Collection[str]) -> frozenset[str]:
        """The paths that have a mount below them."""

    def cgroups(self, mode: CgroupMode) -> Cgroups:
        """One sandbox's host cgroups."""

    async def make_directory(self, path: str, mode: int) -> None: ...
    async def list_tree(self, root: str) -> tuple[TreeEntry, ...]:
        """Directories, files and links of a host tree, the root first, each directory before what is in it."""

    async def read_piece(self, root: str, path: str, offset: int, length: int) -> bytes:
        """A piece of a file beneath `root`, which no link leads out of; fewer bytes at its end."""

    async def make_disk_file(self, path: str, size_bytes: int, head: bytes = b"") -> None:
        """A new sparse file of that size that begins with `head`; what was there before is replaced."""

    async def write_bytes(self, path: str, content: bytes, mode: int) -> None:
        """A new file with that content; what was there before is replaced."""

    async def disk_bytes(self, path: str) -> int:
        """The size of a block device or file."""

    async def find_template(self, root: str, vm: VmConfig) -> str:
        """The directory of the template of this VM's machine. Raises NotFound without one."""

    async def make_template(self, root: str, vm: VmConfig, source: str) -> None:
        """Another process makes the template of this VM's machine, which is that of the configuration file `source`.

        Unless one makes a template already, or this one could not be made within the last hour.
        """

    async def discard_template(self, directory: str, reason: str) -> None:
        """No VM continues from it any more, and none like it is made for an hour. Idempotent."""

    async def mount(self, mount: HostMount) -> None: ...
    async def start_virtiofsd(self, plan: VirtiofsdPlan, ledger: Ledger) -> Virtiofsd: ...
    async def open_streams(self, stdio: Stdio, *, namespace: str, process_id: str) -> ProcessStreams: ...
    async def run_hook(self, kind: str, hook: OciHook, state: bytes) -> None:
        """The hook has exited with status 0. Raises ShimError naming it."""

    def netns_member(self, netns_path: str | None) -> AbstractAsyncContextManager[int]:
        """The pid of a process in the network namespace at the path, or in a new one, that lives within the block."""

    async def release(self, entry: LedgerEntry) -> None: ...


class Publisher(Protocol):
    def publish(self, event: TaskEvent) -> None:
        """The event is queued; events leave in the order of these calls. Never blocks, never raises."""


class Records(Protocol):
    """The sandbox's persisted state: snapshots replace each other, the ledger is part of it."""

    @property
    def ledger(self) -> Ledger: ...
    @property
    def held(self) -> Mapping[str, int]:
        """Entries of the ledger by kind."""

    def pins(self) -> AbstractContextManager[Mapping[int, str]]:
        """Within it, the other sandbox of each pinned CPU, and no other shim decides. Entering it blocks."""

    def claims(self, cgroups: Iterable[str]) -> AbstractContextManager[Mapping[str, str] | None]:
        """Within it, the sandbox of each of the cgroups that another one's ledger has, and no other shim decides.

        None, at once, while another shim decides. Entering it raises ShimError.
        """

    def save(self, snapshot: SandboxSnapshot) -> None:
        """The snapshot is on disk, whole. Raises ShimError naming the file."""

    def remove(self) -> None:
        """The sandbox's files are removed, unless the ledger still has entries. Idempotent, never raises."""


class ForwardConnection(Protocol):
    """One connection made to a loopback address of the pod's namespace on the host. Calls raise Unavailable."""

    port: int

    async def read(self) -> bytes:
        """The next bytes; empty at the end of the other side's stream."""

    async def write(self, data: bytes) -> None: ...
    def reset(self) -> None:
        """The connection is closed with a reset to the other side. Idempotent, also after `close`."""

    def close(self) -> None: ...


class ForwardListener(Protocol):
    """The listener for connections to the loopback addresses of the pod's namespace, on any port."""

    async def accept(self) -> ForwardConnection:
        """The next one. Raises Unavailable once closed."""

    async def close(self) -> None: ...


class Network(Protocol):
    """The pod's network on the host side: taps behind the VM's devices, and the guest's part of it, as it was at
    the last look at the namespace."""

    nics: tuple[NicDevice, ...]
    interfaces: tuple[NetworkInterface, ...]
    routes: tuple[NetworkRoute, ...]
    neighbours: tuple[NetworkNeighbour, ...]
    vhost_user_nics: tuple[VhostUserNic, ...]

    @property
    def functions(self) -> Mapping[str, VfioDevice]:
        """Devices of the host that are interfaces of the pod, by the MAC they have in the guest."""

    @property
    def forward_listener(self) -> ForwardListener | None:
        """Takes the connections of port-forward; None on a host that cannot steer them."""

    def close_taps(self) -> None:
        """Our copies of the tap fds are closed; the VMM has its own. Idempotent."""

    async def changed(self) -> None:
        """The namespace is other than at the last look; no deadline. Raises Unavailable once the watch has ended."""

    async def follow(self) -> tuple[tuple[NicDevice, ...], tuple[str, ...]]:
        """A new look: new links are wired. Their devices, and the ids of devices whose link is gone.

        The taps are open until `close_taps`. A link that cannot be wired is logged, and is as it was.
        """

    async def detach(self, nic_id: str) -> None:
        """The device's link and tap are as if they had never been wired. Idempotent."""

    def unwatch(self) -> None:
        """Changes are no longer watched. Idempotent."""

    async def disconnect(self) -> None:
        """The namespace is as CNI left it. Idempotent, and fine when the namespace is already gone."""


class MonitorRpc(Protocol):
    """The calls of the monitor socket to a pod. The asynchronous ones raise ShimError."""

    def observe(self) -> Observation: ...
    def agent_url(self) -> str: ...
    def name(self) -> PodName: ...
    @property
    def agent(self) -> Agent:
        """Raises Unavailable once the sandbox is lost or stopped."""

    async def volume_stats(self, volume_path: str) -> VolumeStats: ...
    async def resize_volume(self, volume_path: str, size_bytes: int) -> None: ...


class NetworkConnector(Protocol):
    async def connect(self, netns_path: str, wiring: Wiring, ledger: Ledger, *, iommufd: bool) -> Network:
        """Every link of the namespace is connected; nothing is left behind on error.

        With `iommufd` PCI functions are passed through their own nodes.
        """

    async def connect_direct(
        self, netns_path: str | None, direct: DirectNetwork, ledger: Ledger, *, iommufd: bool
    ) -> Network:
        """The devices of `direct` and no others, ready to be given away; nothing is left behind on error.

        Of the namespace, if the pod has one, only the loopback is of interest.
        """
