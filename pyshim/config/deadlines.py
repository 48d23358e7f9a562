"""The table of deadlines in docs/CONFIGURATION.md. A test compares it with the constants in the code.

A deadline ends a wait for a hung program. Each is several times the longest wait seen on a busy host.
"""

from typing import NamedTuple

from pyshim.config.keys import Table


class WaitLimit(NamedTuple):
    """One deadline. Either `key` of `table` sets it, or the code's `constant` has the value `seconds`."""

    waits_for: str
    then: str
    """What happens at the deadline."""
    constant: str = ""
    """Dotted, with its module."""
    seconds: float = 0.0
    table: Table = Table.HYPERVISOR
    key: str = ""


_START, _CALL = "the sandbox does not start", "the call fails"

DEADLINES: tuple[WaitLimit, ...] = (
    WaitLimit("reading files, cgroups, device nodes", _CALL, "pyshim.concurrency.deadlines.READ_S", 30),
    WaitLimit("one change on the host: mount, cgroup, directory", _CALL, "pyshim.concurrency.deadlines.CHANGE_S", 30),
    WaitLimit(
        "virtiofsd to report which of the two programs it is",
        _START,
        "pyshim.resources.volumes.host.virtiofsd_flavours._PROBE_TIMEOUT_S",
        25,
    ),
    WaitLimit("an OCI hook without a timeout", "it is killed", "pyshim.host.processes.hooks.DEFAULT_TIMEOUT_S", 120),
    WaitLimit("the pod's network namespace", _START, "pyshim.resources.network.host.pod_network.TIMEOUT_S", 30),
    WaitLimit("the search for the pod's devices", _START, "pyshim.resources.devices.host.finder.TIMEOUT_S", 25),
    WaitLimit("QEMU's greeting, or vhost-device-vsock's connection", _START, key="start_timeout"),
    WaitLimit(
        "QEMU's greeting with passed-through devices, at least",
        _START,
        "pyshim.resources.devices.plan.devices.PASSING_TIMEOUT_S",
        120,
    ),
    WaitLimit("QEMU's answer to a command", _CALL, "hypervisors.qemu.qmp.COMMAND_TIMEOUT_S", 25),
    WaitLimit("the program that serves a disk, during plugging", _CALL, "hypervisors.qemu.disks.ANSWER_TIMEOUT_S", 10),
    WaitLimit("QEMU to plug a passed-through device", _CALL, "hypervisors.qemu.pci.VFIO_TIMEOUT_S", 120),
    WaitLimit("the guest to release a device", _CALL, "hypervisors.qemu.qmp.UNPLUG_TIMEOUT_S", 15),
    WaitLimit("virtio-mem to grow", _CALL, "hypervisors.qemu.memory.TOTAL_TIMEOUT_S", 120),
    WaitLimit("one CONNECT of a hybrid vsock", "it is repeated", "pyshim.agent.connect.HANDSHAKE_S", 10),
    WaitLimit("the first answer of the guest's agent", _START, table=Table.AGENT, key="dial_timeout"),
    WaitLimit(
        "the same under emulation, if the key is below 10 s",
        _START,
        "pyshim.pod.plan.sandbox.EMULATED_BOOT_S",
        60,
    ),
    WaitLimit("a device to appear in the guest", _CALL, table=Table.AGENT, key="hotplug_timeout"),
    WaitLimit("the guest to put vCPUs online", _CALL, "guest.agent.calls.sandbox._ONLINE_TIMEOUT_S", 30),
    WaitLimit("a file system's driver in the guest", _CALL, "guest.agent.mounts._DRIVER_WAIT_S", 30),
    WaitLimit("the agent's answer to CreateContainer", _CALL, table=Table.RUNTIME, key="create_container_timeout"),
    WaitLimit("the agent's answer to another request", _CALL, table=Table.AGENT, key="request_timeout"),
    WaitLimit("the guest to end its sandbox", "the VM is ended", "pyshim.pod.sandbox.DESTROY_TIMEOUT_S", 3),
    WaitLimit("QEMU to end after `quit`", "it is killed", "hypervisors.qemu.process.QUIT_GRACE_S", 2),
    WaitLimit("one step of an undo", "it stays in the ledger", "pyshim.concurrency.deadlines.UNDO_S", 10),
)
