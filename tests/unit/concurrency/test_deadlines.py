"""Every wait on a neighbour ends with an error that names the step: the deadlines of the real adapters' calls."""

import asyncio
import inspect
from collections.abc import Callable
from types import SimpleNamespace as Some
from typing import Any

import pytest

from hypervisors.base import Hypervisor
from hypervisors.qemu.vm import Phase, QemuVm
from hypervisors.remote.vm import RemoteHypervisor
from pyshim import serve
from pyshim.agent.connect import Connector
from pyshim.concurrency.deadlines import CHANGE_S, deadline_of, within, within_s
from pyshim.host.processes.children import Children
from pyshim.model import seams
from pyshim.model.errors import DeadlineExceeded, ShimError
from pyshim.model.guest import UnixAddress
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.oci import OciHook
from pyshim.model.vm import VfioDevice, VmConfig
from pyshim.resources.cgroups.host.sandbox_cgroups import LinuxCgroups
from pyshim.resources.linux import LinuxHost
from pyshim.resources.network.host.pod_network import HostNetworkConnector
from tests.fakes.clock import run_fast_forward
from tests.fakes.deadlines import deadlines_of
from tests.fakes.disks import disk
from tests.fakes.ledger import FakeLedger
from tests.fakes.vm_config import vm_config

CONFIG = vm_config(start_timeout_s=100, stop_timeout_s=200)
GROUPS = (Some(path="/a"), Some(path="/b"))
FUNCTION = VfioDevice(id="gpu", host_address="0000:01:00.0", iommufd=False)

# The call, its arguments after the object, and the error when it is not done in time.
CALLS: list[tuple[Callable[..., object], tuple[object, ...], str]] = [
    (LinuxHost.read_bytes, ("/p", 9), "read '/p': not done within 30 s"),
    (LinuxHost.source_facts, ("/p", ""), "look at '/p': not done within 30 s"),
    (LinuxHost.list_tree, ("/p",), "list '/p': not done within 30 s"),
    (LinuxHost.read_piece, ("/p", "x", 0, 1), "read '/p/x': not done within 30 s"),
    (LinuxHost.make_disk_file, ("/p", 9), "make disk '/p': not done within 30 s"),
    (LinuxHost.write_bytes, ("/p", b"", 0), "write '/p': not done within 30 s"),
    (LinuxHost.make_directory, ("/p", 0), "make directory '/p': not done within 30 s"),
    (LinuxHost.disk_bytes, ("/p",), "measure '/p': not done within 30 s"),
    (LinuxHost.mount, (Some(source="{s}", target="/t"),), "mount '{s}' on '/t': not done within 30 s"),
    (LinuxHost.start_virtiofsd, (Some(binary="/v"), None), "start virtiofsd '/v': not done within 30 s"),
    (LinuxHost.undo, (LedgerEntry(kind=ResourceKind.MOUNT, key="/t"),), "release mount '/t': not done within 30 s"),
    (LinuxCgroups.occupants, (GROUPS,), "look into cgroups '/a', '/b': not done within 30 s"),
    (LinuxCgroups.make, (GROUPS,), "make cgroups '/a', '/b': not done within 30 s"),
    (LinuxCgroups.start_scope, (Some(unit="a.scope"),), "start scope 'a.scope': not done within 30 s"),
    (LinuxCgroups.join, (GROUPS[0], (1,)), "join cgroup '/a': not done within 30 s"),
    (LinuxCgroups.join_family, (GROUPS[0], (1,)), "join cgroup '/a': not done within 30 s"),
    (LinuxCgroups.join_threads, (GROUPS[0], (1,)), "move threads into cgroup '/a': not done within 30 s"),
    (LinuxCgroups.leave, (GROUPS,), "leave cgroups: not done within 30 s"),
    (LinuxCgroups.apply, (GROUPS[0], ()), "set limits of cgroup '/a': not done within 30 s"),
    (LinuxCgroups.allowed, (GROUPS[0], "mems"), "read cpuset.mems of cgroup '/a': not done within 30 s"),
    (LinuxCgroups.oom, (GROUPS[0],), "read oom counters of cgroup '/a': not done within 30 s"),
    (LinuxCgroups.device_rules, ((),), "look at device nodes: not done within 30 s"),
    (LinuxCgroups.pin, (7, (0,)), "pin thread 7: not done within 30 s"),
    (
        LinuxHost.run_hook,
        ("prestart", OciHook(path="/h", timeout=5), b""),
        "run prestart hook '/h': not done within 15 s",
    ),
    (QemuVm.create, (CONFIG,), f"create vm '{CONFIG.sandbox_id}': not done within 110 s"),
    (QemuVm.start, (), "start vm: not done within 110 s"),
    (QemuVm.stop, (), "stop vm: not done within 210 s"),
    (QemuVm.pause, (), "pause vm: not done within 30 s"),
    (QemuVm.resume, (), "resume vm: not done within 30 s"),
    (QemuVm.plug, (disk("sda", "/dev/sda"),), "plug device 'sda': not done within 30 s"),
    (QemuVm.plug, (FUNCTION,), "plug device 'gpu': not done within 150 s"),
    (QemuVm.unplug, ("d",), "unplug device 'd': not done within 30 s"),
    (QemuVm.resize_disk, ("d", 9), "resize disk 'd' to 9 bytes: not done within 30 s"),
    (QemuVm.resize_vcpus, (3,), "resize vm to 3 vCPUs: not done within 150 s"),
    (QemuVm.resize_memory, (512,), "resize vm to 512 MiB: not done within 150 s"),
    (QemuVm.vcpu_thread_ids, (), "list vCPU threads of vm: not done within 30 s"),
    (RemoteHypervisor.create, (CONFIG,), f"create vm '{CONFIG.sandbox_id}': not done within 110 s"),
    (RemoteHypervisor.start, (), "start vm: not done within 110 s"),
    (RemoteHypervisor.stop, (), "stop vm: not done within 210 s"),
    (
        HostNetworkConnector.connect_direct,
        (None, None, None),
        "connect directly attached network: not done within 40 s",
    ),
    (Connector.connect, (UnixAddress("/a.sock"), 45), "connect agent 'unix:///a.sock': not done within 55 s"),
    (serve._Daemon._host_facts, (), "probe host: not done within 30 s"),
    (serve._Daemon._capacity, (None,), "measure room on host: not done within 30 s"),
]


