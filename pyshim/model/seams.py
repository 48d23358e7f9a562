"""Protocols of what a pod calls: the guest's agent, the host, its network and cgroups, the state, the publisher.

`serve.py` passes the real ones, tests pass fakes (`tests/fakes`). A docstring says what is true after the call.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol

from pyshim.model.confinement import Group, GroupSetting, HostOom, Scope
from pyshim.model.guest import (
    AgentAddress,
    AgentDetails,
    ContainerStats,
    GuestContainer,
    GuestSandbox,
    NetworkInterface,
    NetworkNeighbour,
    NetworkRoute,
    Storage,
)
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ledger import Ledger, LedgerEntry
from pyshim.model.network import DirectNetwork, FollowedChanges, Wiring
from pyshim.model.observation import Observation
from pyshim.model.oci import OciHook, PodName
from pyshim.model.sandbox import SandboxSnapshot
from pyshim.model.task import Stdio, TaskEvent
from pyshim.model.vm import LocalVm, NicDevice, VfioDevice, VhostUserNic
from pyshim.model.volumes import CopiedPiece, HostMount, MountedFile, SourceFacts, TreeEntry, VirtiofsdPlan, VolumeStats


class ContainerAgent(Protocol):
    """The agent's calls about one container. Each raises ShimError with the agent's status code, or AgentGone.

    The `exec_id` of an init process is the container id, as in kata-agent.
    """

    async def create_container(self, container: GuestContainer, timeout_s: float) -> None: ...
    async def start_container(self, container_id: str) -> None: ...
    async def remove_container(self, container_id: str, timeout_s: int) -> None: ...
    async def exec_process(self, container_id: str, exec_id: str, process: Mapping[str, Any]) -> None: ...
    async def signal_process(self, container_id: str, exec_id: str, signal: int) -> None:
        """The process has the signal; with an empty `exec_id` all processes of the container have it."""

    async def wait_process(self, container_id: str, exec_id: str, within_s: float | None = None) -> int:
        """The exit status (code, or 128 + signal) of the process, which has ended.

        kata-agent then drops the process with its unread output. Raises DeadlineExceeded, without any other effect, if
        the process has not ended `within_s`.
        """

    async def update_container(self, container_id: str, resources: Mapping[str, Any]) -> None: ...
    async def update_ephemeral_mounts(self, storages: tuple[Storage, ...]) -> None:
        """Each tmpfs is remounted with the options of its storage."""

    async def stats_container(self, container_id: str) -> ContainerStats: ...
    async def pause_container(self, container_id: str) -> None: ...
    async def resume_container(self, container_id: str) -> None: ...
    async def write_stdin(self, container_id: str, exec_id: str, data: bytes | memoryview) -> int: ...
    async def read_stdout(self, container_id: str, exec_id: str, max_bytes: int) -> bytes | memoryview:
        """The next chunk; empty at end of stream."""

    async def read_stderr(self, container_id: str, exec_id: str, max_bytes: int) -> bytes | memoryview: ...
    async def keeps_output(self) -> bool:
        """Output can be read after `wait_process`, until its last writer closes it or `end_output` is called.

        False for kata-agent, which drops the process when it answers `wait_process`.
        """

    async def end_output(self, container_id: str, exec_id: str) -> None:
        """The agent has dropped the process's unread output. Only for an agent that `keeps_output`."""

    async def close_stdin(self, container_id: str, exec_id: str) -> None: ...
    async def copy_file(self, piece: CopiedPiece) -> None: ...
    async def resize_terminal(self, container_id: str, exec_id: str, rows: int, columns: int) -> None: ...


