"""A peer for the remote hypervisor: a server of its protocol whose VMs are real, on this machine.

Where pods run in VMs of a cloud, a daemon on the node makes these VMs: it speaks `hypervisor.Hypervisor` to the shim
(ttrpc over a unix socket, protos/hypervisor.proto), and passes the agent's calls on over TCP and TLS to a forwarder in
the VM. This peer is such a daemon whose cloud is QEMU: it boots our guest image, with user networking that leads
nowhere but to the forwarder's port, and behaves as the cloud API adaptor does where a client can tell: order of calls,
paths, refusals and their words. Unlike it, VMs and what is known of them survive the daemon, and the next one finds
them. A pod's own network is not carried into its VM: its containers have a loopback and no more.

How to use it by hand, and to point a shim at it, is in docs/REMOTE.md.

    peer.py          read first: the calls, and what is known of each VM
    machine.py       one VM: QEMU's argv, its process and its port
    disks.py         what the VM is given to read
    certificates.py  an authority of the peer's own
    proxy.py         from the agent's unix socket to TLS
    service.py       the ttrpc edge, where faults strike
    faults.py        failures on demand, from a file
    client.py        the other side of the protocol, for tests and by hand
"""
