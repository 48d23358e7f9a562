"""The driver for VMs that a service makes outside this host (peer pods), by Kata's remote hypervisor protocol.

Read `vm.py`, the driver, first. `service.py` is the client of the service; only it uses the protocol's protobuf types.
"""
