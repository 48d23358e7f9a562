"""Integration tests: a real containerd, a real QEMU, a real guest.

`framework/` holds what the tests stand on (a private containerd, a `ctr` wrapper, leak checks, evidence on failure);
there is one test
file per feature. Everything runs inside an *enclosure* (framework/enclosure.py): own mount, network, pid, ipc, uts
and cgroup
namespaces, so that the real default paths are used and nothing on the machine is touched. Read framework/enclosure.py
first.

Run it with `make test`, or one file with `scripts/integration integration/test_exec.py`.
"""
