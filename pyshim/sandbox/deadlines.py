"""A deadline for every wait of a pod on its neighbours, and the words for the one that has passed.

`bounded` wraps an environment once, so that no step of orchestration can forget it. The neighbours keep shorter limits
of their own where they can say more (QMP, the agent's calls); these here hold when a neighbour itself hangs. Waits
without end are few and listed by name: a VM's end, a daemon's end, the bytes of a stream.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

from hypervisors.base import Hypervisor, VfioDevice, VmConfig
from pyshim.model.config import Config
from pyshim.model.errors import DeadlineExceeded
from pyshim.model.ledger import Ledger
from pyshim.sandbox.environment import Environment
from pyshim.sandbox.seams import AgentConnector, Host, NetworkConnector

T = TypeVar("T")

READ_S = 10.0
"""For what only looks at files."""
CHANGE_S = 30.0
"""For one change on the host, or a probe: a slow file system, the start of a program under load."""
VM_S = 150.0
"""For one change of a VM: virtio-mem may take two minutes, and says more when it is not done by then."""
MARGIN_S = 10.0
"""On top of a limit the neighbour was given."""
UNDO_S = 10.0
"""For one step of an undo; what is not done by then stays in the ledger."""


class Limit(NamedTuple):
    """`seconds` and `action` are asked with the call's arguments."""

    seconds: Callable[..., float]
    action: Callable[..., str]


def _limit(seconds: float, action: Callable[..., str]) -> Limit:
    return Limit(lambda *_args, **_named: seconds, action)


HOST: Mapping[str, Limit] = {
    "read_bytes": _limit(READ_S, lambda path, _max_bytes: f"read '{path}'"),
    "source_facts": _limit(READ_S, lambda path, _store: f"look at '{path}'"),
    "list_tree": _limit(CHANGE_S, lambda root: f"list '{root}'"),
    "read_piece": _limit(READ_S, lambda root, path, _offset, _length: f"read '{root}/{path}'"),
    "make_disk_file": _limit(CHANGE_S, lambda path, _size_bytes: f"make disk '{path}'"),
    "write_bytes": _limit(CHANGE_S, lambda path, _content, _mode: f"write '{path}'"),
    "make_directory": _limit(CHANGE_S, lambda path, _mode: f"make directory '{path}'"),
    "disk_bytes": _limit(READ_S, lambda path: f"measure '{path}'"),
    "mount": _limit(CHANGE_S, lambda mount: f"mount '{mount.source}' on '{mount.target}'"),
    "start_virtiofsd": _limit(CHANGE_S, lambda plan, _ledger: f"start virtiofsd '{plan.binary}'"),
    "open_streams": _limit(CHANGE_S, lambda _stdio, *, process_id, **_named: f"open streams of '{process_id}'"),
    "release": _limit(CHANGE_S, lambda entry: f"release {entry.kind.value} '{entry.key}'"),
}
CGROUPS: Mapping[str, Limit] = {
    "occupants": _limit(READ_S, lambda groups: f"look into cgroups {', '.join(repr(group.path) for group in groups)}"),
    "make": _limit(CHANGE_S, lambda groups: f"make cgroups {', '.join(repr(group.path) for group in groups)}"),
    "start_scope": _limit(CHANGE_S, lambda scope: f"start scope '{scope.unit}'"),
    "join": _limit(CHANGE_S, lambda group, _pids: f"join cgroup '{group.path}'"),
    "join_threads": _limit(CHANGE_S, lambda group, _tids: f"move threads into cgroup '{group.path}'"),
    "leave": _limit(CHANGE_S, lambda _groups: "leave cgroups"),
    "apply": _limit(CHANGE_S, lambda group, _settings: f"set limits of cgroup '{group.path}'"),
    "allowed": _limit(READ_S, lambda group, name: f"read cpuset.{name} of cgroup '{group.path}'"),
    "oom": _limit(READ_S, lambda group: f"read oom counters of cgroup '{group.path}'"),
    "device_rules": _limit(READ_S, lambda _paths: "look at device nodes"),
    "pin": _limit(CHANGE_S, lambda tid, _cpus: f"pin thread {tid}"),
}
HYPERVISOR: Mapping[str, Limit] = {
    "pause": _limit(CHANGE_S, lambda: "pause vm"),
    "resume": _limit(CHANGE_S, lambda: "resume vm"),
    # VFIO pins the guest's memory, all of it.
    "plug": Limit(
        lambda device: VM_S if isinstance(device, VfioDevice) else CHANGE_S, lambda device: f"plug device '{device.id}'"
    ),
    "unplug": _limit(CHANGE_S, lambda device_id: f"unplug device '{device_id}'"),
    "resize_disk": _limit(CHANGE_S, lambda device_id, size_bytes: f"resize disk '{device_id}' to {size_bytes} bytes"),
    "resize_vcpus": _limit(VM_S, lambda vcpus: f"resize vm to {vcpus} vCPUs"),
    "resize_memory": _limit(VM_S, lambda memory_mib: f"resize vm to {memory_mib} MiB"),
    "vcpu_thread_ids": _limit(CHANGE_S, lambda: "list vCPU threads of vm"),
}
NETWORK: Mapping[str, Limit] = {
    "connect": _limit(CHANGE_S + MARGIN_S, lambda netns, *_args, **_named: f"connect network namespace '{netns}'"),
    "connect_direct": _limit(CHANGE_S + MARGIN_S, lambda *_args, **_named: "connect directly attached network"),
}
AGENT: Mapping[str, Limit] = {
    "connect": Limit(
        lambda _address, timeout_s: timeout_s + MARGIN_S, lambda address, _s: f"connect agent '{address}'"
    ),
}
ENDLESS = frozenset({"wait"})
"""Calls that answer when something ends, whenever that is."""