class Agent(ContainerAgent, Protocol):
    """The guest's agent."""

    async def free_share(self) -> None:
        """The guest has let go of what the host has taken out of the share."""

    async def termination_message(self, container_id: str) -> str:
        """What the container has written to the file that its annotation `terminationMessagePath` names."""

    async def check(self, timeout_s: float) -> None:
        """The agent has answered that it serves. Raises Unavailable if it does not serve, DeadlineExceeded without an
        answer."""

    async def set_policy(self, policy: str) -> None: ...
    async def create_sandbox(self, sandbox: GuestSandbox) -> None: ...
    async def destroy_sandbox(self) -> None: ...
    async def guest_details(self) -> AgentDetails: ...
    async def joins_by_name(self) -> bool:
        """A container can join the pid namespace of any other container; kata-agent only shares the first one's."""

    async def metrics(self) -> str:
        """The guest's metrics, in Prometheus' text format."""

    async def iptables(self, *, ipv6: bool) -> bytes: ...
    async def set_iptables(self, data: bytes, *, ipv6: bool) -> None: ...
    async def update_interface(self, interface: NetworkInterface) -> None: ...
    async def update_routes(self, routes: tuple[NetworkRoute, ...]) -> None: ...
    async def add_neighbours(self, neighbours: tuple[NetworkNeighbour, ...]) -> None: ...
    async def online_cpu_memory(self, cpus: int, *, cpu_only: bool) -> None: ...
    async def reseed_random(self, seed: bytes) -> None:
        """The guest's random number generator is seeded with `seed`."""

    async def set_time(self, time_ns: int) -> None:
        """The guest's clock is set to `time_ns`, nanoseconds since the epoch."""

    async def add_swap(self, pci_path: str) -> None:
        """The guest uses the virtio-blk disk at that path as swap; the disk has a swap area."""

    async def volume_stats(self, guest_path: str) -> VolumeStats: ...
    async def resize_volume(self, guest_path: str, size_bytes: int) -> None: ...
    async def next_oom_event(self) -> str:
        """The id of the next container with an OOM event. Waits without a deadline."""

    async def gone(self) -> str:
        """Waits for the end of the connection; returns its reason."""

    async def close(self) -> None: ...


class AgentConnector(Protocol):
    async def connect(self, address: AgentAddress, timeout_s: float) -> Agent:
        """An agent that has answered its health check. Raises DeadlineExceeded or Unavailable naming the address."""


class InputStream(Protocol):
    """The host's end of a process's stdin."""

    async def read(self) -> bytes:
        """The client's next bytes; empty after every writer has closed and CloseIO was called."""

    def close_io(self) -> None:
        """CloseIO: the shim's own write handle is closed, so that EOF follows the bytes already written. Idempotent."""

    async def close(self) -> None: ...


class OutputStream(Protocol):
    """The host's end of a process's stdout or stderr."""

    async def write(self, data: bytes | memoryview) -> None:
        """All of `data` is written; waits for a slow reader."""

    async def finish(self) -> None:
        """The stream is closed, and the reader has read all of it; waits one second for a reader that reads nothing."""

    async def close(self) -> None: ...


class ProcessStreams(Protocol):
    @property
    def stdin(self) -> InputStream | None: ...
    @property
    def stdout(self) -> OutputStream | None: ...
    @property
    def stderr(self) -> OutputStream | None: ...

    async def close(self) -> None:
        """All streams are closed, and their log programs have ended. Idempotent."""


class Virtiofsd(Protocol):
    pid: int
    takes_groups: bool
    """It applies the supplementary groups that the guest sends with a request (Linux 6.3 and later do)."""

    async def wait(self) -> str:
        """Waits for the end of the process; returns how it ended, with its last output."""

    async def stop(self) -> None:
        """The process has ended, and its socket is removed. Idempotent."""


