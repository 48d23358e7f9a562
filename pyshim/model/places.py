"""The names and directories by which a sandbox's resources are found on the host.

The shim makes them, `delete` and `pyshim cleanup` find them again when the ledger is lost. Most are Kata's.
"""

STATE_ROOT = "/run/vc/sbs"
"""A directory for each sandbox, with its state."""
REGISTER = "/run/pyshim/sandboxes"
"""A file for each sandbox, which says which shim of ours made it."""
VM_ROOT = "/run/vc/vm"
"""A directory for each VM, with its sockets."""
SHARED_ROOT = "/run/kata-containers/shared/sandboxes"
"""A directory for each sandbox, with the tree that its guest sees."""
DIRECT_VOLUMES = "/run/kata-containers/shared/direct-volumes"
"""CSI drivers record volumes here, and the shim marks those that a sandbox uses."""
SWAP_ROOT = "/run/kata-containers/swap"
"""Default of `guest_swap_path`."""
METRICS_DIRECTORY = "/run/pyshim/metrics"
"""Has a read-only socket for each sandbox, named after its id: a monitor needs no other access."""
LOST_VMS = "/run/pyshim/lost-vms"
"""A file for each remote VM that its service has forgotten, named by its id. A reboot of the node removes them, as it
removes the ledgers."""
CGROUP_ROOT = "/sys/fs/cgroup"

VMM_NAME = "sandbox-"
"""The beginning of `-name` of a VMM, before the sandbox's id."""
PROBE_NAME = "sev-of-"
"""The beginning of `-name` of the QEMU that is asked for the host's encryption, before the sandbox's id."""
QMP_CHARDEV = "qmp0"
"""The id of the monitor's chardev of every VMM of ours, which Kata's VMMs lack."""