def _in_its_own_words(name: str) -> Limit:
    """The limit of a call that has no row above: what it is called, and what it was asked about."""

    def action(*args: Any, **_named: Any) -> str:
        about = f" '{args[0]}'" if args and isinstance(args[0], str) else ""
        return f"{name.replace('_', ' ')}{about}"

    return _limit(CHANGE_S, action)


class Within:
    """`async with`: the block is left within `timeout_s`. Raises DeadlineExceeded naming `action` when it was not.

    A TimeoutError of somebody else passes.
    """

    def __init__(self, timeout_s: float, action: Callable[[], str]) -> None:
        self._timeout_s = timeout_s
        self._action = action
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"{self._action()}: not done within {self._timeout_s:g} s") from exc


def within(timeout_s: float, action: str) -> Within:
    """The same for an action that has its name already."""
    return Within(timeout_s, lambda: action)


def _limits_of_a_vm() -> Mapping[str, Limit]:
    """Its start and its end may take as long as the configuration says that `create` is given."""
    created: list[VmConfig] = []

    def create_s(vm: VmConfig) -> float:
        created.append(vm)
        return vm.start_timeout_s + MARGIN_S

    def start_s() -> float:
        return max([CHANGE_S, *(vm.start_timeout_s + MARGIN_S for vm in created)])

    def stop_s() -> float:
        return max([CHANGE_S, *(vm.stop_timeout_s + MARGIN_S for vm in created)])

    return {
        **HYPERVISOR,
        "create": Limit(create_s, lambda vm: f"create vm '{vm.sandbox_id}'"),
        "start": Limit(start_s, lambda: "start vm"),
        "stop": Limit(stop_s, lambda: "stop vm"),
    }


class _Bounded:
    """Passes every call on; one that is awaited under its deadline in `limits`, or the usual one."""

    def __init__(self, target: object, limits: Mapping[str, Limit]) -> None:
        self._target = target
        self._limits = limits

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name == "cgroups":
            return lambda mode: _Bounded(value(mode), CGROUPS)
        if name in ENDLESS or not inspect.iscoroutinefunction(value):
            return value
        limit = self._limits.get(name) or _in_its_own_words(name)

        async def call(*args: Any, **named: Any) -> Any:
            async with Within(limit.seconds(*args, **named), lambda: limit.action(*args, **named)):
                return await value(*args, **named)

        return call


def bounded(environment: Environment) -> Environment:
    """The same neighbours, whose every answer has a deadline."""

    def hypervisor(ledger: Ledger, name: str) -> Hypervisor:
        return cast("Hypervisor", _Bounded(environment.hypervisor_factory(ledger, name), _limits_of_a_vm()))

    def connector(config: Config) -> AgentConnector:
        return cast("AgentConnector", _Bounded(environment.connector_factory(config), AGENT))

    return replace(
        environment,
        host=cast("Host", _Bounded(environment.host, HOST)),
        load_config=_bounded_call(environment.load_config, "load configuration"),
        host_facts=_bounded_call(environment.host_facts, "probe host"),
        capacity=_bounded_call(environment.capacity, "measure room on host"),
        hypervisor_factory=hypervisor,
        connector_factory=connector,
        find_devices=_bounded_call(environment.find_devices, "find devices"),
        open_records=_bounded_call(environment.open_records, "open state of sandbox"),
        network_connector=cast("NetworkConnector", _Bounded(environment.network_connector, NETWORK)),
    )


def _bounded_call(function: Callable[..., Awaitable[T]], action: str) -> Callable[..., Awaitable[T]]:
    async def call(*args: Any) -> T:
        async with within(CHANGE_S, action):
            return await function(*args)

    return call
