"""How long each neighbour is waited for: data for docs/CONFIGURATION.md, compared by a test with the code's constants.

A deadline ends what is hung; it is several times what a slow neighbour on a crowded host was seen to take.
"""

from typing import NamedTuple

from pyshim.config.keys import Table


class WaitLimit(NamedTuple):
    """One wait: `key` of `table` decides it, or else `constant`, a dotted name in the code, says `seconds`."""

    waits_for: str
    then: str
    constant: str = ""
    seconds: float = 0.0
    table: Table = Table.HYPERVISOR
    key: str = ""


_START, _CALL = "the sandbox does not start", "the call fails"

DEADLINES: tuple[WaitLimit, ...] = (
    WaitLimit("a look at files, cgroups, device nodes", _CALL, "pyshim.concurrency.deadlines.READ_S", 30),
    WaitLimit("one change on the host: mount, cgroup, directory", _CALL, "pyshim.concurrency.deadlines.CHANGE_S", 30),
    WaitLimit(
        "virtiofsd's answer which program it is",
        _START,
        "pyshim.resources.volumes.host.virtiofsd_flavours._PROBE_TIMEOUT_S",
        25,
    ),
    WaitLimit("an OCI hook without a timeout", "it is killed", "pyshim.host.processes.hooks.DEFAULT_TIMEOUT_S", 120),
    WaitLimit("the pod's network namespace", _START, "pyshim.resources.network.host.connector.TIMEOUT_S", 30),
    WaitLimit("the search for the pod's devices", _START, "pyshim.resources.devices.host.finder.TIMEOUT_S", 25),
    WaitLimit("QEMU's greeting, or a connection of vhost-device-vsock's", _START, key="start_timeout"),
    WaitLimit(
        "QEMU's greeting with devices passed through, at least",
        _START,
        "pyshim.resources.devices.plan.devices.PASSING_TIMEOUT_S",
        120,
    ),
    WaitLimit("QEMU's answer to a command", _CALL, "hypervisors.qemu.qmp.COMMAND_TIMEOUT_S", 25),
    WaitLimit(
        "the program that serves a disk, while it is plugged", _CALL, "hypervisors.qemu.vhost_user.ANSWER_TIMEOUT_S", 10
    ),
    WaitLimit("QEMU to take a device passed through", _CALL, "hypervisors.qemu.passthrough.VFIO_TIMEOUT_S", 120),
    WaitLimit("the guest to let go of a device", _CALL, "hypervisors.qemu.qmp.UNPLUG_TIMEOUT_S", 15),
    WaitLimit("virtio-mem to grow", _CALL, "hypervisors.qemu.virtio_mem.TOTAL_TIMEOUT_S", 120),
    WaitLimit("one CONNECT of a hybrid vsock", "it is tried again", "pyshim.agent.connect.HANDSHAKE_S", 10),
    WaitLimit("the first answer of the guest's agent", _START, table=Table.AGENT, key="dial_timeout"),
    WaitLimit(
        "the same under emulation, where the key says less than 10 s",
        _START,
        "pyshim.pod.plan.sandbox.EMULATED_BOOT_S",
        60,
    ),
    WaitLimit("a device to show up in the guest", _CALL, table=Table.AGENT, key="hotplug_timeout"),
    WaitLimit("the guest to put vCPUs online", _CALL, "guest.agent.calls.guest._ONLINE_TIMEOUT_S", 30),
    WaitLimit("a file system's driver in the guest", _CALL, "guest.agent.mounts._DRIVER_WAIT_S", 30),
    WaitLimit("the agent's answer to CreateContainer", _CALL, table=Table.RUNTIME, key="create_container_timeout"),
    WaitLimit("the agent's answer to another request", _CALL, table=Table.AGENT, key="request_timeout"),
    WaitLimit("the guest to end what it holds", "the VM is ended", "pyshim.pod.sandbox.DESTROY_TIMEOUT_S", 3),
    WaitLimit("QEMU to end when asked", "it is killed", "hypervisors.qemu.vm.QUIT_GRACE_S", 2),
    WaitLimit("one step of an undo", "it stays in the ledger", "pyshim.concurrency.deadlines.UNDO_S", 10),
)