class Cgroups(Protocol):
    """The cgroups of one sandbox on the host. Every call raises ShimError naming the cgroup.

    `resources/cgroups/host/sandbox_cgroups.py` describes the methods.
    """

    def roots(self, group: Group) -> tuple[str, ...]: ...
    async def occupants(self, groups: tuple[Group, ...]) -> Mapping[str, int]: ...
    def hasten_moves(self) -> None: ...
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
    """The operations of Linux that a pod uses. Every method raises ShimError naming the object."""

    async def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """The file's content. Raises NotFound without the file, InvalidArgument if it is larger than `max_bytes`."""

    async def source_facts(self, path: str, vhost_user_store: str) -> SourceFacts:
        """What is at `path`, symbolic links followed; its kind is MISSING if there is nothing.

        If `vhost_user_store` is not empty, a block device with a number of that store is one of its disks.
        """

    async def mounted_files(self, paths: Collection[str]) -> Mapping[str, MountedFile]:
        """Where each of `paths` leads, links followed."""

    def cgroups(self, mode: CgroupMode) -> Cgroups: ...
    async def make_directory(self, path: str, mode: int) -> None: ...
    async def list_tree(self, root: str) -> tuple[TreeEntry, ...]:
        """The directories, files and links of a host tree; the root first, each directory before its content."""

    async def read_piece(self, root: str, path: str, offset: int, length: int) -> bytes:
        """`length` bytes of a file beneath `root`, fewer at its end. No link leads out of `root`."""

    async def make_disk_file(self, path: str, size_bytes: int, head: bytes = b"") -> None:
        """A new sparse file of that size, which begins with `head`, is at `path`. It replaces an older file."""

    async def write_bytes(self, path: str, content: bytes, mode: int) -> None:
        """A new file with that content is at `path`. It replaces an older file."""

    async def kernel_release(self, path: str) -> str:
        """The release of the Linux kernel in the file, such as `6.12.57-amd64`; empty if the file does not say."""

    async def boot_architectures(self, paths: Collection[str]) -> Mapping[str, str]:
        """For each boot file that says so, the architecture that it is for, as `uname -m` says it."""

    async def disk_bytes(self, path: str) -> int:
        """The size of a block device or file."""

    async def find_template(self, root: str, vm: LocalVm) -> str:
        """The directory of the template for the machine of `vm`. Raises NotFound without one."""

    async def make_template(self, root: str, vm: LocalVm, source: str) -> None:
        """Another process has begun to make the template for the machine of `vm` from the configuration file `source`.

        Nothing is done while another template is being made, or if this one failed within the last hour.
        """

    async def discard_template(self, directory: str, reason: str) -> None:
        """No VM uses the template any more, and no such template is made for an hour. Idempotent."""

    async def mount(self, mount: HostMount) -> None: ...
    async def start_virtiofsd(self, plan: VirtiofsdPlan, ledger: Ledger) -> Virtiofsd: ...
    async def open_streams(self, stdio: Stdio, *, namespace: str, process_id: str) -> ProcessStreams: ...
    async def run_hook(self, kind: str, hook: OciHook, state: bytes) -> None:
        """The hook has exited with status 0. Raises ShimError naming the hook."""

    async def make_netns(self, path: str) -> None:
        """A new network namespace is bound on `path`. Raises ShimError, and then nothing is."""

    def netns_member(self, netns_path: str) -> AbstractAsyncContextManager[int]:
        """The pid of a process that runs during the block in the network namespace at `netns_path`."""

    async def undo(self, entry: LedgerEntry) -> None:
        """The resource is gone. The ledger strikes it out afterwards. Raises ShimError naming kind and key."""


class Publisher(Protocol):
    def publish(self, event: TaskEvent) -> None:
        """The event is queued. Events are sent in the order of these calls. Never blocks, never raises."""


class Records(Protocol):
    """The sandbox's persisted state: the latest snapshot and the ledger."""

    @property
    def ledger(self) -> Ledger: ...
    @property
    def entry_counts(self) -> Mapping[str, int]:
        """The number of the ledger's entries by kind."""

    def pins(self) -> AbstractContextManager[Mapping[int, str]]:
        """Locks the pinning of CPUs on the node; yields the sandbox that has pinned each CPU, without this one's CPUs.

        Waits, blocking, for the lock.
        """

    def claims(self, cgroups: Iterable[str]) -> AbstractContextManager[Mapping[str, str] | None]:
        """Locks the claiming of cgroups on the node; yields, for each of `cgroups` in another ledger, its sandbox.

        Yields None, without waiting, if another shim has the lock. Raises ShimError.
        """

    def save(self, snapshot: SandboxSnapshot) -> None:
        """The whole snapshot is on disk. Raises ShimError naming the file."""

    def remove(self) -> None:
        """The sandbox's files are removed unless the ledger still has entries. Idempotent, never raises."""


