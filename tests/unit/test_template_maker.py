"""Making a template: what is saved, and that no VM is left."""

import asyncio

import pytest

from pyshim.model.errors import ShimError, Unavailable
from pyshim.model.guest import AgentAddress
from pyshim.template_maker import make_template
from tests.fakes.host import FakeHost, FakeLedger, Faults
from tests.fakes.inputs import config, host, spec
from tests.fakes.sandbox_plans import planned
from tests.fakes.vm import FakeVm

pytestmark = pytest.mark.usefixtures("fast_clock")


class SavableFakeVm(FakeVm):
    def __init__(self, faults: Faults) -> None:
        super().__init__(faults.hit, FakeLedger(FakeHost(faults)))
        self.agents = 0
        """Connected agents."""
        self.saved_with: list[tuple[str, int]] = []
        """Directory and number of connected agents of each save."""

    async def save_machine(self, directory: str) -> None:
        self._failpoint("save")
        self._in_phase("save", "running")
        self.saved_with.append((directory, self.agents))


class FakeConnector:
    def __init__(self, vm: SavableFakeVm, faults: Faults) -> None:
        self._vm = vm
        self._faults = faults

    async def connect(self, address: AgentAddress, timeout_s: float) -> "FakeConnector":
        self._faults.hit("connect")
        self._vm.agents += 1
        return self

    async def close(self) -> None:
        self._vm.agents -= 1


async def make(vm: SavableFakeVm, faults: Faults, connector: object = None) -> None:
    await make_template(
        planned(config(), host(), spec()).local_vm,
        "/templates/t1",
        hypervisor=vm,
        connector=connector or FakeConnector(vm, faults),  # type: ignore[arg-type]
        boot_timeout_s=60,
    )


async def test_the_machine_is_saved_without_a_connected_client_and_its_vm_has_ended() -> None:
    vm = SavableFakeVm(faults := Faults())

    await make(vm, faults)

    assert vm.saved_with == [("/templates/t1", 0)]
    assert not vm.is_running


@pytest.mark.parametrize("step", ["create_vm", "start_vm", "connect", "save"])
async def test_after_a_failed_step_no_vm_is_left(step: str) -> None:
    vm = SavableFakeVm(faults := Faults())
    faults.plan({step: 1})

    with pytest.raises(ShimError):
        await make(vm, faults)

    assert not vm.is_running
    assert vm.saved_with == []


async def test_a_vm_that_ends_while_it_boots_is_the_error_and_is_not_waited_for() -> None:
    class SilentConnector:
        async def connect(self, address: AgentAddress, timeout_s: float) -> FakeConnector:
            vm.die("QEMU ended by signal 9")
            await asyncio.Event().wait()
            raise AssertionError

    vm = SavableFakeVm(faults := Faults())

    with pytest.raises(Unavailable, match=r"boot vm '.+': QEMU ended by signal 9"):
        await make(vm, faults, SilentConnector())

    assert vm.saved_with == []
