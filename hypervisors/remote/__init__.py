"""The driver of VMs that a service makes outside this host (peer pods), by Kata's remote hypervisor protocol.

Start with `vm.py`, one VM's life. `service.py` speaks the protocol and alone has its protobuf types.
"""
