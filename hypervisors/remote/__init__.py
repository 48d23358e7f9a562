"""The driver of VMs that are not on this host: a service makes them (peer pods), told what by Kata's remote protocol.

`service.py` speaks the protocol and is the only module with its protobuf types; `vm.py` is one VM's life. Start there.
"""
