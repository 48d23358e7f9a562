"""The driver for QEMU: it starts QEMU with an argv and controls it over QMP.

Read `vm.py`, the driver, first, then `process.py`, which watches QEMU until its exit. `cmdline.py` builds the argv
(pure) from the options in `devices.py`, `memory.py`, `block.py` and `pci.py`. `isolation.py` decides what QEMU may use
of the host. `qmp.py` is the typed layer over the `qemu.qmp` library, `hotplug.py` changes a running VM, `console.py`
reads the guest's consoles, and `exits.py` decides how a VM ended.
"""
