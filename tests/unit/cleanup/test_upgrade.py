"""What a shim of a former release left is read by this release, and its `cleanup` undoes it.

tests/golden/state/VERSION was written by that release's own code: a pod of two containers whose shim has died.
"""

import os
import shutil
import socket
from pathlib import Path

import pytest

from pyshim.cleanup.names import Places
from pyshim.host import syscalls
from pyshim.model.ledger import ResourceKind
from pyshim.model.places import REGISTER, SHARED_ROOT, STATE_ROOT, VM_ROOT
from pyshim.model.sandbox import SandboxStatus
from pyshim.node.cli import cleanup
from pyshim.state.store import StateStore

PID_NAMESPACE = 4026531836
"""In the states: the kernel's first one. What a shim of another one left is not touched."""
VERSIONS = {"0.1.0": "", "0.2.0": "0.2.0"}
"""Of the shim, in the state: 0.1.0 did not write it."""


@pytest.fixture(params=VERSIONS)
def left(request: pytest.FixtureRequest) -> Path:
    return Path(__file__).parents[2] / "golden" / "state" / str(request.param)


def test_a_state_of_the_former_release_is_read_whole(left: Path) -> None:
    store = StateStore(root=str(left / "sbs"), register=str(left / "register"))

    state, entered = store.load("sb1"), store.entered("sb1")

    assert entered == state.shim
    assert (state.shim.pid, state.shim.version) == (4194303, VERSIONS[left.name])
    assert [entry.kind for entry in state.ledger].count(ResourceKind.PROCESS) == 2
    assert state.snapshot is not None
    assert (state.snapshot.status, len(state.snapshot.containers)) == (SandboxStatus.RUNNING, 2)


@pytest.mark.root
@pytest.mark.skipif(os.stat("/proc/self/ns/pid").st_ino != PID_NAMESPACE, reason="needs the states' pid namespace")
def test_cleanup_undoes_what_a_shim_of_the_former_release_left(left: Path, private_mounts: None) -> None:
    syscalls.mount("tmpfs", "/run", "tmpfs", 0, "")
    shutil.copytree(left / "sbs", STATE_ROOT)
    shutil.copytree(left / "register", REGISTER)
    vm_dir, shared = Path(VM_ROOT, "sb1"), Path(SHARED_ROOT, "sb1", "shared")
    for directory in (vm_dir, shared):
        directory.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{vm_dir}/virtiofsd.sock")
    syscalls.mount("tmpfs", str(shared), "tmpfs", 0, "")
    (shared / "file").touch()

    node = cleanup.CleanupPlaces(store=StateStore(register=REGISTER), places=Places())
    code = cleanup.command.main(["sb1"], obj=node, standalone_mode=False)

    assert code == cleanup.CLEAN
    assert [name for root in (STATE_ROOT, REGISTER, VM_ROOT, SHARED_ROOT) for name in os.listdir(root)] == []
    assert str(shared) not in Path("/proc/self/mountinfo").read_text()