class ForwardConnection(Protocol):
    """A connection to a loopback address of the pod's namespace on the host. Calls raise Unavailable."""

    port: int

    async def read(self) -> bytes:
        """The next bytes; empty at the end of the peer's stream."""

    async def write(self, data: bytes) -> None: ...
    def reset(self) -> None:
        """The connection is closed with a TCP reset. Idempotent, also after `close`."""

    def close(self) -> None: ...


class ForwardListener(Protocol):
    """Accepts connections to the loopback addresses of the pod's namespace, on every port."""

    async def accept(self) -> ForwardConnection:
        """The next connection. Raises Unavailable after `close`."""

    async def close(self) -> None: ...


class Network(Protocol):
    """The pod's network: its taps on the host, and the guest's interfaces, routes and neighbours as last read from the
    namespace."""

    nics: tuple[NicDevice, ...]
    interfaces: tuple[NetworkInterface, ...]
    routes: tuple[NetworkRoute, ...]
    neighbours: tuple[NetworkNeighbour, ...]
    sysctls: Mapping[str, str]
    """Settings of the namespace that differ from a new one's, as a spec names them."""
    vhost_user_nics: tuple[VhostUserNic, ...]

    @property
    def functions(self) -> Mapping[str, VfioDevice]:
        """The pod's interfaces that are passed-through devices of the host, by their MAC in the guest."""

    @property
    def forward_listener(self) -> ForwardListener | None:
        """Accepts the connections of port-forward; None on a host that cannot redirect them."""

    def close_taps(self) -> None:
        """The shim's copies of the tap fds are closed; the VMM has its own. Idempotent."""

    async def changed(self) -> None:
        """Waits, without a deadline, for a change of the namespace. Raises Unavailable after `disconnect`."""

    def is_changed(self) -> bool:
        """A change has been reported since the last look. Call `follow` next: it is not reported again."""

    async def follow(self) -> FollowedChanges:
        """The namespace is read again and new links are connected. The taps stay open until `close_taps`.

        A link that cannot be connected is logged and left as it was.
        """

    async def resolver(self) -> int | None:
        """The fd of a datagram socket, connected to the namespace's resolver; None without one. It is the caller's."""

    async def detach(self, nic_id: str) -> None:
        """The device's tap is removed, and its link is as it was before it was connected. Idempotent."""

    def unwatch(self) -> None:
        """Changes are no longer watched. Idempotent."""

    async def disconnect(self) -> None:
        """The namespace is as CNI left it. Idempotent; no error if the namespace is gone."""


class MonitorRpc(Protocol):
    """What the monitor socket asks a pod. The coroutines raise ShimError."""

    def observe(self) -> Observation: ...
    def agent_url(self) -> str: ...
    def name(self) -> PodName: ...
    @property
    def agent(self) -> Agent:
        """Raises Unavailable after the sandbox has failed or stopped."""

    async def volume_stats(self, volume_path: str) -> VolumeStats: ...
    async def resize_volume(self, volume_path: str, size_bytes: int) -> None: ...


class NetworkConnector(Protocol):
    async def connect_new(self, netns_path: str, wiring: Wiring, ledger: Ledger, *, iommufd: bool) -> Network:
        """A namespace of the sandbox's own, without links until now, is watched: its links are found by `follow`."""

    async def connect(self, netns_path: str, wiring: Wiring, ledger: Ledger, *, iommufd: bool) -> Network:
        """Every link of the namespace is connected. On an error everything is undone.

        With `iommufd` a PCI function is passed through by its own node, not by its IOMMU group's.
        """

    async def connect_direct(
        self, netns_path: str | None, direct: DirectNetwork, ledger: Ledger, *, iommufd: bool
    ) -> Network:
        """The devices of `direct` are ready to be passed to the VM. On an error everything is undone.

        No link of the namespace is connected; it only serves port-forward, by its loopback interface.
        """
