"""Drivers that run one virtual machine each, behind the protocol in `base.py`.

Nothing outside this package asks which driver it is; it asks `Capabilities`. Read `base.py` first, then `qemu/`.
"""
