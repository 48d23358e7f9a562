"""QEMU as the VMM: an argv that is a pure value, and a conversation over QMP.

`cmdline.py` and `devices.py` decide the argv and touch nothing; `vm.py` is the driver: it spawns, starts, stops and
watches; `qmp.py` is the typed layer over the `qemu.qmp` library; `hotplug.py` changes a running VM; `console.py` reads
what the guest says; `exits.py` says how a VM ended. Read `vm.py` first.
"""
