"""Drivers that run one virtual machine each, behind the protocol in `base.py`.

Code outside this package does not depend on the kind of driver; it reads `Capabilities`. Read `base.py` first, then
`qemu/`.
"""
