"""The forwarder: a node reaches the agent of a peer pod's guest through it, over TCP and TLS.

A peer pod's VM is not on the pod's node, so its agent is not reachable by vsock or a serial port, only by network. The
forwarder listens there, accepts only clients with a certificate of the VM's own authority, and copies bytes between
them and the agent's unix socket (`forward.py`), without parsing them.

With `forwarder.port=N` on the kernel command line, the agent starts it as a child and moves to a new network namespace.
Containers share that one, so they see neither the VM's interface nor the forwarder's port. The forwarder's keys are on
a read-only disk (`material.py`).
"""