@pytest.mark.parametrize(("call", "args", "text"), CALLS, ids=[f"{call.__qualname__}" for call, _, _ in CALLS])
def test_a_call_that_hangs_ends_with_an_error_that_names_it(
    call: Callable[..., object], args: tuple[object, ...], text: str
) -> None:
    with pytest.raises(DeadlineExceeded) as error:
        run_fast_forward(hang(call, Some(_vm=CONFIG), *args))

    assert str(error.value) == text


async def hang(call: Callable[..., object], *args: object, **named: object) -> None:
    """The call, made to wait for ever under its own deadline."""
    deadline = deadline_of(call)
    assert deadline is not None
    async with deadline.of_call(args, named):
        await asyncio.get_running_loop().create_future()


def test_arguments_by_name_are_named_as_well() -> None:
    with pytest.raises(DeadlineExceeded, match="open streams of 'e1': not done within 30 s"):
        run_fast_forward(hang(LinuxHost.open_streams, None, None, namespace="n", process_id="e1"))
    with pytest.raises(DeadlineExceeded, match="connect network namespace '/netns': not done within 40 s"):
        run_fast_forward(hang(HostNetworkConnector.connect, None, "/netns", None, None, iommufd=False))


SEAMS = [
    (seams.Host, LinuxHost),
    (seams.Cgroups, LinuxCgroups),
    (Hypervisor, QemuVm),
    (Hypervisor, RemoteHypervisor),
    (seams.NetworkConnector, HostNetworkConnector),
    (seams.AgentConnector, Connector),
]
ENDLESS = {"wait"}
"""Calls that answer when something ends, whenever that is."""


@pytest.mark.parametrize(("seam", "adapter"), SEAMS, ids=[adapter.__name__ for _, adapter in SEAMS])
def test_every_wait_on_a_neighbour_has_a_deadline_but_the_one_for_its_end(seam: type, adapter: type) -> None:
    calls = {name for name, call in vars(seam).items() if inspect.iscoroutinefunction(call)}
    bounded = {name for name in calls if deadline_of(getattr(adapter, name)) is not None}

    assert calls - bounded - ENDLESS == {name for name in calls - ENDLESS if never_waits(getattr(adapter, name))}
    assert not bounded & ENDLESS


def never_waits(call: Callable[..., object]) -> bool:
    """A remote VM refuses most calls at once."""
    return deadline_of(call) is None and "await " not in inspect.getsource(call)


@pytest.mark.usefixtures("fast_clock")
async def test_a_vmm_that_never_answers_is_given_up() -> None:
    vm: Any = QemuVm(ledger=FakeLedger(), children=Children())
    vm._vm, vm._phase = CONFIG, Phase.RUNNING
    vm._process = Some(exit=None, monitor=Some(stop=asyncio.Event().wait))
    with pytest.raises(DeadlineExceeded, match="pause vm: not done within 30 s"):
        await vm.pause()


class _Patient:
    """A driver whose every call takes a given time."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self._vm: VmConfig | None = None

    async def create(self, config: VmConfig) -> None:
        self._vm = config

    async def start(self) -> None:
        await asyncio.sleep(self._takes_s)

    async def stop(self) -> None:
        await asyncio.sleep(self._takes_s)


@pytest.mark.parametrize("driver", [QemuVm, RemoteHypervisor])
@pytest.mark.parametrize("name", ["start", "stop"])
def test_start_and_stop_may_take_as_long_as_the_vms_config_says(driver: type, name: str) -> None:
    vm: Any = deadlines_of(driver)(type("Slow", (_Patient,), dict(vars(_Patient))))(2 * CHANGE_S)

    async def body(config: VmConfig) -> None:
        await vm.create(config)
        await getattr(vm, name)()

    run_fast_forward(body(vm_config(start_timeout_s=3 * CHANGE_S, stop_timeout_s=3 * CHANGE_S)))

    with pytest.raises(ShimError, match=f"{name} vm: not done within 30 s"):
        run_fast_forward(body(vm_config(start_timeout_s=1, stop_timeout_s=1)))


async def test_a_call_in_time_gives_its_result_and_its_errors_pass() -> None:
    @within_s(1, "dance with '{partner}'")
    async def dance(partner: str, *, fails: bool = False) -> str:
        if fails:
            raise TimeoutError("theirs")
        return partner

    assert await dance("me") == "me"
    with pytest.raises(TimeoutError, match="theirs"):
        await dance("me", fails=True)


async def test_a_deadline_is_distinguished_from_its_callers() -> None:
    with pytest.raises(DeadlineExceeded, match=r"mount 'a': not done within 0\.01 s"):
        async with within(0.01, "mount 'a'"):
            await asyncio.sleep(60)
    with pytest.raises(TimeoutError, match="theirs"):
        async with within(60, "mount 'a'"):
            raise TimeoutError("theirs")
