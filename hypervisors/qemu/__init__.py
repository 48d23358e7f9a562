"""The driver for QEMU: it starts QEMU with an argv and controls it over QMP.

Read `vm.py`, the driver, first, then `process.py`, which watches QEMU until its exit and decides how the VM ended.
`cmdline.py` builds the argv (pure) from the options in `devices.py`, `memory.py`, `disks.py`, `pci.py` and `guards.py`.
`isolation.py` decides what QEMU may use of the host. `qmp.py` is the typed layer over the `qemu.qmp` library,
`hotplug.py` changes a running VM, and `console.py` reads the guest's consoles.
"""
